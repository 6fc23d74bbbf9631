"""One token per row, again and again, on a binding that is kept: the path whose cost every generated token pays."""

from typing import Any, Callable, Collection, Dict, List, Tuple

import numpy as np

from posenc_export.runtime.errors import RUN_ERRORS, GraphError
from posenc_export.runtime.manifest import Value
from posenc_export.runtime.rows import array_of, check_tokens

FEW = 64  # counters
CONSTANT = ("first_position", "attention_mask", "logits_index")  # inputs that are the same for every step of a binding


class Stepper:
    """Takes tokens from the state a session is in. `reached` is how many it took and the caches behind them; `room` is how many it may take.
    `take(stepper, inputs)` takes one of each row: [B] int64 or [B,E] to [B,*], overwritten by the next step.

    Args:
        caches: where it starts.
        feeds: inputs of the first step; its array of tokens is written at each one, counters move on by one.
        source: the graph input that takes tokens.
        vocabulary: number of ids, or 0 for activations.
        room: steps before the session has to look at lengths again.
        constant: names of inputs that are the same for every step.
    """

    def __init__(self, caches: Any, feeds: Dict[str, np.ndarray], source: Value, vocabulary: int, room: int, constant: Collection[str] = ()) -> None:
        self.reached: Tuple[int, Any] = (0, caches)
        self.room = room
        self._vocabulary, self._source, self._token = vocabulary, source, feeds[source.name][:, 0]
        self._counters = _joined(feeds, [name for name in feeds if name not in (source.name, *CONSTANT, *constant)])
        self._feeds, self._step = feeds, caches.step(feeds, len(self._token))  # a binding borrows its feeds: they must live as long
        self.take = self._taker()

    def checked(self, inputs: Any) -> np.ndarray:
        """inputs as [B] int64 or [B,E].

        Raises:
            ValueError: another shape or dtype, ids outside the vocabulary.
        """
        x, token = array_of("a step", inputs), self._token
        if x.shape != token.shape or x.dtype.kind not in ("iu" if self._vocabulary else "f"):
            raise ValueError(f"session: a step takes {len(token)} tokens, {list(token.shape)} {self._source.dtype}, got {list(x.shape)} {x.dtype}")
        if self._vocabulary:
            check_tokens(self._vocabulary, [x])
        return x.astype(token.dtype, copy=False)

    def back(self, n: int) -> None:
        """Stand n tokens earlier; only where caches are written in place."""
        for counter in self._counters:
            counter -= n
        self.room += n
        taken, caches = self.reached
        self.reached = (taken - n, caches)

    def _taker(self) -> Callable[["Stepper", Any], np.ndarray]:
        """`take`, with all it needs as locals: after each run of the graph, Python's own memory is cold, and every look-up counts. Not with the stepper
        itself: in a cycle, its caches would stay in memory until Python looks for garbage."""
        token, shape, dtype = self._token, self._token.shape, self._token.dtype
        run, fixed, output_of_fixed = self._step.run, self._step.fixed, self._step.output
        # An item of a memoryview is counted up in 0.1 us, where a numpy addition costs 8 us when its code is cold; of many items it is the faster one.
        few: List[Any] = [counter.data for counter in self._counters if counter.size <= FEW]
        items = [(view, index) for view in few for index in range(len(view))]
        many = [counter for counter in self._counters if counter.size > FEW]
        unsigned, limit = (token.view(np.uint64), self._vocabulary) if self._vocabulary else (token, 0)
        highest = np.maximum.reduce

        def take(stepper: "Stepper", inputs: Any) -> np.ndarray:
            """An exception before the store to `reached` leaves the token out, one behind it not."""
            if type(inputs) is not np.ndarray or inputs.dtype is not dtype or inputs.shape != shape:
                inputs = stepper.checked(inputs)
            token[...] = inputs
            if limit and highest(unsigned) >= limit:  # without its sign an id below 0 is large
                stepper.checked(inputs)
            taken, caches = stepper.reached
            if fixed is None:
                output, caches = run(caches)
            else:
                output = output_of_fixed
                try:
                    fixed()
                except RUN_ERRORS as error:
                    raise GraphError(error) from None
            stepper.reached = (taken + 1, caches)
            stepper.room -= 1
            for view, index in items:
                view[index] += 1
            for counter in many:
                counter += 1
            return output  # type: ignore[no-any-return]

        return take


def _joined(feeds: Dict[str, np.ndarray], names: List[str]) -> List[np.ndarray]:
    """Put the feeds of these names into one array per dtype, so that one addition moves them all."""
    joined = []
    for dtype in sorted({feeds[name].dtype.str for name in names}):
        group = [name for name in names if feeds[name].dtype.str == dtype]
        block = np.concatenate([feeds[name].reshape(-1) for name in group])
        ends = np.cumsum([feeds[name].size for name in group])
        for name, end in zip(group, ends, strict=True):
            feeds[name] = block[end - feeds[name].size : end].reshape(feeds[name].shape)
        joined.append(block)
    return joined
