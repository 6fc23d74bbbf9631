"""Read tokens: the rows of a call, the runs of the graph on them, and the rows after it. A step is
such a call of one token per row, whose graph inputs stay bound.

Shapes: B batch, S new tokens, T columns in use, R tokens whose logits are requested.
"""

import functools
import itertools
from typing import Any, Callable, Collection, Dict, List, Optional

import numpy as np

from posenc_export.runtime.artefact import graph_inputs
from posenc_export.runtime.artefact.graph_inputs import INPUTS, PaddedTokens
from posenc_export.runtime.session import arguments, prefixes
from posenc_export.runtime.session.arguments import Prompt, RowTokens, check_tokens
from posenc_export.runtime.session.caches import IN_PLACE, Growing, InPlace, Replaced
from posenc_export.runtime.session.errors import RUN_ERRORS, GraphError, expected
from posenc_export.runtime.session.graph import BoundRun, Feeds, Graph, GraphRun
from posenc_export.runtime.session.rows import Rows

STEP_SLOTS = 128  # least multiple of slots that steps count
MOST_BINDINGS = 64  # of one memory
WIDEST = 32  # most tokens per row of a pass whose binding is kept
FEW = 64  # arrays of at most this many counters are incremented item by item


def open_rows(rows: Rows, prompt: Prompt) -> Rows:
    """Return `rows` if they have tokens, or else empty rows with memory for the first ones."""
    counts, passed, manifest = prompt.tokens.counts, prompt.passed, rows.caches.graph.manifest
    if not counts.any():
        got = f"rows of {counts.tolist()} tokens"
        raise expected("at least one token in at least one row", got)
    if not manifest.states:  # a model without caches reads whole rows
        rows = Rows(rows.caches)
    first_position, has_tokens = rows.check_start(prompt), bool(rows.length.any())
    new = rows if has_tokens else Rows(rows.caches, first_position, rows.reached[1])
    new.check_room(counts)
    outputs, (encoder, mask) = rows.encoder, passed.encoded
    lacking = manifest.encoder and (not outputs or rows.count != len(counts))
    if encoder is not None or mask is not None or lacking:
        if has_tokens and encoder is not None:
            got = f"it with {rows.length.tolist()} tokens cached"
            raise expected("encoder only with the first tokens of a row", got, "reset first")
        outputs = arguments.encoder_outputs(manifest, passed, len(counts))
    if has_tokens:
        return rows
    new.encoder = outputs
    return new.begin(prompt.chunk)


def admit_rows(rows: Rows, prompt: Prompt, prefix: Optional[prefixes.Prefix]) -> Rows:
    """Return `rows` with the new ones of an admit, before their tokens are read."""
    counts, passed, manifest = prompt.tokens.counts, prompt.passed, rows.caches.graph.manifest
    arguments.check_every_row(counts, "new row")
    first_position = arguments.per_row("start", passed.start, len(counts))
    if prefix is not None and first_position.tolist() != [0]:
        got = f"rows at {first_position.tolist()}"
        raise expected("one row at position 0 after a prefix", got, "admit rows one by one")
    known = 0 if prefix is None else prefix.length
    new = Rows(rows.caches, first_position, rows.turn)
    new.check_room(known + counts)
    outputs = arguments.encoder_outputs(manifest, passed, len(counts))
    if rows.encoder and outputs:
        outputs = arguments.append_encoder_outputs(rows.encoder, outputs)
    joint = rows.append(new, known + prompt.chunk)
    joint.encoder = outputs
    return joint if prefix is None else prefix.write(joint, rows.count)


class Reading:
    """Fills the inputs of a graph with tokens and runs it. Methods take rows and return those after
    the call.
    """

    def __init__(self, graph: Graph) -> None:
        self.graph, self.manifest = graph, graph.manifest
        # Fewest logits to request for a row: CUDA kernels cannot be launched on empty tensors.
        self.fewest = 0 if graph.provider == "cpu" else 1
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

    def runs(self, rows: Rows, tokens: RowTokens) -> List[GraphRun]:
        """Return one run for all rows; of a graph that continues a single row at a time, one for
        each row, and one for neighbours that read a token each.
        """
        counts, new = tokens.counts, int(tokens.counts.max())
        # With S > 1, a row without new tokens cannot share the run: its padding would be written
        # over its last token.
        together = len(counts) == 1 or (new == 1 and counts.all())
        together = together or not rows.length[tokens.rows].any()
        if self.manifest.continuation_rows != 1 or together:
            feeds = self.fill(rows, tokens, new)
            return [GraphRun(tokens.rows.start, len(counts), new, feeds)]
        runs, by_columns = [], rows.caches.by_columns

        def joint(row: int) -> int:
            return -1 if counts[row] == 1 and not by_columns else row

        for _, group in itertools.groupby(range(len(counts)), key=joint):
            some = list(group)
            width = new if by_columns else int(counts[some[0]])
            if width:
                part = tokens.part(some[0], some[-1] + 1)
                feeds = self.fill(rows, part, width)
                runs.append(GraphRun(part.rows.start, len(some), width, feeds))
        return runs

    def fill(self, rows: Rows, tokens: RowTokens, new: int) -> Feeds:
        """Fill the graph inputs that the manifest lists, by name, with `new` columns for tokens."""
        part, counts, planes = tokens.rows, tokens.counts, tokens.planes
        length = rows.length[part]
        # With a bias, GroupQueryAttention on CUDA (ONNX Runtime 1.31) subtracts S from the length
        # of each row to get its cached tokens. For a short row of a first call that is negative,
        # and shifts its causal mask. There, rows have all S columns: tokens see no padding, which
        # follows them, and the next tokens overwrite it.
        whole = self._whole_rows and not length.any()
        if planes:
            planes = {n: np.ascontiguousarray(plane[:, :, :new]) for n, plane in planes.items()}
        padded = PaddedTokens(
            x=np.ascontiguousarray(tokens.x[:, :new]),
            counts=counts,
            length=length,
            first_position=rows.first_position[part],
            requested=np.maximum(tokens.requested, self.fewest),
            occupied=rows.occupied[part],
            valid=np.full_like(counts, new) if whole else counts,
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
        """Run the graph for some rows, for which there is room, once or once per row, write the
        outputs of requested ones to `outputs` [n,C,*], and return the rows after the call.
        """
        length, caches = rows.length, rows.caches
        by_columns = caches.by_columns
        if self.manifest.axes:
            tokens = self.with_coordinates(rows, tokens)
        if not (by_columns or tokens.counts.all()):
            filled = np.flatnonzero(tokens.counts)
            begin, end = int(filled[0]), int(filled[-1]) + 1
            tokens, outputs = tokens.part(begin, end), outputs[begin:end]
        part, counts, new = tokens.rows, tokens.counts, int(tokens.counts.max())
        turn = rows.reached[1]
        if rows.histories:
            record(rows, tokens)
        caches.mark_written(part, new + (rows.used if by_columns else length[part]))
        idle = set(range(rows.count)) if rows.histories else set()
        for run in self.runs(rows, tokens):
            begin, end = run.first - part.start, run.first - part.start + run.rows
            some = tokens.part(begin, end) if len(counts) > run.rows else tokens
            self._run(rows, run, some, outputs[begin:end])
            idle.difference_update(range(run.first, run.first + run.rows))
        for row in idle:
            for memory in caches.of(Replaced):
                memory.keep(row, turn)
        length = length.copy()
        length[part] += counts
        if not by_columns:
            return rows.replace(length=length, turn=1 - turn)
        inside = np.arange(new)[None] < counts[:, None]
        occupied = np.concatenate((rows.occupied, inside), axis=1)
        return rows.replace(length=length, occupied=occupied, turn=1 - turn)

    def _run(self, rows: Rows, run: GraphRun, tokens: RowTokens, outputs: np.ndarray) -> None:
        """Run the graph on tokens and write the outputs of requested ones, directly if it writes
        as many for each row.
        """
        requested, columns, caches = tokens.requested, tokens.columns, rows.caches
        width = max(int(requested.max()), self.fewest) if self.selects else run.new
        alone = run.new == 1 and not run.first and caches.kinds == IN_PLACE
        if alone and requested.all():
            output = self.bind(rows, run.feeds).run()
        else:
            place = outputs[:, int(columns[0]) : int(columns[0]) + width]
            alike = len(requested) == 1 or (np.ptp(columns) == 0 and requested.min() == width)
            alike = alike and 0 < width == int(requested[0]) and place.flags.c_contiguous
            run = run._replace(result=place if alike else None)
            memory = caches.state_memory(run.first, run.rows, run.new, rows.used, rows.reached[1])
            output = self.graph.run(run, memory)
            if output is place:
                return
        numbers = zip(columns.tolist(), requested.tolist(), tokens.counts.tolist(), strict=True)
        for row, (column, last, count) in enumerate(numbers):
            begin = 0 if self.selects else count - last
            if last:
                outputs[row, column : column + last] = output[row, begin : begin + last]

    def read_out(self, rows: Rows, prompt: Prompt) -> np.ndarray:
        """Feed whole rows, and return the second output [B,N], or [B,S,N] with zeros at padding."""
        outputs: List[np.ndarray] = []
        for run in self.runs(rows, self.with_coordinates(rows, prompt.tokens)):
            memory = rows.caches.state_memory(run.first, run.rows, run.new, 0, 0)
            outputs += list(self.graph.run(run._replace(output=1), memory))
        if len(self.manifest.outputs[1].axes) == 2:
            return np.stack(outputs)
        result, counts = prompt.outputs(self.manifest.outputs[1]), prompt.tokens.counts.tolist()
        for row, (output, count) in enumerate(zip(outputs, counts, strict=True)):
            result[row, :count] = output[:count]
        return prompt.in_columns(result)

    def bind(self, rows: Rows, feeds: Feeds) -> "Binding":
        """Return a binding whose graph inputs are `feeds`, for S tokens of each row. It is made
        once for inputs of the same shapes if caches are written in place.
        """
        caches = rows.caches
        if caches.kinds != IN_PLACE:
            return self._new_binding(rows, feeds)
        encoder = [value.name for value in self.manifest.encoder]
        key: List[object] = [caches.graph_slots]
        key += [array.shape for array in feeds.values()]
        key += [feeds[name].ctypes.data for name in encoder]
        total = "total_sequence_length"
        if total in feeds and total not in self.counters:  # a CUDA graph does not read it again
            key.append(int(feeds[total]))
        binding = caches.bindings.get(tuple(key))
        if binding is None:
            if len(caches.bindings) >= MOST_BINDINGS:
                caches.bindings.clear()
            binding = caches.bindings[tuple(key)] = self._new_binding(rows, feeds)
        binding.set({name: feeds[name] for name in feeds if name not in encoder})
        return binding

    def _new_binding(self, rows: Rows, feeds: Feeds) -> "Binding":
        """Return a new binding; its run too, if caches are written in place."""
        name, output = self.manifest.inputs[0].name, self.manifest.outputs[0]
        tokens = feeds[name]  # perhaps in the memory of a caller
        count, new = tokens.shape[:2]
        result = np.zeros((count, new, *output.axes[2:]), output.dtype)  # [B,S,*]
        binding = Binding({**feeds, name: tokens.copy()}, name, self.counters, result)
        if rows.caches.kinds == IN_PLACE:
            states = rows.caches.state_memory(0, count, new, 0, 0)
            binding.runs[0] = self.graph.repeat(binding.feeds, states, result)
        return binding

    def step_feeds(self, rows: Rows, new: int) -> Feeds:
        """Return the graph inputs for `new` zero tokens of every row, with all outputs requested,
        and slots in multiples.
        """
        source, counts = self.manifest.inputs[0], np.full(rows.count, new)
        zeros = np.zeros((rows.count, new, *source.token_shape), source.dtype)
        tokens = RowTokens(slice(0, rows.count), zeros, counts, counts, {}, counts)
        feeds = self.fill(rows, self.with_coordinates(rows, tokens), new)
        slots = self.step_slots(rows, rows.used + new)
        if "slots" in self.slot_inputs:
            feeds["slots"] = np.arange(slots)
        if "total_sequence_length" in self.slot_inputs:
            feeds["total_sequence_length"][...] = slots
        return feeds

    def step_slots(self, rows: Rows, needed: int) -> int:
        """Return how many slots steps count: more than the `needed` ones of the longest row, at
        most a quarter more or STEP_SLOTS. 0 if the inputs change with each step.

        So the inputs of a step with slots, or of a CUDA graph, which does not read
        total_sequence_length again, change rarely. Slots without a token get scores too.
        """
        if not self.slot_inputs:
            return 0
        part = max(STEP_SLOTS, 1 << max(needed.bit_length() - 3, 0))
        return min(-(-needed // part) * part, rows.caches.graph_slots)

    def with_stepper(self, rows: Rows) -> Rows:
        """Return rows, which have room for a token, with a stepper."""
        used, caches, room = rows.used, rows.caches, int(rows.room.min())
        if InPlace in caches.kinds:
            room = min(room, caches.graph_slots - used)
        if caches.window.size:
            room = min(room, int((rows.first_kept + caches.window.slots - rows.length).min()))
        slots = self.step_slots(rows, used + 1)
        if slots:
            room = min(room, slots - used)
        # The attention mask grows by a column at every step, so a binding serves one step only.
        room = 1 if self.manifest.signature == "mask" else room
        rows = rows.replace()
        rows.stepper = Stepper(self, rows, room)
        return rows

    def record_step(self, rows: Rows, x: np.ndarray) -> None:
        """Record in the histories the token of every row, x [B] or [B,E], of the next step."""
        ones = np.ones(len(x), np.int64)
        tokens = RowTokens(slice(0, len(x)), x[:, None], ones, ones, {}, ones)
        record(rows, self.with_coordinates(rows, tokens))


def record(rows: Rows, tokens: RowTokens) -> None:
    """Record in the histories the tokens that are about to be read."""
    lengths = rows.length.tolist()
    for index, count in enumerate(tokens.counts.tolist()):
        if count:
            row = tokens.rows.start + index
            planes = {name: plane[:, index, :count] for name, plane in tokens.planes.items()}
            states = functools.partial(rows.caches.snapshot, row, rows.turn)
            rows.histories[row].record(lengths[row], (tokens.x[index, :count], planes), states)


class Binding:
    """Memory of the graph inputs `feeds`, which it takes over, for S tokens per row, and of the
    output `result` [B,S,*]. counters: names of the inputs that grow by one with each token.
    """

    def __init__(
        self, feeds: Feeds, tokens: str, counters: Collection[str], result: np.ndarray
    ) -> None:
        # They grow by one per token; an array per dtype
        self.counters = _in_one_array(feeds, counters)
        self.feeds, self.tokens, self.result = feeds, feeds[tokens], result  # tokens [B,S,*]
        # Number of tokens, since it was set, for which the counters stand
        self.at = 0
        # Functions that run the graph, by `turn` of the rows; 0 if all states are in place.
        self.runs: Dict[int, BoundRun] = {}

    def set(self, feeds: Feeds) -> None:
        """Overwrite the graph inputs with others of the same shapes."""
        self.at = 0
        for name, array in feeds.items():
            self.feeds[name][...] = array

    def run(self) -> np.ndarray:
        """Run the graph on states in place and return `result`. Raise GraphError if it failed."""
        try:
            self.runs[0]()
        except RUN_ERRORS as error:
            raise GraphError(error) from None
        return self.result

    def advance(self, count: int) -> None:
        """Let the counters stand for `count` tokens."""
        if count != self.at:
            for counter in self.counters:
                counter += count - self.at
            self.at = count


class Stepper:
    """Feeds one token per row and step, from rows with room for it.

    Attributes:
        room: number of tokens per row before the session must check its limits again; -1 during a
            step and after one that failed or was interrupted, so that the next is bound anew.
        binding: graph inputs of a step.
        passes: bindings for passes of several tokens per row, by their number S.
        take: `take(rows, inputs)` feeds one token per row, [B] int64 or [B,E], of rows with this
            stepper, and returns [B,*], which the next step overwrites.
    """

    def __init__(self, reading: Reading, rows: Rows, room: int) -> None:
        manifest = self._manifest = reading.manifest
        self.room = room
        self.binding = reading.bind(rows, reading.step_feeds(rows, 1))
        self._token = self.binding.tokens[:, 0]
        alone = manifest.continuation_rows == 1 and len(self._token) > 1
        passes = rows.caches.kinds == IN_PLACE and not alone
        self._widest = min(manifest.chunk, WIDEST) if passes else 1
        self.passes: Dict[int, Binding] = {}
        self.take = self._taker()

    def fits(self, x: np.ndarray) -> bool:
        """Whether these inputs, [B,S] ids or [B,S,E] activations, are those of a step or a pass."""
        token = self._token
        alike = x.ndim == token.ndim + 1 and (len(x), *x.shape[2:]) == token.shape
        return alike and x.dtype == token.dtype and 1 <= x.shape[1] <= min(self._widest, self.room)

    def take_pass(self, reading: Reading, rows: Rows, x: np.ndarray) -> np.ndarray:
        """Feed S tokens per row of rows with this stepper, inputs for which `fits` is true.
        Return outputs [B,S,*], which the next pass of S tokens overwrites. Raise ValueError for an
        id outside the vocabulary, GraphError if the graph failed.
        """
        new, (taken, turn) = x.shape[1], rows.reached
        if new not in self.passes:
            binding = reading.bind(rows, reading.step_feeds(rows, new))
            binding.at, self.passes[new] = taken, binding
        if self._manifest.vocabulary:
            check_tokens(self._manifest.vocabulary, list(x))
        binding, room, self.room = self.passes[new], self.room, -1
        binding.advance(taken)
        binding.tokens[...] = x
        result = binding.run()
        self.binding.advance(taken + new)
        rows.reached = (taken + new, turn)
        self.room = room - new
        return result

    def checked(self, inputs: Any) -> np.ndarray:
        """Return inputs as [B] int64 or [B,E]. Raise ValueError for another form or a wrong id."""
        token, vocabulary = self._token, self._manifest.vocabulary
        x = arguments.array_of("a step", inputs)
        if x.shape != token.shape or x.dtype.kind not in ("iu" if vocabulary else "f"):
            form = f"{list(token.shape)} {self._manifest.inputs[0].dtype}"
            raise expected(f"one token per row in a step, {form}", f"{list(x.shape)} {x.dtype}")
        if vocabulary:
            check_tokens(vocabulary, [x])
        return x.astype(token.dtype, copy=False)

    def _taker(self) -> Callable[[Rows, Any], np.ndarray]:
        """Return `take`, with all its objects as local variables: after each run of the graph,
        Python's memory is not in the CPU cache, and look-ups are slow.

        The stepper is not a local variable: a reference cycle would keep its caches until the next
        garbage collection.
        """
        binding, token = self.binding, self._token
        shape, dtype, vocabulary = token.shape, token.dtype, self._manifest.vocabulary
        output, run = binding.result[:, 0], binding.runs.get(0)
        # Incrementing an item of a memoryview takes 0.1 us. A numpy addition takes 8 us when its
        # code is not in the CPU cache, but is faster for many items.
        few: List[Any] = [counter.data for counter in binding.counters if counter.size <= FEW]
        items = [(view, index) for view in few for index in range(len(view))]
        many = [counter for counter in binding.counters if counter.size > FEW]
        unsigned = token.view(np.uint64) if vocabulary else token
        highest = np.maximum.reduce

        def take(rows: Rows, inputs: Any) -> np.ndarray:
            """Feed one token per row, which counts as fed once `reached` is assigned."""
            stepper = rows.stepper
            if type(inputs) is not np.ndarray or inputs.dtype is not dtype or inputs.shape != shape:
                inputs = stepper.checked(inputs)
            token[...] = inputs
            # As an unsigned integer, a negative id exceeds the vocabulary.
            if vocabulary and highest(unsigned) >= vocabulary:
                stepper.checked(inputs)
            (taken, turn), room = rows.reached, stepper.room
            stepper.room = -1
            try:
                if run is None:
                    turn = _run(binding, rows)
                else:
                    run()
            except GraphError:
                raise
            except RUN_ERRORS as error:
                raise GraphError(error) from None
            for view, index in items:
                view[index] += 1
            for counter in many:
                counter += 1
            binding.at = taken + 1
            rows.reached = (taken + 1, turn)
            stepper.room = room - 1
            return output

        return take


def _run(binding: Binding, rows: Rows) -> int:
    """Run the graph on one token of each row and return `turn` of the rows after it."""
    caches, turn, used = rows.caches, rows.turn, rows.used
    graph, count = caches.graph, len(binding.tokens)
    if Growing in caches.kinds:  # their shapes change at each call
        caches = rows.caches = caches.reserve(used + 1, caches.rows, turn)
        states = caches.state_memory(0, count, 1, used, turn)
        run = graph.repeat(binding.feeds, states, binding.result)
    else:
        if turn not in binding.runs:
            states = caches.state_memory(0, count, 1, used, turn)
            binding.runs[turn] = graph.repeat(binding.feeds, states, binding.result)
        run = binding.runs[turn]
    run()
    return 1 - turn


def _in_one_array(feeds: Feeds, counters: Collection[str]) -> List[np.ndarray]:
    """Store the counters among the feeds in one array per dtype, which one addition increments."""
    arrays: List[np.ndarray] = []
    for dtype in {feeds[name].dtype for name in feeds if name in counters}:
        names = [name for name in feeds if name in counters and feeds[name].dtype == dtype]
        arrays.append(np.concatenate([feeds[name].reshape(-1) for name in names]))
        begin = 0
        for name in names:
            shape, size = feeds[name].shape, feeds[name].size
            feeds[name] = arrays[-1][begin : begin + size].reshape(shape)
            begin += size
    return arrays
