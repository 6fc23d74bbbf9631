"""Read tokens: the rows of a call, the runs of the graph on them, and the state after it.

Shapes: B batch, S new tokens, T columns in use, R tokens whose logits are requested.
"""

import itertools
from typing import List, Optional

import numpy as np

from posenc_export.runtime.artefact import graph_inputs
from posenc_export.runtime.artefact.graph_inputs import INPUTS, PaddedTokens
from posenc_export.runtime.artefact.manifest import Manifest
from posenc_export.runtime.session import arguments, encoder_outputs, errors, prefixes
from posenc_export.runtime.session.argument_arrays import per_row
from posenc_export.runtime.session.arguments import PrefillArguments, RowTokens, check_room
from posenc_export.runtime.session.caches import Caches
from posenc_export.runtime.session.graph import Feeds, Graph, GraphRun
from posenc_export.runtime.session.state import SessionState
from posenc_export.runtime.session.stepper import Stepper, binding_of

STEP_SLOTS = 128  # least multiple of slots that steps count


def open_rows(state: SessionState, prompt: PrefillArguments) -> SessionState:
    """Return `state` if its rows have tokens, or else empty rows with memory for the first ones."""
    caches, counts, passed = state.reached[1], prompt.tokens.counts, prompt.passed
    manifest = caches.graph.manifest
    if not counts.any():
        got = f"rows of {counts.tolist()} tokens"
        raise errors.expected("at least one token in at least one row", got)
    if not manifest.states:  # a model without caches reads whole rows
        state = SessionState.empty(caches, state.rewind)
    length = state.length
    first_position = arguments.check_start(manifest, state.first_position, length, prompt)
    has_tokens = bool(length.any())
    committed = length if has_tokens else np.zeros_like(first_position)
    arguments.check_room(caches, first_position, committed, counts)
    outputs, encoded = state.encoder_outputs, passed.encoder is not None
    other = encoded or passed.encoder_attention_mask is not None
    if other or outputs is None or len(length) != len(first_position):
        if has_tokens and encoded:
            rule, got = "encoder only with the first tokens of a row", f"it with {length.tolist()}"
            raise errors.expected(rule, f"{got} tokens cached", "reset first")
        outputs = encoder_outputs.new(manifest, passed, len(first_position))
    if has_tokens:
        return state
    return state.opened(first_position, prompt.chunk).replace(encoder_outputs=outputs)


def before_admit(
    state: SessionState, prompt: PrefillArguments, prefix: Optional[prefixes.Prefix]
) -> SessionState:
    """Return `state` with the new rows of an admit, before their tokens are read."""
    manifest, passed = state.caches.graph.manifest, prompt.passed
    arguments.check_every_row(prompt.tokens.counts, "new row")
    first_position = per_row("start", passed.start, len(prompt.tokens.counts))
    if prefix is not None and first_position.tolist() != [0]:
        got = f"rows at {first_position.tolist()}"
        raise errors.expected("one row at position 0 after a prefix", got, "admit rows one by one")
    known = 0 if prefix is None else prefix.length
    cached = np.full_like(first_position, known)
    arguments.check_room(state.caches, first_position, cached, prompt.tokens.counts)
    outputs = encoder_outputs.new(manifest, passed, len(first_position))
    if state.encoder_outputs is not None and outputs is not None:
        outputs = state.encoder_outputs.joined(outputs)
    joined = state.joined(first_position, known + prompt.chunk).replace(encoder_outputs=outputs)
    return joined if prefix is None else joined.begun(state.rows, prefix)


class Feeder:
    """Builds the graph inputs of a session on a provider."""

    def __init__(self, manifest: Manifest, provider: str) -> None:
        self.manifest = manifest
        # Fewest logits to request for a row: CUDA kernels cannot be launched on empty tensors.
        self.fewest = 0 if provider == "cpu" else 1
        # Whether first tokens are announced with their padding, and steps count slots in multiples.
        self._whole_rows = provider == "cuda"
        names = {value.name for value in manifest.inputs}
        self.selects = "logits_index" in names  # the graph computes only the requested outputs
        # Inputs that count slots in multiples, and inputs that grow by one with each token.
        counts = "slots" in names or ("total_sequence_length" in names and self._whole_rows)
        self.counted_inputs = names & {"slots", "total_sequence_length"} if counts else set()
        self.counters = {name for name in names if INPUTS[name].counts} - self.counted_inputs

    def located(self, state: SessionState, tokens: RowTokens) -> RowTokens:
        """Return tokens with coordinates, by default their positions, or 0 if coordinates have a
        range of their own.
        """
        axes = self.manifest.axes
        if not axes or "grid" in tokens.planes:
            return tokens
        begins = (state.first_position + state.length)[tokens.rows, None]
        columns = np.arange(tokens.x.shape[1])
        own = bool(self.manifest.coordinate_range)
        positions = np.where((columns < tokens.counts[:, None]) & (not own), begins + columns, 0)
        grid = np.repeat(positions[None], axes, 0)  # [axes,n,S]
        return tokens._replace(planes={**tokens.planes, "grid": grid})

    def runs(self, state: SessionState, tokens: RowTokens) -> List[GraphRun]:
        """Return one run for all rows; of a graph that continues a single row at a time, one for
        each row, and one for neighbours that read a token each.
        """
        counts, new = tokens.counts, int(tokens.counts.max())
        committed = state.length[tokens.rows]
        # With S > 1, a row without new tokens cannot share the run: its padding would be written
        # over its last token.
        together = len(counts) == 1 or not committed.any() or (new == 1 and counts.all())
        if self.manifest.continuation_rows != 1 or together:
            feeds = self.fill(state, tokens, new)
            return [GraphRun(tokens.rows.start, len(counts), new, feeds)]
        runs, by_columns = [], self.manifest.by_columns

        def joint(row: int) -> int:
            return -1 if counts[row] == 1 and not by_columns else row

        for _, group in itertools.groupby(range(len(counts)), key=joint):
            some = list(group)
            width = new if by_columns else int(counts[some[0]])
            if width:
                part = tokens.part(some[0], some[-1] + 1)
                feeds = self.fill(state, part, width)
                runs.append(GraphRun(part.rows.start, len(some), width, feeds))
        return runs

    def repeated(self, state: SessionState, new: int) -> Feeds:
        """Return the graph inputs for `new` zero tokens of every row, with all outputs requested,
        and slots in multiples.
        """
        source, counts = self.manifest.inputs[0], np.full(state.rows, new)
        zeros = np.zeros((state.rows, new, *source.token_shape), source.dtype)
        tokens = RowTokens(slice(0, state.rows), zeros, counts, counts, {}, counts)
        tokens = self.located(state, tokens)
        feeds = self.fill(state, tokens, new)
        slots = self.counted(state, state.used + new)
        if "slots" in self.counted_inputs:
            feeds["slots"] = np.arange(slots)
        if "total_sequence_length" in self.counted_inputs:
            feeds["total_sequence_length"][...] = slots
        return feeds

    def counted(self, state: SessionState, needed: int) -> int:
        """Return how many slots steps count: more than the `needed` ones of the longest row, at
        most a quarter more or STEP_SLOTS. 0 if the inputs change with each step.

        So the inputs of a step with slots, or of a CUDA graph, which does not read
        total_sequence_length again, change rarely. Slots without a token get scores too.
        """
        if not self.counted_inputs:
            return 0
        part = max(STEP_SLOTS, 1 << max(needed.bit_length() - 3, 0))
        return min(-(-needed // part) * part, state.caches.graph_slots)

    def fill(self, state: SessionState, tokens: RowTokens, new: int) -> Feeds:
        """Fill the graph inputs that the manifest lists, by name, with `new` columns for tokens."""
        rows, counts, planes = tokens.rows, tokens.counts, tokens.planes
        length = state.length[rows]
        x = np.ascontiguousarray(tokens.x[:, :new])
        if planes:
            planes = {n: np.ascontiguousarray(plane[:, :, :new]) for n, plane in planes.items()}
        # With a bias, GroupQueryAttention on CUDA (ONNX Runtime 1.31) subtracts S from the length
        # of each row to get its cached tokens. For a short row of a first call that is negative,
        # and shifts its causal mask. There, rows have all S columns: tokens see no padding, which
        # follows them, and the next tokens overwrite it.
        whole = self._whole_rows and not length.any()
        valid = np.full_like(counts, new) if whole else counts
        first_position, occupied = state.first_position[rows], state.occupied[rows]
        kept = state.reached[1].notes.windows.first_kept[rows]
        requested = np.maximum(tokens.requested, self.fewest)
        padded = PaddedTokens(
            x, counts, length, first_position, requested, occupied, valid, kept, planes
        )
        feeds = graph_inputs.fill(self.manifest, padded)
        return {**feeds, **state.encoder_outputs.select(rows)} if state.encoder_outputs else feeds


class Reading:
    """Runs a graph on tokens: methods take a session state and return the next one."""

    def __init__(self, graph: Graph) -> None:
        self.graph, self.manifest = graph, graph.manifest
        self.feeder = Feeder(graph.manifest, graph.provider)

    def run_chunk(
        self, state: SessionState, tokens: RowTokens, outputs: np.ndarray
    ) -> SessionState:
        """Run the graph for some rows, once or once per row, write the outputs of requested tokens
        to `outputs` [n,C,*], and return the state after the call.
        """
        by_columns, length = self.manifest.by_columns, state.length
        if self.manifest.axes:
            tokens = self.feeder.located(state, tokens)
        if not (by_columns or tokens.counts.all()):
            filled = np.flatnonzero(tokens.counts)
            part = slice(int(filled[0]), int(filled[-1]) + 1)
            tokens, outputs = tokens.part(part.start, part.stop), outputs[part]
        rows, counts, new = tokens.rows, tokens.counts, int(tokens.counts.max())
        used = state.used
        # Padding of shorter rows is written behind their tokens, unless each row is fed alone.
        slots = used + new
        if self.manifest.continuation_rows == 1 and not by_columns:
            slots = max(used, int((length[rows] + counts).max()))
        caches = state.reached[1].reserve(slots, len(length))
        if state.histories:
            _record(state, caches, tokens)
        caches.mark_written(rows, new + (used if by_columns else length[rows]))
        if caches.window.size:
            caches.slide(rows.start, length[rows], counts)
            state = state.replace(caches=caches)
        idle = set(range(caches.rows) if state.histories else ())
        for run in self.feeder.runs(state, tokens):
            part = slice(run.first - rows.start, run.first - rows.start + run.rows)
            of_run = tokens.part(part.start, part.stop) if len(counts) > run.rows else tokens
            self._run(caches, run, of_run, outputs[part])
            idle.difference_update(range(run.first, run.first + run.rows))
        occupied, length = state.occupied, length.copy()
        length[rows] += counts
        if by_columns:
            inside = np.arange(new)[None] < counts[:, None]
            occupied = np.concatenate((occupied, inside), axis=1)
        return state.replace(length=length, occupied=occupied, caches=caches.after(new, idle))

    def _run(self, caches: Caches, run: GraphRun, tokens: RowTokens, outputs: np.ndarray) -> None:
        """Run the graph on tokens and write the outputs of requested ones, directly if it writes
        as many for each row.
        """
        requested, selects, columns = tokens.requested, self.feeder.selects, tokens.columns
        width = max(int(requested.max()), self.feeder.fewest) if selects else run.new
        if caches.rules.all_in_place and run.new == 1 and not run.first and requested.all():
            output = binding_of(caches, run.feeds, self.feeder.counters).run()
        else:
            place = outputs[:, int(columns[0]) : int(columns[0]) + width]
            alike = len(requested) == 1 or (np.ptp(columns) == 0 and requested.min() == width)
            alike = alike and 0 < width == int(requested[0]) and place.flags.c_contiguous
            memory = caches.state_memory(run.first, run.rows, run.new)
            output = self.graph.run(run._replace(result=place if alike else None), memory)
            if output is place:
                return
        each = zip(columns.tolist(), requested.tolist(), tokens.counts.tolist(), strict=True)
        for row, (column, last, count) in enumerate(each):
            begin = 0 if selects else count - last
            if last:
                outputs[row, column : column + last] = output[row, begin : begin + last]

    def read_out(self, state: SessionState, prompt: PrefillArguments) -> np.ndarray:
        """Feed whole rows, and return the second output [B,N], or [B,S,N] with zeros at padding."""
        tokens = prompt.tokens
        outputs: List[np.ndarray] = []
        for run in self.feeder.runs(state, self.feeder.located(state, tokens)):
            states = state.caches.state_memory(run.first, run.rows, run.new)
            outputs += list(self.graph.run(run._replace(output=1), states))
        if len(self.manifest.outputs[1].axes) == 2:
            return np.stack(outputs)
        result, counts = prompt.outputs(self.manifest.outputs[1]), tokens.counts.tolist()
        for row, (output, count) in enumerate(zip(outputs, counts, strict=True)):
            result[row, :count] = output[:count]
        return prompt.in_columns(result)

    def with_stepper(self, state: SessionState) -> SessionState:
        """Return the state with a stepper. Raise ValueError if no position or slot is left."""
        manifest, most, used = self.manifest, state.caches.capacity, state.used
        length = state.length
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
        state.stepper = Stepper(caches, feeds, self.feeder.counters, room)
        return state

    def take_pass(self, state: SessionState, x: np.ndarray) -> np.ndarray:
        """Feed a pass, [B,S] or [B,S,E], with the stepper of the state. Return outputs [B,S,*],
        which the next pass of S tokens overwrites. Raise as Stepper.take_pass.
        """
        stepper, new = state.stepper, x.shape[1]
        assert stepper is not None
        if new not in stepper.passes:
            feeds = self.feeder.repeated(state, new)
            binding = binding_of(state.caches, feeds, self.feeder.counters)
            binding.at, stepper.passes[new] = state.reached[0], binding
        return stepper.take_pass(state, x)

    def record_step(self, state: SessionState, x: np.ndarray) -> None:
        """Record in the histories the token of every row, x [B] or [B,E], of the next step."""
        ones = np.ones(len(x), np.int64)
        tokens = RowTokens(slice(0, len(x)), x[:, None], ones, ones, {}, ones)
        _record(state, state.caches, self.feeder.located(state, tokens))


def _record(state: SessionState, caches: Caches, tokens: RowTokens) -> None:
    lengths = state.length.tolist()
    for index, count in enumerate(tokens.counts.tolist()):
        if count:
            row = tokens.rows.start + index
            history = state.histories[row]
            states = caches.snapshot(row) if history.needs_snapshot(lengths[row], count) else None
            planes = {name: plane[:, index, :count] for name, plane in tokens.planes.items()}
            history.record(lengths[row], states, (tokens.x[index, :count], planes))
