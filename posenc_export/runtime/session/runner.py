"""Read tokens: the rows of a call, the runs of the graph on them, and the rows after it. A step
reads one token per row, with graph inputs that stay bound.

Shapes: B batch, S new tokens, T columns in use, R tokens whose logits are requested.
"""

import itertools
from typing import Any, Callable, Collection

import numpy as np

from posenc_export.runtime.artefact import graph_inputs
from posenc_export.runtime.artefact.graph_inputs import INPUTS, PaddedTokens
from posenc_export.runtime.session import arguments, prefixes
from posenc_export.runtime.session.arguments import Prompt, RowTokens, unknown_id
from posenc_export.runtime.session.caches import REPLACED, BoundRun, Feeds, Graph, RunMemory
from posenc_export.runtime.session.errors import RUN_ERRORS, GraphError, expected
from posenc_export.runtime.session.rows import Rows

STEP_SLOTS = 128  # least multiple of slots that steps count
MOST_BINDINGS = 64  # of one memory
WIDEST = 32  # most tokens per row of a pass whose binding is kept
FEW = 64  # arrays of at most this many counters are incremented item by item


def open_rows(rows: Rows, prompt: Prompt) -> Rows:
    """Return `rows` if they have tokens, or else empty rows with memory for the first ones."""
    counts, manifest = prompt.tokens.counts, rows.caches.graph.manifest
    if not counts.any():
        got = f"rows of {counts.tolist()} tokens"
        raise expected("at least one token in at least one row", got)
    if not manifest.states:  # a model without caches reads whole rows
        rows = Rows(rows.caches)
    first_position, has_tokens = rows.check_start(counts, prompt.start), bool(rows.length.any())
    new = rows if has_tokens else Rows(rows.caches, first_position, (0, rows.reached[1]))
    new.check_room(counts)
    if has_tokens:
        if prompt.encoder is not None:
            got = f"it with {rows.length.tolist()} tokens cached"
            raise expected("encoder only with the first tokens of a row", got, "reset first")
        return rows
    new.encoder = rows.encoder
    lacking = manifest.encoder and (not rows.encoder or rows.count != len(counts))
    if prompt.encoder is not None or lacking:
        new.encoder = arguments.encoder_outputs(manifest, prompt)
    return new.begin(prompt.chunk)


def admit_rows(rows: Rows, prompt: Prompt, prefix: prefixes.Prefix | None) -> Rows:
    """Return `rows` with the new ones of an admit, before their tokens are read."""
    counts, manifest = prompt.tokens.counts, rows.caches.graph.manifest
    arguments.check_every_row(counts, "new row")
    first_position = arguments.per_row("start", prompt.start, len(counts))
    if prefix is not None and first_position.tolist() != [0]:
        got = f"rows at {first_position.tolist()}"
        raise expected("one row at position 0 after a prefix", got, "admit rows one by one")
    known = 0 if prefix is None else prefix.length
    new = Rows(rows.caches, first_position, (0, rows.turn))
    new.check_room(known + counts)
    outputs = arguments.encoder_outputs(manifest, prompt)
    if rows.encoder and outputs:
        outputs = arguments.append_encoder_outputs(rows.encoder, outputs)
    joint = rows.append(new, known + prompt.chunk)
    joint.encoder = outputs
    return joint if prefix is None else prefix.write(joint, rows.count)


class Runner:
    """Fills the inputs of a graph with tokens and runs it. Methods take rows and return those after
    the call.
    """

    def __init__(self, graph: Graph) -> None:
        self.graph, self.manifest = graph, graph.manifest
        # Fewest logits to request for a row: CUDA kernels cannot be launched on empty tensors.
        self.least_outputs = 0 if graph.provider == "cpu" else 1
        # Whether first tokens are announced with their padding, and steps count slots in multiples.
        self._whole_rows = graph.provider == "cuda"
        names = {value.name for value in self.manifest.inputs}
        self.selects = "logits_index" in names  # the graph computes only the requested outputs
        # Inputs that count slots in multiples, and inputs that grow by one with each token.
        multiples = "slots" in names or ("total_sequence_length" in names and self._whole_rows)
        self.slot_inputs = names & {"slots", "total_sequence_length"} if multiples else set()
        self.counters = {name for name in names if INPUTS[name].counts} - self.slot_inputs

    def with_coordinates(self, rows: Rows, tokens: RowTokens) -> RowTokens:
        """Return tokens with coordinates, by default their positions, or 0 if coordinates have a
        range of their own.
        """
        axes = self.manifest.axes
        if not axes or "grid" in tokens.planes:
            return tokens
        begins = (rows.first_position + rows.length)[tokens.rows, None]
        columns = np.arange(tokens.x.shape[1])
        own = bool(self.manifest.coordinate_range)
        positions = np.where((columns < tokens.counts[:, None]) & (not own), begins + columns, 0)
        grid = np.repeat(positions[None], axes, 0)  # [axes,n,S]
        return tokens._replace(planes={**tokens.planes, "grid": grid})

    def split(self, rows: Rows, tokens: RowTokens) -> list[RowTokens]:
        """Divide tokens into runs of the graph. One run reads all rows, without the first and last
        ones that have no tokens. A graph that continues a single row at a time gets a run for each
        row, and one for neighbours that have one token each.
        """
        by_columns, runs = rows.caches.by_columns, []
        if not (by_columns or tokens.counts.all()):
            filled = np.flatnonzero(tokens.counts)
            tokens = tokens.part(slice(int(filled[0]), int(filled[-1]) + 1), slice(0, None))
        counts, new = tokens.counts, int(tokens.counts.max())
        # With S > 1, a row without new tokens cannot share the run: its padding would be written
        # over its last token.
        together = len(counts) == 1 or (new == 1 and counts.all())
        together = together or not rows.length[tokens.rows].any()
        if self.manifest.continuation_rows != 1 or together:
            return [tokens]

        def joint(row: int) -> int:
            return -1 if counts[row] == 1 and not by_columns else row

        for _, group in itertools.groupby(range(len(counts)), key=joint):
            some = list(group)
            if width := new if by_columns else int(counts[some[0]]):
                runs.append(tokens.part(slice(some[0], some[-1] + 1), slice(0, width)))
        return runs

    def fill(self, rows: Rows, tokens: RowTokens) -> Feeds:
        """Fill the graph inputs that the manifest lists, by name, with the columns of tokens."""
        part, counts, planes = tokens.rows, tokens.counts, tokens.planes
        length = rows.length[part]
        # With a bias, GroupQueryAttention on CUDA (ONNX Runtime 1.31) subtracts S from the length
        # of each row to get its cached tokens. For a short row of a first call that is negative,
        # and shifts its causal mask. There, rows have all S columns: tokens see no padding, which
        # follows them, and the next tokens overwrite it.
        whole = self._whole_rows and not length.any()
        if planes:
            planes = {name: np.ascontiguousarray(plane) for name, plane in planes.items()}
        padded = PaddedTokens(
            x=np.ascontiguousarray(tokens.x),
            counts=counts,
            length=length,
            first_position=rows.first_position[part],
            requested=np.maximum(counts + np.minimum(tokens.columns, 0), self.least_outputs),
            occupied=rows.occupied[part],
            valid=np.full_like(counts, tokens.x.shape[1]) if whole else counts,
            window_start=rows.first_kept[part],
            planes=planes,
        )
        feeds = graph_inputs.fill(self.manifest, padded)
        for name, array in rows.encoder.items():
            feeds[name] = array[part]
        return feeds

    def with_room(self, rows: Rows, part: slice, counts: np.ndarray) -> Rows:
        """Return rows with memory for counts [n] more tokens of some of them."""
        used, caches, new = rows.used, rows.caches, int(counts.max())
        # Padding of shorter rows is written behind their tokens, unless each row is fed alone.
        slots = used + new
        if self.manifest.continuation_rows == 1 and not caches.by_columns:
            slots = max(used, int((rows.length[part] + counts).max()))
        caches = caches.reserve(slots, rows.count, rows.reached[1])
        if caches is not rows.caches:
            rows = rows.replace(caches=caches)
        return rows.with_window_room(part, counts) if caches.window.size else rows

    def run_chunk(self, rows: Rows, tokens: RowTokens, outputs: np.ndarray) -> Rows:
        """Run the graph on tokens of some rows, which have room for them, as `runs` divides them.
        Write the requested outputs to `outputs` [n,C,*], and return the rows after the call.
        """
        length, caches, turn = rows.length, rows.caches, rows.turn
        counts, by_columns = tokens.counts, caches.by_columns
        if self.manifest.axes:
            tokens = self.with_coordinates(rows, tokens)
        if rows.histories:
            rows.record(tokens)
            for memory in caches.of(REPLACED):  # rows that no run feeds keep their states
                memory.buffers[1 - turn].copy_rows(0, memory.buffers[turn], 0, rows.count)
        for run in self.split(rows, tokens):
            part, new = run.rows, run.x.shape[1]
            caches.mark_written(part, new + (rows.used if by_columns else length[part]))
            first = tokens.rows.start
            self._run(rows, run, outputs[part.start - first : part.stop - first])
        length = length.copy()
        length[tokens.rows] += counts
        if not by_columns:
            return rows.replace(length=length, turn=1 - turn)
        inside = np.arange(int(counts.max()))[None] < counts[:, None]
        occupied = np.concatenate((rows.occupied, inside), axis=1)
        return rows.replace(length=length, occupied=occupied, turn=1 - turn)

    def _run(self, rows: Rows, tokens: RowTokens, outputs: np.ndarray) -> None:
        """Run the graph on tokens and write the outputs of requested ones, directly if it writes
        as many for each row.
        """
        columns, new = np.maximum(tokens.columns, 0), tokens.x.shape[1]
        requested = tokens.counts + np.minimum(tokens.columns, 0)  # below 1 for none
        width, column = new, int(columns[0])
        if self.selects:
            width = max(int(requested.max()), self.least_outputs)
        result = outputs[:, column : column + width]
        alike = 0 < width == requested.min() and result.flags.c_contiguous
        direct = alike and (len(requested) == 1 or not (columns - column).any())
        if not direct:
            value = self.manifest.outputs[0]
            result = np.empty((len(requested), width, *value.axes[2:]), value.dtype)
        states = rows.caches.state_memory(tokens.rows, rows.used, new, rows.reached[1])
        self._run_once(self.fill(rows, tokens), states, self.manifest.outputs[0].name, result)
        if direct:
            return
        numbers = zip(columns.tolist(), requested.tolist(), tokens.counts.tolist(), strict=True)
        for row, (column, last, count) in enumerate(numbers):
            begin = 0 if self.selects else count - last
            if last > 0:
                outputs[row, column : column + last] = result[row, begin : begin + last]

    def _run_once(self, feeds: Feeds, states: RunMemory, name: str, result: np.ndarray) -> None:
        try:
            self.graph.bind(feeds, states, {name: result}, once=True)()
        except RUN_ERRORS as error:
            raise GraphError(error) from None

    def read_out(self, rows: Rows, prompt: Prompt) -> np.ndarray:
        """Feed whole rows, and return the second output [B,N]."""
        value, counts = self.manifest.outputs[1], prompt.tokens.counts
        tokens = prompt.tokens.part(slice(0, len(counts)), slice(0, int(counts.max())))
        run = self.with_coordinates(rows, tokens)
        size: Any = value.axes[-1]
        result = np.empty((run.x.shape[0], size), value.dtype)
        states = rows.caches.state_memory(run.rows, 0, run.x.shape[1], 0)
        self._run_once(self.fill(rows, run), states, value.name, result)
        return result

    def bind(self, rows: Rows, new: int) -> "Binding":
        """Return a binding for `new` tokens of every row, with all outputs requested and the slots
        of `_step_slots`. Caches in place keep it, and it serves all inputs of the same shapes.
        """
        source, caches, encoder = self.manifest.inputs[0], rows.caches, rows.encoder
        zeros = np.zeros((rows.count, new, *source.token_shape), source.dtype)
        feeds = self.fill(rows, self.of_every_row(rows, zeros))
        slots = self._step_slots(rows, rows.used + new)
        if "slots" in self.slot_inputs:
            feeds["slots"] = np.arange(slots)
        if "total_sequence_length" in self.slot_inputs:
            feeds["total_sequence_length"][...] = slots
        if not caches.in_place:
            return Binding(self, rows, feeds)
        places = [feeds[name].ctypes.data for name in encoder]
        # A CUDA graph does not read the number of slots again.
        key = (slots, *places, *[array.shape for array in feeds.values()])
        binding = caches.bindings.get(key)
        if binding is None:
            if len(caches.bindings) >= MOST_BINDINGS:
                caches.bindings.clear()
            binding = caches.bindings[key] = Binding(self, rows, feeds)
        for name in feeds.keys() - encoder.keys():
            binding.feeds[name][...] = feeds[name]
        binding.at = rows.reached[0]
        return binding

    def of_every_row(self, rows: Rows, x: np.ndarray) -> RowTokens:
        """Return tokens x [B,S] or [B,S,E], S of every row, with all outputs requested."""
        counts = np.full(rows.count, x.shape[1])
        tokens = RowTokens(slice(0, rows.count), x, counts, {}, counts)
        return self.with_coordinates(rows, tokens)

    def _step_slots(self, rows: Rows, needed: int) -> int:
        """Return the number of slots in the inputs of a step: `needed`, rounded up by at most a
        quarter or STEP_SLOTS. 0 if no input counts slots in multiples.

        Such inputs change rarely, as a CUDA graph needs, which does not read total_sequence_length
        again. Slots without a token get scores too.
        """
        if not self.slot_inputs:
            return 0
        part = max(STEP_SLOTS, 1 << max(needed.bit_length() - 3, 0))
        return min(-(-needed // part) * part, rows.caches.extent, max(needed, rows.caches.capacity))

    def bind_step(self, rows: Rows) -> Rows:
        """Return rows, which have room for a token, with a bound step."""
        used, caches, room = rows.used, rows.caches, int(rows.room.min())
        if self.manifest.in_place:
            room = min(room, caches.extent - used)
        if caches.window.size:
            room = min(room, int((rows.first_kept + caches.window.slots - rows.length).min()))
        slots = self._step_slots(rows, used + 1)
        if slots:
            room = min(room, slots - used)
        rows = rows.replace()
        rows.bound = {1: self.bind(rows, 1)}
        # The attention mask grows by a column at every step, so a binding serves one step only.
        rows.ready = 1 if self.manifest.signature == "mask" else room
        return rows

    def widest(self, rows: Rows) -> int:
        """Return the most tokens per row that are read in a pass, bound like a step; 1 for none."""
        alone = self.manifest.continuation_rows == 1 and rows.count > 1
        passes = rows.caches.in_place and not alone
        return min(self.manifest.chunk, WIDEST, rows.ready) if passes else 1


class Binding:
    """Memory of the graph inputs for S tokens of each of B rows, and of the output [B,S,*].

    Attributes:
        feeds: the graph inputs.
        at: number of tokens read by steps that the counters in `feeds` stand for (Rows.reached).
        take: `take(rows, inputs)` feeds S tokens per row of rows that have this binding, [B,S] or
            [B,S,E], and returns [B,S,*], which the next call overwrites. With S = 1, both lack this
            axis. Raises ValueError for other inputs, GraphError if the graph failed.
    """

    def __init__(self, runner: Runner, rows: Rows, feeds: Feeds) -> None:
        self._runner, self._manifest = runner, runner.manifest
        name, output = self._manifest.inputs[0].name, self._manifest.outputs[0]
        tokens = feeds[name] = feeds[name].copy()  # perhaps in the memory of a caller
        count, new = tokens.shape[:2]
        self.feeds, self.at = feeds, rows.reached[0]
        self.result: np.ndarray = np.zeros((count, new, *output.axes[2:]), output.dtype)  # [B,S,*]
        self.tokens = tokens[:, 0] if new == 1 else tokens
        # Functions that run the graph, by `turn` of the rows.
        self.runs: dict[int, BoundRun] = {}
        in_place = self.run_of(rows) if rows.caches.in_place else None
        self.take = self._taker(new, runner.counters, in_place)

    def run_of(self, rows: Rows) -> BoundRun:
        """Return the function that runs the graph on the next tokens of rows."""
        caches, turn = rows.caches, rows.turn
        count, new = self.result.shape[:2]
        if rows.histories:
            x = self.feeds[self._manifest.inputs[0].name]
            rows.record(self._runner.of_every_row(rows, x))
        grows = caches.grows  # the shapes of these states change at each call
        if not grows and turn in self.runs:
            return self.runs[turn]
        if grows:
            caches = rows.caches = caches.reserve(rows.used + new, count, turn)
        states = caches.state_memory(slice(0, count), rows.used, new, turn)
        outputs = {self._manifest.outputs[0].name: self.result}
        run = caches.graph.bind(self.feeds, states, outputs)
        if not grows:
            self.runs[turn] = run
        return run

    def checked(self, inputs: Any) -> np.ndarray:
        """Return inputs as `take` feeds them. Raise ValueError for another form or a wrong id."""
        token, vocabulary = self.tokens, self._manifest.vocabulary
        x = arguments.array_of("a step", inputs)
        if x.shape != token.shape or x.dtype.kind not in ("iu" if vocabulary else "f"):
            form = f"{list(token.shape)} {self._manifest.inputs[0].dtype}"
            raise expected(f"one token per row in a step, {form}", f"{list(x.shape)} {x.dtype}")
        if vocabulary and (x.min() < 0 or x.max() >= vocabulary):
            raise unknown_id(vocabulary, x)
        return x.astype(token.dtype, copy=False)

    def _taker(
        self, new: int, counters: Collection[str], in_place: BoundRun | None
    ) -> Callable[[Rows, Any], np.ndarray]:
        """Return `take`, with all its objects as local variables: after each run of the graph,
        Python's memory is not in the CPU cache, and look-ups are slow.

        The binding is not a local variable: a reference cycle would keep its caches until the next
        garbage collection.

        Args:
            counters: names of the inputs that grow by one with each token.
            in_place: function that runs the graph, if all states are in place.
        """
        tokens = self.tokens
        shape, dtype, vocabulary = tokens.shape, tokens.dtype, self._manifest.vocabulary
        output = self.result[:, 0] if new == 1 else self.result
        # Incrementing an item of a memoryview takes 0.1 us. A numpy addition takes 8 us when its
        # code is not in the CPU cache, but is faster for many items.
        counted = [self.feeds[name].reshape(-1) for name in self.feeds if name in counters]
        few: list[Any] = [counter.data for counter in counted if counter.size <= FEW]
        items = [(view, index) for view in few for index in range(len(view))]
        many = [counter for counter in counted if counter.size > FEW]
        unsigned = tokens.view(np.uint64).reshape(-1) if vocabulary else tokens
        highest = np.maximum.reduce

        def take(rows: Rows, inputs: Any) -> np.ndarray:
            """Feed tokens, which count as fed once `reached` is assigned."""
            binding = rows.bound[new]
            if type(inputs) is not np.ndarray or inputs.dtype is not dtype or inputs.shape != shape:
                inputs = binding.checked(inputs)
            tokens[...] = inputs
            # As an unsigned integer, a negative id exceeds the vocabulary.
            if vocabulary and highest(unsigned) >= vocabulary:
                binding.checked(inputs)
            (steps, turn), ready = rows.reached, rows.ready
            rows.ready, more = -1, steps - binding.at
            if more:
                for view, index in items:
                    view[index] += more
                for counter in many:
                    counter += more
                binding.at = steps
            try:
                if in_place is None:
                    binding.run_of(rows)()
                    turn = 1 - turn
                else:
                    in_place()
            except RUN_ERRORS as error:
                raise GraphError(error) from None
            rows.reached = (steps + new, turn)
            rows.ready = ready - new
            return output

        return take
