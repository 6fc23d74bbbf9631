"""Feed one token per row, or a few, with the same bindings: the cost of every generated token."""

from typing import Any, Callable, Collection, Dict, List, Tuple

import numpy as np

from posenc_export.runtime.session.argument_arrays import array_of, check_tokens
from posenc_export.runtime.session.caches import Caches
from posenc_export.runtime.session.errors import RUN_ERRORS, GraphError, expected
from posenc_export.runtime.session.graph import Feeds

MOST_BINDINGS = 64  # of one memory
WIDEST = 32  # most tokens per row of a pass whose binding is kept
ONE_PLACE = ()  # key of the run in Binding.runs if all states are written in place
FEW = 64  # arrays of at most this many counters are incremented item by item


class Binding:
    """Memory of the graph inputs `feeds`, which it takes over, for S tokens per row, and of the
    output `result` [B,S,*].
    """

    def __init__(
        self, feeds: Feeds, tokens: str, counters: Collection[str], result: np.ndarray
    ) -> None:
        self.counters = _joined(feeds, counters)  # they grow by one per token; an array per dtype
        self.feeds, self.tokens, self.result = feeds, feeds[tokens], result  # tokens [B,S,*]
        # Number of tokens, since it was set, for which the counters stand
        self.at = 0
        # Functions that run the graph, by the addresses of the states; empty if all are in place.
        self.runs: Dict[Tuple[int, ...], Callable[[], object]] = {}

    def set(self, feeds: Feeds) -> None:
        """Overwrite the graph inputs with others of the same shapes."""
        self.at = 0
        for name, array in feeds.items():
            self.feeds[name][...] = array

    def run(self) -> np.ndarray:
        """Run the graph on states in place and return `result`. Raise GraphError if it failed."""
        try:
            self.runs[ONE_PLACE]()
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
    """Feeds one token per row and step, starting from the caches of a session with room for it.

    Args:
        feeds: graph inputs of the first step.
        counters: names of the inputs that grow by one with each token.

    Attributes:
        room: number of tokens per row before the session must check its limits again; -1 during a
            step and after one that failed or was interrupted, so that the next is bound anew.
        binding: graph inputs of a step.
        passes: bindings for passes of several tokens per row, by their number S.
        take: `take(state, inputs)` feeds one token per row, [B] int64 or [B,E], of a state with
            this stepper, and returns [B,*], which the next step overwrites.
    """

    def __init__(self, caches: Caches, feeds: Feeds, counters: Collection[str], room: int) -> None:
        manifest = caches.graph.manifest
        self.room = room
        self._manifest, self._in_place = manifest, caches.rules.all_in_place
        self.binding = binding_of(caches, feeds, counters)
        self._token = self.binding.tokens[:, 0]
        rows = len(self._token)
        self._widest = 1 if manifest.continuation_rows == 1 and rows > 1 else manifest.chunk
        self.passes: Dict[int, Binding] = {}
        self.take = self._taker()

    def can_step(self, x: np.ndarray) -> bool:
        """Whether these inputs [B,1] or [B,1,E] are one token of each row, as a step takes them."""
        return x.dtype == self._token.dtype and x.shape == self.binding.tokens.shape

    def can_pass(self, x: np.ndarray) -> bool:
        """Whether `take_pass` takes these inputs, [B,S] ids or [B,S,E] activations."""
        token = self._token
        if not self._in_place or x.ndim != token.ndim + 1:
            return False
        rows, new = x.shape[:2]
        fits = 1 < new <= min(self._widest, WIDEST, self.room)
        return fits and x.dtype == token.dtype and (rows, *x.shape[2:]) == token.shape

    def take_pass(self, state: Any, x: np.ndarray) -> np.ndarray:
        """Feed S tokens per row of a state with this stepper, inputs for which `can_pass` is true
        and `passes` has a binding. Return outputs [B,S,*], which the next pass of S tokens
        overwrites. Raise ValueError for an id outside the vocabulary, GraphError if the graph
        failed.
        """
        if self._manifest.vocabulary:
            check_tokens(self._manifest.vocabulary, list(x))
        new, (taken, caches) = x.shape[1], state.reached
        binding, room, self.room = self.passes[new], self.room, -1
        binding.advance(taken)
        binding.tokens[...] = x
        result = binding.run()
        self.binding.advance(taken + new)
        state.reached = (taken + new, caches)
        self.room = room - new
        return result

    def checked(self, inputs: Any) -> np.ndarray:
        """Return inputs as [B] int64 or [B,E]. Raise ValueError for another form or a wrong id."""
        x, token, vocabulary = array_of("a step", inputs), self._token, self._manifest.vocabulary
        if x.shape != token.shape or x.dtype.kind not in ("iu" if vocabulary else "f"):
            form = f"{list(token.shape)} {self._manifest.inputs[0].dtype}"
            raise expected(f"one token per row in a step, {form}", f"{list(x.shape)} {x.dtype}")
        if vocabulary:
            check_tokens(vocabulary, [x])
        return x.astype(token.dtype, copy=False)

    def _taker(self) -> Callable[[Any, Any], np.ndarray]:
        """Return `take`, with all its objects as local variables: after each run of the graph,
        Python's memory is not in the CPU cache, and look-ups are slow.

        The stepper is not a local variable: a reference cycle would keep its caches until the next
        garbage collection.
        """
        binding, token = self.binding, self._token
        shape, dtype, vocabulary = token.shape, token.dtype, self._manifest.vocabulary
        output, run = binding.result[:, 0], binding.runs.get(ONE_PLACE)
        # Incrementing an item of a memoryview takes 0.1 us. A numpy addition takes 8 us when its
        # code is not in the CPU cache, but is faster for many items.
        few: List[Any] = [counter.data for counter in binding.counters if counter.size <= FEW]
        items = [(view, index) for view in few for index in range(len(view))]
        many = [counter for counter in binding.counters if counter.size > FEW]
        unsigned = token.view(np.uint64) if vocabulary else token
        highest = np.maximum.reduce

        def take(state: Any, inputs: Any) -> np.ndarray:
            """Feed one token per row, which counts as fed once `reached` is assigned."""
            stepper = state.stepper
            if type(inputs) is not np.ndarray or inputs.dtype is not dtype or inputs.shape != shape:
                inputs = stepper.checked(inputs)
            token[...] = inputs
            # As an unsigned integer, a negative id exceeds the vocabulary.
            if vocabulary and highest(unsigned) >= vocabulary:
                stepper.checked(inputs)
            (taken, caches), room = state.reached, stepper.room
            stepper.room = -1
            try:
                if run is None:
                    caches = _run(binding, caches)
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
            state.reached = (taken + 1, caches)
            stepper.room = room - 1
            return output

        return take


def binding_of(caches: Caches, feeds: Feeds, counters: Collection[str]) -> Binding:
    """Return a binding of caches whose graph inputs are `feeds`, for S tokens of each row. It is
    made once for inputs of the same shapes if caches are written in place.
    """
    manifest, bindings = caches.graph.manifest, caches.notes.bindings
    if not caches.rules.all_in_place:
        return _new_binding(caches, feeds, counters)
    encoder = [value.name for value in manifest.encoder]
    key: List[object] = [caches.graph_slots]
    key += [array.shape for array in feeds.values()]
    key += [feeds[name].ctypes.data for name in encoder]
    total = "total_sequence_length"
    if total in feeds and total not in counters:  # a CUDA graph does not read it again
        key.append(int(feeds[total]))
    binding = bindings.get(tuple(key))
    if binding is None:
        if len(bindings) >= MOST_BINDINGS:
            bindings.clear()
        binding = bindings[tuple(key)] = _new_binding(caches, feeds, counters)
    binding.set({name: feeds[name] for name in feeds if name not in encoder})
    return binding


def _new_binding(caches: Caches, feeds: Feeds, counters: Collection[str]) -> Binding:
    """Return a new binding; its run too, if caches are written in place."""
    manifest = caches.graph.manifest
    name, output = manifest.inputs[0].name, manifest.outputs[0]
    tokens = feeds[name]  # perhaps in the memory of a caller
    result = np.zeros((*tokens.shape[:2], *output.axes[2:]), output.dtype)  # [B,S,*]
    binding = Binding({**feeds, name: tokens.copy()}, name, counters, result)
    if caches.rules.all_in_place:
        states = caches.state_memory(0, *tokens.shape[:2])
        binding.runs[ONE_PLACE] = caches.graph.repeat(binding.feeds, states, result)
    return binding


def _run(binding: Binding, caches: Caches) -> Caches:
    """Run the graph on one token of each row and return the caches after it."""
    graph, rows = caches.graph, len(binding.tokens)
    if caches.rules.growing:  # their shapes change at each call
        caches = caches.reserve(caches.growing_slots + 1, caches.rows)
        run = graph.repeat(binding.feeds, caches.state_memory(0, rows, 1), binding.result)
    else:  # states that are exchanged after each call have two places
        place = tuple([buffer.address for buffer in caches.past])
        if place not in binding.runs:
            states = caches.state_memory(0, rows, 1)
            binding.runs[place] = graph.repeat(binding.feeds, states, binding.result)
        run = binding.runs[place]
    run()
    return caches.after(1, range(rows, caches.rows))


def _joined(feeds: Feeds, counters: Collection[str]) -> List[np.ndarray]:
    """Store the counters among the feeds in one array per dtype, which one addition increments."""
    joined: List[np.ndarray] = []
    for dtype in {feeds[name].dtype for name in feeds if name in counters}:
        names = [name for name in feeds if name in counters and feeds[name].dtype == dtype]
        joined.append(np.concatenate([feeds[name].reshape(-1) for name in names]))
        begin = 0
        for name in names:
            shape, size = feeds[name].shape, feeds[name].size
            feeds[name] = joined[-1][begin : begin + size].reshape(shape)
            begin += size
    return joined
