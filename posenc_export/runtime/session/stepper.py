"""Feed one token per row repeatedly with the same binding. This is the cost of every generated token."""

from typing import Any, Callable, Collection, Dict, List, Tuple

import numpy as np

from posenc_export.runtime.artefact.manifest import Value
from posenc_export.runtime.session.arguments import array_of, check_tokens
from posenc_export.runtime.session.errors import RUN_ERRORS, GraphError

FEW = 64  # arrays of at most this many counters are incremented item by item
CONSTANT = ("first_position", "attention_mask", "logits_index")  # inputs that do not change between steps with one binding


class Stepper:
    """Feeds one token per row and step, starting from the caches of a session.

    Args:
        caches: caches before the first step.
        feeds: graph inputs of the first step. Each step writes its tokens into the token array and increments the counters by one.
        source: the graph input for tokens.
        vocabulary: number of token ids, or 0 for activations.
        room: number of steps before the session must check its limits again.
        constant: names of further inputs that do not change between steps.

    Attributes:
        reached: number of tokens fed to each row, and the caches after them.
        room: number of steps that are left.
        take: `take(stepper, inputs)` feeds one token per row, [B] int64 or [B,E], and returns [B,*], which the next step overwrites.
    """

    def __init__(self, caches: Any, feeds: Dict[str, np.ndarray], source: Value, vocabulary: int, room: int, constant: Collection[str] = ()) -> None:
        self.reached: Tuple[int, Any] = (0, caches)
        self.room = room
        self._vocabulary, self._source, self._token = vocabulary, source, feeds[source.name][:, 0]
        self._counters = _joined(feeds, [name for name in feeds if name not in (source.name, *CONSTANT, *constant)])
        self._feeds, self._step = feeds, caches.step(feeds, len(self._token))  # the binding refers to the memory of feeds, which must be kept alive
        self.take = self._taker()

    def checked(self, inputs: Any) -> np.ndarray:
        """Return inputs as [B] int64 or [B,E]. Raise ValueError if shape or dtype differ, or an id is outside the vocabulary."""
        x, token = array_of("a step", inputs), self._token
        if x.shape != token.shape or x.dtype.kind not in ("iu" if self._vocabulary else "f"):
            raise ValueError(f"session: expected one token per row in a step, {list(token.shape)} {self._source.dtype}, got {list(x.shape)} {x.dtype}")
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
        """Return `take`, with all its objects as local variables: after each run of the graph, Python's memory is not in the CPU cache, and look-ups are slow.

        The stepper itself is an argument and not a local variable: a reference cycle would keep its caches until the next garbage collection.
        """
        token, shape, dtype = self._token, self._token.shape, self._token.dtype
        run, fixed, output_of_fixed = self._step.run, self._step.fixed, self._step.output
        # Incrementing an item of a memoryview takes 0.1 us. A numpy addition takes 8 us when its code is not in the CPU cache, but is faster for many items.
        few: List[Any] = [counter.data for counter in self._counters if counter.size <= FEW]
        items = [(view, index) for view in few for index in range(len(view))]
        many = [counter for counter in self._counters if counter.size > FEW]
        unsigned, limit = (token.view(np.uint64), self._vocabulary) if self._vocabulary else (token, 0)
        highest = np.maximum.reduce

        def take(stepper: "Stepper", inputs: Any) -> np.ndarray:
            """Feed one token per row. The token counts as fed once `reached` is assigned, whatever exception follows."""
            if type(inputs) is not np.ndarray or inputs.dtype is not dtype or inputs.shape != shape:
                inputs = stepper.checked(inputs)
            token[...] = inputs
            if limit and highest(unsigned) >= limit:  # as an unsigned integer, a negative id exceeds the limit
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
    """Store the named feeds in one array per dtype, so that one addition increments all of them."""
    joined = []
    for dtype in sorted({feeds[name].dtype.str for name in names}):
        group = [name for name in names if feeds[name].dtype.str == dtype]
        block = np.concatenate([feeds[name].reshape(-1) for name in group])
        ends = np.cumsum([feeds[name].size for name in group])
        for name, end in zip(group, ends, strict=True):
            feeds[name] = block[end - feeds[name].size : end].reshape(feeds[name].shape)
        joined.append(block)
    return joined
