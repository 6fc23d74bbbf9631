"""Feed tokens to a graph: build the graph inputs of each call, and compute the session state after
it.

Shapes: B batch, S new tokens, T columns in use, R tokens whose logits are requested.
"""

import dataclasses
import itertools
from typing import Callable, Dict, List, Tuple

import numpy as np

from posenc_export.runtime.artefact import graph_inputs
from posenc_export.runtime.artefact.graph_inputs import INPUTS, NewTokens
from posenc_export.runtime.artefact.manifest import Manifest
from posenc_export.runtime.session.arguments import PrefillArguments, TokenAttributes, check_room
from posenc_export.runtime.session.cache_manager import CacheManager
from posenc_export.runtime.session.state import Caches, Call, Feeds, SessionState
from posenc_export.runtime.session.stepper import Stepper

STEP_SLOTS = 128  # least multiple of slots that steps count


class GraphRunner:
    """Feeds tokens to the graph of a session. It holds no state of its own: methods take a session
    state and return the next one.

    Args:
        manifest: description of the graph.
        cache_manager: records which slots are written.
        provider: Model.provider.
    """

    def __init__(self, manifest: Manifest, cache_manager: CacheManager, provider: str) -> None:
        self.manifest, self.cache_manager = manifest, cache_manager
        # Smallest number of logits to request for a row: CUDA kernels cannot be launched on empty
        # tensors.
        self._fewest = 0 if provider == "cpu" else 1
        # Whether the first tokens of rows are announced with their padding, and steps count slots
        # in multiples.
        self._whole_rows = provider == "cuda"
        self._selects = (
            manifest.input("logits_index") is not None
        )  # whether the graph computes only the requested outputs

    def prefill(
        self,
        state: SessionState,
        first: int,
        arguments: PrefillArguments,
        commit: Callable[[SessionState], None],
    ) -> np.ndarray:
        """Feed rows, starting at row `first`, chunk by chunk, and `commit` the state after each.
        Return the requested outputs (PrefillArguments.padded_outputs).
        """
        chunks: List[List[np.ndarray]] = [[] for _ in arguments.tokens]
        for begin in range(0, int(arguments.counts.max()), arguments.chunk):
            end = begin + arguments.chunk
            attributes = {
                name: [values[:, begin:end] for values in rows]
                for name, rows in arguments.attributes.items()
            }
            outputs, state = self.feed(
                state,
                first,
                [row[begin:end] for row in arguments.tokens],
                attributes,
                arguments.requested_in(begin, end),
            )
            commit(state)
            for row, output in enumerate(outputs):
                chunks[row].append(output)
        return arguments.padded_outputs(chunks)

    def feed(
        self,
        state: SessionState,
        first: int,
        tokens: List[np.ndarray],
        attributes: TokenAttributes,
        requested: np.ndarray,
    ) -> Tuple[List[np.ndarray], SessionState]:
        """Run the graph once for the rows starting at `first`, or once per row if the graph takes a
        single row.

        Returns:
            For each row the outputs of its last `requested` [rows] tokens, and the state after the
            call.
        """
        assert state.caches is not None
        counts = np.array([len(row) for row in tokens], np.int64)
        rows, new, used = (
            slice(first, first + len(tokens)),
            int(counts.max()),
            self.cache_manager.used(state),
        )
        attributes = self._with_coordinates(state, rows, counts, attributes)
        caches = state.caches.reserve(used + new, rows.stop)
        self._record(state, caches, first, tokens, attributes)
        self.cache_manager.written = max(self.cache_manager.written, used + new)
        outputs, caches = caches.run(
            self._calls(state, first, tokens, attributes, counts, requested)
        )
        by_row = dict(outputs)
        none = np.zeros((0, int(self.manifest.outputs[0].axes[-1])), self.manifest.outputs[0].dtype)
        last = [
            self._last(by_row.get(first + row, none), *sizes)
            for row, sizes in enumerate(zip(counts.tolist(), requested.tolist(), strict=True))
        ]
        length = state.settled_length.copy()
        length[rows] += counts
        slots = (
            np.concatenate((state.slots, np.arange(new)[None] < counts[:, None]), axis=1)
            if self.cache_manager.columns
            else state.slots
        )
        return last, state.replace(settled_length=length, slots=slots, caches=caches)

    def read_out(self, state: SessionState, arguments: PrefillArguments) -> np.ndarray:
        """Feed whole rows, and return the second output of the graph: [B,N], or [B,S,N] with
        zeros at padding if it has one for each token.
        """
        assert state.caches is not None
        counts, tokens = arguments.counts, arguments.tokens
        attributes = self._with_coordinates(state, slice(None), counts, arguments.attributes)
        caches = state.caches.reserve(int(counts.max()), len(tokens))
        calls = [
            dataclasses.replace(call, output=1)
            for call in self._calls(state, 0, tokens, attributes, counts, counts)
        ]
        outputs = [output for _, output in caches.run(calls)[0]]
        if len(self.manifest.outputs[1].axes) == 2:
            return np.stack(outputs)
        return arguments.padded_outputs(
            [[output[:count]] for output, count in zip(outputs, counts.tolist(), strict=True)]
        )

    def with_stepper(self, state: SessionState) -> SessionState:
        """Return the state with a stepper that feeds one token per row. Raise ValueError if no
        position or no cache slot is left.
        """
        assert state.caches is not None
        manifest, cache_manager, length = self.manifest, self.cache_manager, state.settled_length
        tokens, one = manifest.inputs[0], np.ones(state.rows, np.int64)
        check_room(manifest, cache_manager.capacity, state.start, length, one)
        caches = state.caches.reserve(cache_manager.used(state) + 1, state.rows)
        x = np.zeros((state.rows, 1, *tokens.token_shape), tokens.dtype)
        feeds = self._feeds(
            state,
            slice(None),
            *_padded(list(x), self._with_coordinates(state, slice(None), one, {})),
            one,
            one,
        )
        room = manifest.max_positions - int((state.start + length).max())
        if any(each.update == "in_place" for each in manifest.states):
            room = min(
                room,
                cache_manager.capacity - int(length.max()),
                caches.capacity - cache_manager.used(state),
            )
        counters = {value.name for value in manifest.inputs if INPUTS[value.name].counts}
        slots = self._count_slots(feeds, caches.capacity, cache_manager.used(state) + 1)
        if slots:
            room = min(room, slots - cache_manager.used(state))
            counters -= {"total_sequence_length"}
        # The attention mask grows by a column at every step, so a binding serves one step only.
        room = 1 if manifest.signature == "mask" else room
        widest = 1 if manifest.continuation_rows == 1 and state.rows > 1 else manifest.chunk
        return state.replace(
            caches=caches,
            stepper=Stepper(caches, feeds, tokens, manifest.vocabulary, room, widest, counters),
        )

    def pass_feeds(self, state: SessionState, new: int) -> Feeds:
        """Return the graph inputs of a pass of `new` tokens per row at the length at which the
        stepper of the state began, with all outputs requested.
        """
        state = state.replace(stepper=None)
        assert state.caches is not None
        tokens, counts = self.manifest.inputs[0], np.full(state.rows, new)
        x = np.zeros((state.rows, new, *tokens.token_shape), tokens.dtype)
        feeds = self._feeds(
            state,
            slice(None),
            *_padded(list(x), self._with_coordinates(state, slice(None), counts, {})),
            counts,
            counts,
        )
        self._count_slots(feeds, state.caches.capacity, self.cache_manager.used(state) + new)
        return feeds

    def record_step(self, state: SessionState, x: np.ndarray) -> None:
        """Record in the histories the token of every row, x [B] or [B,E], that the stepper is
        about to feed.
        """
        assert state.stepper is not None
        self._record(
            state,
            state.stepper.reached[1],
            0,
            list(x[:, None]),
            self._with_coordinates(state, slice(None), np.ones(len(x), np.int64), {}),
        )

    def _record(
        self,
        state: SessionState,
        caches: Caches,
        first: int,
        tokens: List[np.ndarray],
        attributes: TokenAttributes,
    ) -> None:
        """Record in the histories the tokens that are about to be fed to the rows starting at
        `first`.
        """
        lengths = state.length.tolist() if state.histories else []
        for index, part in enumerate(tokens if state.histories else []):
            if len(part):
                history = state.histories[first + index]
                states = (
                    caches.snapshot(first + index) if history.needs_snapshot(len(part)) else None
                )
                history.record(
                    lengths[first + index],
                    states,
                    part,
                    {name: values[index] for name, values in attributes.items()},
                )

    def _with_coordinates(
        self, state: SessionState, rows: slice, counts: np.ndarray, attributes: TokenAttributes
    ) -> TokenAttributes:
        """Add default coordinates, the position on every axis, if the encoding has coordinates
        and none are given.
        """
        if not self.manifest.axes or "grid" in attributes:
            return attributes
        begins = (state.start + state.length)[rows]
        return {
            **attributes,
            "grid": [
                np.repeat(begin + np.arange(count)[None], self.manifest.axes, 0)
                for begin, count in zip(begins, counts, strict=True)
            ],
        }

    def _calls(
        self,
        state: SessionState,
        first: int,
        tokens: List[np.ndarray],
        attributes: TokenAttributes,
        counts: np.ndarray,
        requested: np.ndarray,
    ) -> List[Call]:
        """Return one call for all rows. If the graph continues a single row at a time, return
        one for each row, and one for neighbours that read a token each.
        """
        x, planes = _padded(tokens, attributes)
        requested, columns = np.maximum(requested, self._fewest), self.cache_manager.columns
        # With S > 1, a row without new tokens cannot share the call: its padding would be written
        # over its last token.
        settled = state.settled_length[first : first + len(tokens)]
        together = len(tokens) == 1 or not settled.any() or (x.shape[1] == 1 and counts.all())
        if self.manifest.continuation_rows != 1 or together:
            return [
                Call(
                    first,
                    len(x),
                    x.shape[1],
                    self._feeds(
                        state, slice(first, first + len(tokens)), x, planes, counts, requested
                    ),
                )
            ]
        calls = []
        for _, group in itertools.groupby(
            range(len(counts)), key=lambda row: -1 if counts[row] == 1 and not columns else row
        ):
            some = list(group)
            width = x.shape[1] if columns else int(counts[some[0]])
            if width:
                rows, in_state = (
                    slice(some[0], some[-1] + 1),
                    slice(first + some[0], first + some[-1] + 1),
                )
                part, of_rows = (
                    np.ascontiguousarray(x[rows, :width]),
                    {name: plane[:, rows, :width] for name, plane in planes.items()},
                )
                calls.append(
                    Call(
                        in_state.start,
                        len(some),
                        width,
                        self._feeds(state, in_state, part, of_rows, counts[rows], requested[rows]),
                    )
                )
        return calls

    def _feeds(
        self,
        state: SessionState,
        rows: slice,
        x: np.ndarray,
        planes: Dict[str, np.ndarray],
        counts: np.ndarray,
        requested: np.ndarray,
    ) -> Feeds:
        """Build the graph inputs of some rows that the manifest lists, by name.

        Args:
            x, planes: tokens [B,S] or [B,S,E], and their attributes [n,B,S] by name.
            counts: number of new tokens of each row [B].
            requested: number of last tokens of each row whose logits are requested [B].
        """
        length = state.settled_length[rows]
        # With a bias, GroupQueryAttention on CUDA (ONNX Runtime 1.31) subtracts S from the length
        # of each row to get its cached tokens. For a short row of a first call that is negative,
        # and shifts its causal mask. There, rows have all S columns: tokens see no padding, which
        # follows them, and the next tokens overwrite it.
        valid = (
            np.full_like(counts, x.shape[1]) if self._whole_rows and not length.any() else counts
        )
        call = NewTokens(
            x, counts, length, state.start[rows], requested, state.slots[rows], valid, planes
        )
        feeds = graph_inputs.feeds(self.manifest, call)
        return {**feeds, **state.encoder_outputs.select(rows)} if state.encoder_outputs else feeds

    def _count_slots(self, feeds: Feeds, capacity: int, needed: int) -> int:
        """Let steps count more slots than the `needed` ones of the longest row, at most a quarter
        more or STEP_SLOTS, so that inputs that depend on their number change rarely: a step that
        takes slots as an input, or that may be a CUDA graph, which does not read
        total_sequence_length again. Scores of slots that hold no token are computed too. Return the
        number of slots, or 0 if the inputs change with each step.
        """
        if "slots" not in feeds and not ("total_sequence_length" in feeds and self._whole_rows):
            return 0
        part = max(STEP_SLOTS, 1 << max(needed.bit_length() - 3, 0))
        count = min(-(-needed // part) * part, capacity)
        if "slots" in feeds:
            feeds["slots"] = np.arange(count)
        if "total_sequence_length" in feeds:
            feeds["total_sequence_length"][...] = count
        return count

    def _last(self, output: np.ndarray, count: int, requested: int) -> np.ndarray:
        """Return the outputs of the last `requested` of a row's `count` tokens: a copy, so that
        the memory of the other outputs is freed.
        """
        if self._selects or requested == count:
            return output[:requested]
        return output[count - requested : count].copy()


def _padded(
    rows: List[np.ndarray], attributes: TokenAttributes
) -> Tuple[np.ndarray, Dict[str, np.ndarray]]:
    """Right-pad rows [count,*] with zeros to [B,S,*], and the attributes [n,count] of each row
    to [n,B,S].
    """
    new = max(len(row) for row in rows)
    x = np.zeros((len(rows), new, *rows[0].shape[1:]), rows[0].dtype)
    planes = {
        name: np.zeros((len(parts[0]), len(rows), new), np.int64)
        for name, parts in attributes.items()
    }
    for row, part in enumerate(rows):
        x[row, : len(part)] = part
        for name, parts in attributes.items():
            planes[name][:, row, : len(part)] = parts[row]
    return x, planes
