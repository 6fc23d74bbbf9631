"""Read tokens: the rows of a call, the runs of the graph on them, and the state after it."""

import dataclasses
from typing import Dict, Iterator, List, Optional, Tuple

import numpy as np

from posenc_export.runtime.session import arguments, encoder_outputs, errors, prefixes
from posenc_export.runtime.session.argument_arrays import per_row
from posenc_export.runtime.session.arguments import PrefillArguments, check_room
from posenc_export.runtime.session.caches import Caches
from posenc_export.runtime.session.feeder import Feeder, RowTokens
from posenc_export.runtime.session.graph import Graph, GraphRun
from posenc_export.runtime.session.state import SessionState
from posenc_export.runtime.session.stepper import ONE_PLACE, Stepper, binding_of


def open_rows(state: SessionState, prompt: PrefillArguments) -> SessionState:
    """Return `state` if its rows have tokens, or else empty rows with memory for the first ones."""
    manifest, counts, passed = state.caches.graph.manifest, prompt.counts, prompt.passed
    if not counts.any():
        got = f"rows of {counts.tolist()} tokens"
        raise errors.expected("at least one token in at least one row", got)
    if not manifest.states:  # a model without caches reads whole rows
        state = SessionState.empty(state.caches, state.rewind)
    length = state.committed_length
    first_position = arguments.check_start(manifest, state.first_position, length, prompt)
    has_tokens = bool(length.any())
    committed = length if has_tokens else np.zeros_like(first_position)
    arguments.check_room(state.caches, first_position, committed, counts)
    outputs, encoded = state.encoder_outputs, passed.encoder is not None
    other = encoded or passed.encoder_attention_mask is not None
    if other or outputs is None or len(length) != len(first_position):
        if has_tokens and encoded:
            rule, got = "encoder only with the first tokens of a row", f"it with {length.tolist()}"
            raise errors.expected(rule, f"{got} tokens cached", "reset first")
        outputs = encoder_outputs.new(manifest, passed, len(first_position))
    if has_tokens:
        return state
    return state.opened(first_position, prompt.longest).replace(encoder_outputs=outputs)


def before_admit(
    state: SessionState, prompt: PrefillArguments, prefix: Optional[prefixes.Prefix]
) -> SessionState:
    """Return `state` with the new rows of an admit, before their tokens are read."""
    manifest, passed = state.caches.graph.manifest, prompt.passed
    arguments.check_every_row(prompt.counts, "new row")
    first_position = per_row("start", passed.start, len(prompt.tokens))
    if prefix is not None and first_position.tolist() != [0]:
        got = f"rows at {first_position.tolist()}"
        raise errors.expected("one row at position 0 after a prefix", got, "admit rows one by one")
    known = 0 if prefix is None else prefix.length
    cached = np.full_like(first_position, known)
    arguments.check_room(state.caches, first_position, cached, prompt.counts)
    outputs = encoder_outputs.new(manifest, passed, len(first_position))
    if state.encoder_outputs is not None and outputs is not None:
        outputs = state.encoder_outputs.joined(outputs)
    joined = state.joined(first_position, known + prompt.longest).replace(encoder_outputs=outputs)
    return joined if prefix is None else joined.begun(state.rows, prefix)


class Reading:
    """Runs a graph on tokens: methods take a session state and return the next one."""

    def __init__(self, graph: Graph) -> None:
        self.graph, self.manifest = graph, graph.manifest
        self.feeder = Feeder(graph.manifest, graph.provider)
        output = graph.manifest.outputs[0]
        self._no_output = np.zeros((0, int(output.axes[-1])), output.dtype)

    def chunks(
        self, state: SessionState, first: int, prompt: PrefillArguments
    ) -> Iterator[Tuple[List[np.ndarray], SessionState]]:
        """Read rows from row `first` on, and yield what `run_chunk` returns for each chunk."""
        chunk = min(prompt.chunk, state.caches.window.new or prompt.chunk)
        for begin in range(0, int(prompt.counts.max()), chunk):
            part = slice(begin, begin + chunk)
            of_rows = prompt.attributes.items()
            attributes = {name: [row[:, part] for row in rows] for name, rows in of_rows}
            requested = prompt.requested_in(part.start, part.stop)
            rows = [row[part] for row in prompt.tokens]
            tokens = RowTokens.of(first, rows, attributes, requested)
            outputs, state = self.run_chunk(state, tokens)
            yield outputs, state

    def run_chunk(
        self, state: SessionState, tokens: RowTokens
    ) -> Tuple[List[np.ndarray], SessionState]:
        """Run the graph for some rows, once or once per row. Return for each row the outputs of its
        requested tokens, and the state after the call.
        """
        first, end = tokens.first, tokens.end
        sizes = list(zip(tokens.counts.tolist(), tokens.requested.tolist(), strict=True))
        tokens = self.feeder.located(state, tokens)
        if not state.by_columns:
            filled = np.flatnonzero(tokens.counts)
            tokens = tokens.part(int(filled[0]), int(filled[-1]) + 1)
        counts, new, begin = tokens.counts, int(tokens.counts.max()), tokens.first
        # Padding of shorter rows is written behind their tokens, unless each row is fed alone.
        slots = state.used + new
        if self.manifest.continuation_rows == 1 and not state.by_columns:
            committed = state.committed_length[begin : tokens.end]
            slots = max(state.used, int((committed + counts).max()))
        caches = state.caches.reserve(slots, end)
        if state.histories:
            _record(state, caches, tokens)
        caches.mark_written(begin, state.used_by_row[begin : tokens.end] + new)
        if caches.window.size:
            caches.slide(begin, state.committed_length[begin : tokens.end], counts)
            state = state.replace(caches=caches)
        outputs: Dict[int, np.ndarray] = {}
        for run in self.feeder.runs(state, tokens):
            all_requested = bool(tokens.requested[run.first - begin :][: run.rows].all())
            outputs.update(enumerate(self._run(caches, run, all_requested), run.first))
        idle = [row for row in range(caches.rows) if row not in outputs]
        none, select = self._no_output, self.feeder.last
        last = [select(outputs.get(row, none), *size) for row, size in enumerate(sizes, first)]
        length, inside = state.committed_length.copy(), state.occupied
        length[begin : tokens.end] += counts
        if state.by_columns:
            inside = np.concatenate((inside, np.arange(new)[None] < counts[:, None]), axis=1)
        caches = caches.after(new, idle)
        return last, state.replace(committed_length=length, occupied=inside, caches=caches)

    def _run(self, caches: Caches, run: GraphRun, all_requested: bool) -> np.ndarray:
        """Run the graph, for a token of each of the first rows with a binding that is kept."""
        if run.first or run.new > 1 or not (caches.rules.all_in_place and all_requested):
            return self.graph.run(run, caches.state_memory(run.first, run.rows, run.new))
        binding = binding_of(caches, run.feeds, self.feeder.counters)
        try:
            binding.runs[ONE_PLACE]()
        except errors.RUN_ERRORS as error:
            raise errors.GraphError(error) from None
        return binding.result.copy()

    def read_out(self, state: SessionState, prompt: PrefillArguments) -> np.ndarray:
        """Feed whole rows, and return the second output [B,N], or [B,S,N] with zeros at padding."""
        counts = prompt.counts
        of_rows = RowTokens.of(0, prompt.tokens, prompt.attributes, counts)
        tokens = self.feeder.located(state, of_rows)
        outputs: List[np.ndarray] = []
        for run in self.feeder.runs(state, tokens):
            states = state.caches.state_memory(run.first, run.rows, run.new)
            outputs += list(self.graph.run(dataclasses.replace(run, output=1), states))
        if len(self.manifest.outputs[1].axes) == 2:
            return np.stack(outputs)
        cut = [output[:count] for output, count in zip(outputs, counts.tolist(), strict=True)]
        return prompt.padded_outputs([cut])

    def with_stepper(self, state: SessionState) -> SessionState:
        """Return the state with a stepper. Raise ValueError if no position or slot is left."""
        manifest, most, used = self.manifest, state.caches.capacity, state.used
        length = state.committed_length
        check_room(state.caches, state.first_position, length, np.ones(state.rows, np.int64))
        caches = state.caches.reserve(used + 1, state.rows)
        if caches.window.size:
            caches.slide(0, length, np.ones(state.rows, np.int64))
        state = state.replace(caches=caches)
        room = manifest.max_positions - int((state.first_position + length).max())
        if caches.rules.in_place:
            room = min(room, most - int(length.max()), caches.graph_slots - used)
        if caches.window.size:
            ends = caches.notes.windows.first_kept[: state.rows] + caches.window.slots
            room = min(room, int((ends - length).min()))
        counted = self.feeder.counted(state, used + 1)
        if counted:
            room = min(room, counted - used)
        # The attention mask grows by a column at every step, so a binding serves one step only.
        room = 1 if manifest.signature == "mask" else room
        feeds = self.feeder.repeated(state, 1)
        return state.replace(stepper=Stepper(caches, feeds, self.feeder.counters, room))

    def take_pass(self, state: SessionState, x: np.ndarray) -> np.ndarray:
        """Feed a pass, [B,S] or [B,S,E], with the stepper of the state. Return outputs [B,S,*],
        which the next pass of S tokens overwrites. Raise as Stepper.take_pass.
        """
        stepper, new = state.stepper, x.shape[1]
        assert stepper is not None
        if new not in stepper.passes:  # bound for the length at which the stepper began
            feeds = self.feeder.repeated(state.replace(stepper=None), new)
            caches = stepper.progress[1]
            stepper.passes[new] = binding_of(caches, feeds, self.feeder.counters)
        return stepper.take_pass(x)

    def record_step(self, state: SessionState, x: np.ndarray) -> None:
        """Record in the histories the token of every row, x [B] or [B,E], of the next step."""
        assert state.stepper is not None
        tokens = RowTokens.of(0, list(x[:, None]), {}, np.ones(len(x), np.int64))
        _record(state, state.stepper.progress[1], self.feeder.located(state, tokens))


def _record(state: SessionState, caches: Caches, tokens: RowTokens) -> None:
    lengths = state.length.tolist()
    for index, part in enumerate(tokens.rows):
        if len(part):
            row = tokens.first + index
            history = state.histories[row]
            states = caches.snapshot(row) if history.needs_snapshot(len(part)) else None
            attributes = {name: values[index] for name, values in tokens.attributes.items()}
            history.record(lengths[row], states, (part, attributes))
