"""Feed tokens to a graph: split rows into calls, and compute the session state after each call."""

from typing import Callable, Dict, List, Tuple

import numpy as np

from posenc_export.runtime.artefact.manifest import Manifest
from posenc_export.runtime.session import graph_inputs
from posenc_export.runtime.session.arguments import PrefillArguments, TokenAttributes
from posenc_export.runtime.session.cache_manager import CacheManager
from posenc_export.runtime.session.state import Caches, Call, SessionState
from posenc_export.runtime.session.stepper import Stepper


class GraphRunner:
    """Feeds tokens to the graph of a session. It holds no state of its own: methods take a session state and return the next one.

    Args:
        manifest: description of the graph.
        memory: cache memory of the session; records which slots are written.
        device: Model.provider.
    """

    def __init__(self, manifest: Manifest, memory: CacheManager, device: str) -> None:
        self.manifest, self.memory = manifest, memory
        self._fewest = 0 if device == "cpu" else 1  # smallest number of logits to request for a row: CUDA kernels cannot be launched on empty tensors
        self._whole_rows = device == "cuda"  # whether the first tokens of rows are announced with their padding (graph_inputs.count_padding)
        self._selects = manifest.input("logits_index") is not None  # whether the graph computes only the requested outputs

    def read(self, state: SessionState, first: int, given: PrefillArguments, commit: Callable[[SessionState], None]) -> List[List[np.ndarray]]:
        """Feed rows, starting at row `first`, chunk by chunk. Return the requested outputs of each row, one array per chunk.

        `commit` is called with the state after each chunk.
        """
        outputs: List[List[np.ndarray]] = [[] for _ in given.tokens]
        for begin in range(0, int(given.counts.max()), given.chunk):
            end = begin + given.chunk
            attributes = {name: [part[:, begin:end] for part in parts] for name, parts in given.attributes.items()}
            made, state = self.feed(state, first, [row[begin:end] for row in given.tokens], attributes, given.kept_of(begin, end))
            commit(state)
            for row, part in enumerate(made):
                outputs[row].append(part)
        return outputs

    def feed(
        self, state: SessionState, first: int, tokens: List[np.ndarray], attributes: TokenAttributes, kept: np.ndarray
    ) -> Tuple[List[np.ndarray], SessionState]:
        """Run the graph once for the rows starting at `first`, or once per row if the graph takes a single row.

        Returns:
            For each row the outputs of its last `kept` [rows] tokens, and the state after the call.
        """
        counts = np.array([len(row) for row in tokens], np.int64)
        window = slice(first, first + len(tokens))
        attributes = self.with_coordinates(state, window, counts, attributes)
        assert state.caches is not None
        new = int(counts.max())
        caches = state.caches.reserve(self.memory.used(state) + new, window.stop)
        self._record(state, first, tokens, attributes, caches)
        self.memory.written = max(self.memory.written, self.memory.used(state) + new)
        made, caches = caches.run(self._calls(state, first, tokens, attributes, counts, kept))
        by_row = dict(made)
        empty = np.zeros((0, int(self.manifest.outputs[0].axes[-1])), self.manifest.outputs[0].dtype)
        outputs = [self._last(by_row.get(first + row, empty), int(count), int(last)) for row, (count, last) in enumerate(zip(counts, kept, strict=True))]
        held = state.held.copy()
        held[window] += counts
        slots = np.concatenate((state.slots, np.arange(new)[None] < counts[:, None]), axis=1) if self.memory.columns else state.slots
        return outputs, state.replace(held=held, slots=slots, caches=caches)

    def _last(self, output: np.ndarray, count: int, kept: int) -> np.ndarray:
        """Return the outputs of the last `kept` of a row's `count` tokens: a copy, so that the memory of the other outputs is freed."""
        if self._selects or kept == count:
            return output[:kept]
        return output[count - kept : count].copy()

    def ready_to_step(self, state: SessionState) -> SessionState:
        """Return the state with a stepper that feeds one token per row.

        Raises:
            ValueError: no position or no cache slot is left.
        """
        manifest, memory = self.manifest, self.memory
        source, one = manifest.inputs[0], np.ones(state.rows, np.int64)
        graph_inputs.check_room(manifest, memory.most, state.start, state.held, one)
        assert state.caches is not None
        caches = state.caches.reserve(memory.used(state) + 1, state.rows)
        x = np.zeros([state.rows, 1, *(int(axis) for axis in source.axes[2:])], source.dtype)
        attributes = graph_inputs.padded(list(x), self.with_coordinates(state, slice(None), one, {}))[1]
        built = graph_inputs.build(manifest, x, attributes, one, one, state.held, state.start, state.slots)
        room = manifest.max_positions - int((state.start + state.held).max())
        if any(each.update == "in_place" for each in manifest.states):
            room = min(room, memory.most - int(state.held.max()), caches.capacity - memory.used(state))
        constant = [*(state.encoded.arrays if state.encoded else ())]
        if manifest.input("slots") is not None:
            room = min(room, graph_inputs.count_slots(built, caches.capacity) - memory.used(state))
            constant += ["slots", "total_sequence_length"]
        # The attention mask grows by a column at every step, so a binding serves one step only.
        room = 1 if manifest.signature == "mask" else room
        given = state.encoded.arrays if state.encoded else {}
        return state.replace(caches=caches, stepper=Stepper(caches, {**built, **given}, source, manifest.vocabulary, room, constant))

    def with_coordinates(self, state: SessionState, window: slice, counts: np.ndarray, attributes: TokenAttributes) -> TokenAttributes:
        """Add default coordinates, the position on every axis, if the encoding has coordinates and none are given."""
        if not self.manifest.axes or "grid" in attributes:
            return attributes
        begins = (state.start + state.held)[window]
        return {**attributes, "grid": [np.repeat(begin + np.arange(count)[None], self.manifest.axes, 0) for begin, count in zip(begins, counts, strict=True)]}

    def record_step(self, state: SessionState, x: np.ndarray) -> None:
        """Record in the histories the token of every row, x [B] or [B,E], that the stepper is about to feed."""
        assert state.stepper is not None
        caches, length = state.stepper.reached[1], state.length
        for row, history in enumerate(state.histories):
            states = caches.snapshot(row) if history.needs_snapshot(1) else None
            coordinates = {"grid": np.full((self.manifest.axes, 1), state.start[row] + length[row])} if self.manifest.axes else {}
            history.record(int(length[row]), states, x[row : row + 1], coordinates)

    def _record(self, state: SessionState, first: int, tokens: List[np.ndarray], attributes: TokenAttributes, caches: Caches) -> None:
        """Record in the histories the tokens that are about to be fed."""
        for index, part in enumerate(tokens if state.histories else []):
            if len(part):
                history = state.histories[first + index]
                states = caches.snapshot(first + index) if history.needs_snapshot(len(part)) else None
                history.record(int(state.held[first + index]), states, part, {name: parts[index] for name, parts in attributes.items()})

    def _calls(
        self, state: SessionState, first: int, tokens: List[np.ndarray], attributes: TokenAttributes, counts: np.ndarray, kept: np.ndarray
    ) -> List[Call]:
        """Return one call for all rows, or one call per row if the graph continues a single row at a time."""
        x, others = graph_inputs.padded(tokens, attributes)
        held = state.held[first : first + len(tokens)]
        # With S > 1, a row without new tokens cannot share the call: its padding would be written over its last token.
        if self.manifest.continuation_rows != 1 or len(tokens) == 1 or not held.any() or (x.shape[1] == 1 and counts.all()):
            return [self._call(state, first, x, others, counts, kept)]
        calls = []
        for row, count in enumerate(counts):
            width = x.shape[1] if self.memory.columns else int(count)
            if width:
                one = slice(row, row + 1)
                of_row = {name: part[:, one, :width] for name, part in others.items()}
                calls.append(self._call(state, first + row, np.ascontiguousarray(x[one, :width]), of_row, counts[one], kept[one]))
        return calls

    def _call(self, state: SessionState, first: int, x: np.ndarray, others: Dict[str, np.ndarray], counts: np.ndarray, kept: np.ndarray) -> Call:
        window = slice(first, first + len(x))
        kept = np.maximum(kept, self._fewest)
        built = graph_inputs.build(self.manifest, x, others, counts, kept, state.held[window], state.start[window], state.slots[window])
        if self._whole_rows and not state.held[window].any():
            graph_inputs.count_padding(built, x.shape[1])
        return Call(first, len(x), x.shape[1], {**built, **(state.encoded.select(window) if state.encoded else {})})
