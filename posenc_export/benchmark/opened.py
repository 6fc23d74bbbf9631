"""What a contestant is while it is timed."""

from typing import Any, Callable, Mapping, NamedTuple, Protocol, Union

import numpy as np

CHUNK = 1024  # most tokens of a call, which bounds the memory of scores


class Timed(Protocol):
    """The calls of a session that are timed; those of runtime.Session have the same names. B rows, S tokens, E width."""

    def reset(self) -> None:
        """Empty caches."""

    def prefill(self, inputs: Any, *, logits_to_keep: int) -> Any:
        """[B,S] int64 ids or [B,S,E] hidden states behind the cache to the outputs of the last `logits_to_keep` tokens [B,n,*], 0 for all; a library that has
        no such choice gives all [B,S,*]."""

    def step(self, inputs: Any) -> Any:
        """[B] int64 ids or [B,E] hidden states to [B,*]."""

    def rewind(self, n: int) -> None:
        """Take back the last n tokens of every row; not timed."""


class Opened(NamedTuple):
    """A session that is ready.

    Args:
        grows: caches are made anew for each token, so that steps are taken back together and the first one behind a rewind is not counted.
        seconds: to load, imports excluded.
        weights: where they come from: {"preset": name}, {"seed": number}, or empty for a model of the user's own.
    """

    session: Timed
    grows: bool
    seconds: float
    weights: Mapping[str, Union[str, int]]


def in_chunks(call: Callable[[np.ndarray], np.ndarray], inputs: np.ndarray, chunk: int = CHUNK) -> np.ndarray:
    """What `call` gives for inputs [B,S,...] of at most `chunk` tokens each, joined to [B,S,*]; not copied where there is one call."""
    outputs = [call(inputs[:, start : start + chunk]) for start in range(0, inputs.shape[1], chunk)]
    return outputs[0] if len(outputs) == 1 else np.concatenate(outputs, axis=1)
