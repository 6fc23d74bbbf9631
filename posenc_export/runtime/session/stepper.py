"""Feed one token per row, or a few, repeatedly with the same bindings. This is the cost of every
generated token.
"""

from dataclasses import dataclass
from typing import Any, Callable, Collection, Dict, List, Tuple

import numpy as np

from posenc_export.runtime.artefact.manifest import Value
from posenc_export.runtime.session.arguments import array_of, check_tokens
from posenc_export.runtime.session.errors import RUN_ERRORS, GraphError

WIDEST = 32  # most tokens per row of a pass whose binding is kept
FEW = 64  # arrays of at most this many counters are incremented item by item


@dataclass
class _Pass:
    """A binding for S tokens per row."""

    feeds: Dict[str, np.ndarray]  # its memory is bound
    tokens: np.ndarray  # the token array of feeds, [B,S] or [B,S,E]
    counters: List[np.ndarray]  # the inputs that grow by one with each token
    step: Any  # state.Step
    taken: int = (
        0  # number of tokens that the stepper had taken for the current values of the counters
    )


class Stepper:
    """Feeds one token per row and step, starting from the caches of a session.

    Args:
        caches: caches before the first step.
        feeds: graph inputs of the first step. Each step writes its tokens into the token array and
            increments the counters by one.
        source: the graph input for tokens.
        vocabulary: number of token ids, or 0 for activations.
        room: number of steps before the session must check its limits again.
        widest: largest number of tokens per row that one run can take.
        counters: names of the inputs that grow by one with each token.

    Attributes:
        reached: number of tokens fed to each row, and the caches after them.
        room: number of tokens per row that are left.
        take: `take(stepper, inputs)` feeds one token per row, [B] int64 or [B,E], and returns
            [B,*], which the next step overwrites.
    """

    def __init__(
        self,
        caches: Any,
        feeds: Dict[str, np.ndarray],
        source: Value,
        vocabulary: int,
        room: int,
        widest: int,
        counters: Collection[str],
    ) -> None:
        self.reached: Tuple[int, Any] = (0, caches)
        self.room = room
        self._widest = min(widest, WIDEST)
        self._vocabulary, self._source, self._token = vocabulary, source, feeds[source.name][:, 0]
        self._names, self._counters = counters, _joined(feeds, counters)
        self._feeds, self._step = (
            feeds,
            caches.step(feeds, len(self._token)),
        )  # the binding refers to the memory of feeds, which must be kept alive
        self._passes: Dict[int, _Pass] = {}
        self.take = self._taker()

    @property
    def widest(self) -> int:
        """Largest number of slots of a row that one run may have written."""
        return max(self._passes, default=1)

    def can_pass(self, x: np.ndarray) -> bool:
        """Whether `take_pass` takes these inputs: [B,S] ids or [B,S,E] activations with 1 < S
        and room for S tokens, on caches that are written in place.
        """
        if (
            self._step.fixed is None
            or x.dtype != self._token.dtype
            or x.ndim != self._token.ndim + 1
        ):
            return False
        rows, new = x.shape[:2]
        return 1 < new <= min(self._widest, self.room) and (rows, *x.shape[2:]) == self._token.shape

    def take_pass(
        self, x: np.ndarray, feeds_of: Callable[[int], Dict[str, np.ndarray]]
    ) -> np.ndarray:
        """Feed S tokens per row and return their outputs [B,S,*], which the next pass of S tokens
        overwrites.

        Args:
            x: inputs for which `can_pass` is true.
            feeds_of: function that returns the graph inputs of a first pass of S tokens, called
                once for each S.

        Raises:
            ValueError: an id is outside the vocabulary.
            GraphError: the graph failed.
        """
        if self._vocabulary:
            check_tokens(self._vocabulary, list(x))
        new = x.shape[1]
        if new not in self._passes:
            feeds = feeds_of(new)
            counters = _joined(feeds, self._names)
            self._passes[new] = _Pass(
                feeds, feeds[self._source.name], counters, self.reached[1].step(feeds, len(x))
            )
        one, (taken, caches) = self._passes[new], self.reached
        for counter in one.counters:
            counter += taken - one.taken
        one.taken = taken
        one.tokens[...] = x
        assert one.step.fixed is not None and one.step.output is not None
        try:
            one.step.fixed()
        except RUN_ERRORS as error:
            raise GraphError(error) from None
        self.reached = (taken + new, caches)
        self.room -= new
        for counter in self._counters:
            counter += new
        return one.step.output

    def checked(self, inputs: Any) -> np.ndarray:
        """Return inputs as [B] int64 or [B,E]. Raise ValueError if shape or dtype differ, or an
        id is outside the vocabulary.
        """
        x, token = array_of("a step", inputs), self._token
        if x.shape != token.shape or x.dtype.kind not in ("iu" if self._vocabulary else "f"):
            raise ValueError(
                f"session: expected one token per row in a step, {list(token.shape)} "
                f"{self._source.dtype}, got {list(x.shape)} {x.dtype}"
            )
        if self._vocabulary:
            check_tokens(self._vocabulary, [x])
        return x.astype(token.dtype, copy=False)

    def back(self, n: int) -> None:
        """Go back by n tokens. Only for caches that are written in place."""
        for counter in self._counters:
            counter -= n
        self.room += n
        taken, caches = self.reached
        self.reached = (taken - n, caches)

    def _taker(self) -> Callable[["Stepper", Any], np.ndarray]:
        """Return `take`, with all its objects as local variables: after each run of the graph,
        Python's memory is not in the CPU cache, and look-ups are slow.

        The stepper itself is an argument and not a local variable: a reference cycle would keep its
        caches until the next garbage collection.
        """
        token, shape, dtype = self._token, self._token.shape, self._token.dtype
        run, fixed, output_of_fixed = self._step.run, self._step.fixed, self._step.output
        # Incrementing an item of a memoryview takes 0.1 us. A numpy addition takes 8 us when its
        # code is not in the CPU cache, but is faster for many items.
        few: List[Any] = [counter.data for counter in self._counters if counter.size <= FEW]
        items = [(view, index) for view in few for index in range(len(view))]
        many = [counter for counter in self._counters if counter.size > FEW]
        unsigned, limit = (
            (token.view(np.uint64), self._vocabulary) if self._vocabulary else (token, 0)
        )
        highest = np.maximum.reduce

        def take(stepper: "Stepper", inputs: Any) -> np.ndarray:
            """Feed one token per row. The token counts as fed once `reached` is assigned,
            whatever exception follows.
            """
            if type(inputs) is not np.ndarray or inputs.dtype is not dtype or inputs.shape != shape:
                inputs = stepper.checked(inputs)
            token[...] = inputs
            if (
                limit and highest(unsigned) >= limit
            ):  # as an unsigned integer, a negative id exceeds the limit
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


def _joined(feeds: Dict[str, np.ndarray], counters: Collection[str]) -> List[np.ndarray]:
    """Store the counters among the feeds in one array per dtype, so that one addition increments
    all of them.
    """
    joined, names = [], [name for name in feeds if name in counters]
    for dtype in sorted({feeds[name].dtype.str for name in names}):
        group = [name for name in names if feeds[name].dtype.str == dtype]
        block = np.concatenate([feeds[name].reshape(-1) for name in group])
        ends = np.cumsum([feeds[name].size for name in group])
        for name, end in zip(group, ends, strict=True):
            feeds[name] = block[end - feeds[name].size : end].reshape(feeds[name].shape)
        joined.append(block)
    return joined
