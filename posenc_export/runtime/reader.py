"""From tokens of rows to calls of a graph, and from what a session held before a call to what it holds behind it."""

from typing import Callable, Dict, List, Tuple

import numpy as np

from posenc_export.runtime import feeds
from posenc_export.runtime.committed import Caches, Call, Committed
from posenc_export.runtime.manifest import Manifest
from posenc_export.runtime.memory import Memory
from posenc_export.runtime.rows import Beside, Given
from posenc_export.runtime.stepper import Stepper


class Reader:
    """Reads tokens into states; the states themselves belong to the caller.

    Args:
        manifest: description of the graph.
        memory: of the session; told which slots are written.
        device: what runs the graph, Model.provider.
    """

    def __init__(self, manifest: Manifest, memory: Memory, device: str) -> None:
        self.manifest, self.memory = manifest, memory
        self._fewest = 0 if device == "cpu" else 1  # logits of a row that are asked for: CUDA has no kernel launch over nothing
        self._selects = manifest.input("logits_index") is not None  # the graph gives the wanted outputs alone

    def read(self, state: Committed, first: int, given: Given, commit: Callable[[Committed], None]) -> List[List[np.ndarray]]:
        """Feed rows from row `first` on, chunk by chunk; the wanted outputs of each row by chunk. The state behind each chunk is handed to `commit`."""
        outputs: List[List[np.ndarray]] = [[] for _ in given.tokens]
        for begin in range(0, int(given.counts.max()), given.chunk):
            end = begin + given.chunk
            numbers = {name: [part[:, begin:end] for part in parts] for name, parts in given.numbers.items()}
            made, state = self.feed(state, first, [row[begin:end] for row in given.tokens], numbers, given.kept_of(begin, end))
            commit(state)
            for row, part in enumerate(made):
                outputs[row].append(part)
        return outputs

    def feed(self, state: Committed, first: int, tokens: List[np.ndarray], numbers: Beside, kept: np.ndarray) -> Tuple[List[np.ndarray], Committed]:
        """One call, or one per row where the graph takes a single row, on the rows from `first` on; the state behind it, and of each row the outputs of its
        last tokens, as many as `kept` [rows] says."""
        counts = np.array([len(row) for row in tokens], np.int64)
        window = slice(first, first + len(tokens))
        numbers = self.with_places(state, window, counts, numbers)
        assert state.caches is not None
        new = int(counts.max())
        caches = state.caches.reserve(self.memory.used(state) + new, window.stop)
        self._remember(state, first, tokens, numbers, caches)
        self.memory.written = max(self.memory.written, self.memory.used(state) + new)
        made, caches = caches.run(self._calls(state, first, tokens, numbers, counts, kept))
        by_row = dict(made)
        none = np.zeros((0, int(self.manifest.outputs[0].axes[-1])), self.manifest.outputs[0].dtype)
        outputs = [self._wanted(by_row.get(first + row, none), int(count), int(last)) for row, (count, last) in enumerate(zip(counts, kept, strict=True))]
        held = state.held.copy()
        held[window] += counts
        slots = np.concatenate((state.slots, np.arange(new)[None] < counts[:, None]), axis=1) if self.memory.columns else state.slots
        return outputs, state.replace(held=held, slots=slots, caches=caches)

    def _wanted(self, output: np.ndarray, count: int, kept: int) -> np.ndarray:
        """Of a row of `count` tokens the outputs of the last `kept`; without those beside them, which would stay in memory."""
        if self._selects or kept == count:
            return output[:kept]
        return output[count - kept : count].copy()

    def ready_to_step(self, state: Committed) -> Committed:
        """The state with a stepper, which takes tokens of every row from here.

        Raises:
            ValueError: the range of positions or the caches are used up.
        """
        manifest, memory = self.manifest, self.memory
        source, one = manifest.inputs[0], np.ones(state.rows, np.int64)
        feeds.check_room(manifest, memory.most, state.start, state.held, one)
        assert state.caches is not None
        caches = state.caches.reserve(memory.used(state) + 1, state.rows)
        x = np.zeros([state.rows, 1, *(int(axis) for axis in source.axes[2:])], source.dtype)
        numbers = feeds.padded(list(x), self.with_places(state, slice(None), one, {}))[1]
        built = feeds.build(manifest, x, numbers, one, one, state.held, state.start, state.slots)
        room = manifest.max_positions - int((state.start + state.held).max())
        if any(each.update == "in_place" for each in manifest.states):
            room = min(room, memory.most - int(state.held.max()), caches.capacity - memory.used(state))
        # The mask is a column longer at every step: no binding can be kept.
        room = 1 if manifest.signature == "mask" else room
        given = state.encoded.arrays if state.encoded else {}
        return state.replace(caches=caches, stepper=Stepper(caches, {**built, **given}, source, manifest.vocabulary, room, given))

    def with_places(self, state: Committed, window: slice, counts: np.ndarray, numbers: Beside) -> Beside:
        """numbers with the coordinates of every token, for encodings that have them: the position on every axis unless given."""
        if not self.manifest.axes or "grid" in numbers:
            return numbers
        begins = (state.start + state.held)[window]
        return {**numbers, "grid": [np.repeat(begin + np.arange(count)[None], self.manifest.axes, 0) for begin, count in zip(begins, counts, strict=True)]}

    def remember_step(self, state: Committed, x: np.ndarray) -> None:
        """Record one token of every row x [B,*] that the stepper is about to take, where states are replaced."""
        assert state.stepper is not None
        caches, length = state.stepper.reached[1], state.length
        for row, history in enumerate(state.histories):
            states = caches.snapshot(row) if history.wants_mark(1) else None
            places = {"grid": np.full((self.manifest.axes, 1), state.start[row] + length[row])} if self.manifest.axes else {}
            history.record(int(length[row]), states, x[row : row + 1], places)

    def _remember(self, state: Committed, first: int, tokens: List[np.ndarray], numbers: Beside, caches: Caches) -> None:
        """Record tokens that are about to be fed, where states are replaced."""
        for index, part in enumerate(tokens if state.histories else []):
            if len(part):
                history = state.histories[first + index]
                states = caches.snapshot(first + index) if history.wants_mark(len(part)) else None
                history.record(int(state.held[first + index]), states, part, {name: parts[index] for name, parts in numbers.items()})

    def _calls(self, state: Committed, first: int, tokens: List[np.ndarray], numbers: Beside, counts: np.ndarray, kept: np.ndarray) -> List[Call]:
        """One for all rows; or one for each, where the graph continues a single row at a time."""
        x, others = feeds.padded(tokens, numbers)
        held = state.held[first : first + len(tokens)]
        # Beside S > 1, a row without new tokens forbids one call: its padding would be written over its last token.
        if self.manifest.continuation_rows != 1 or len(tokens) == 1 or not held.any() or (x.shape[1] == 1 and counts.all()):
            return [self._call(state, first, x, others, counts, kept)]
        calls = []
        for row, count in enumerate(counts):
            width = x.shape[1] if self.memory.columns else int(count)
            if width:
                one = slice(row, row + 1)
                beside = {name: part[:, one, :width] for name, part in others.items()}
                calls.append(self._call(state, first + row, np.ascontiguousarray(x[one, :width]), beside, counts[one], kept[one]))
        return calls

    def _call(self, state: Committed, first: int, x: np.ndarray, others: Dict[str, np.ndarray], counts: np.ndarray, kept: np.ndarray) -> Call:
        window = slice(first, first + len(x))
        kept = np.maximum(kept, self._fewest)
        built = feeds.build(self.manifest, x, others, counts, kept, state.held[window], state.start[window], state.slots[window])
        return Call(first, len(x), {**built, **(state.encoded.of(window) if state.encoded else {})})
