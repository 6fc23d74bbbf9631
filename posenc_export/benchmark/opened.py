"""Interface of a loaded contestant."""

from typing import Any, Callable, Mapping, NamedTuple, Protocol, Union

import numpy as np

CHUNK = 1024  # most tokens per call, which limits the memory of attention scores


class Timed(Protocol):
    """Session whose calls are timed; runtime.Session has the same methods. Shapes: B rows, S tokens, E width."""

    def reset(self) -> None:
        """Empty the caches."""

    def prefill(self, inputs: Any, *, logits_to_keep: int) -> Any:
        """Append [B,S] int64 ids or [B,S,E] hidden states; return outputs of the last `logits_to_keep` tokens [B,n,*], 0 for all.

        Libraries without such an option return all outputs [B,S,*].
        """

    def step(self, inputs: Any) -> Any:
        """Append one token, [B] int64 ids or [B,E] hidden states; return its output [B,*]."""

    def rewind(self, n: int) -> None:
        """Remove the last n tokens of every row; not timed."""


class Opened(NamedTuple):
    """A loaded session.

    Args:
        session: the session.
        seconds: load time without imports.
        weights: origin of the weights: {"preset": name}, {"seed": number}, or empty for the user's own model.
    """

    session: Timed
    seconds: float
    weights: Mapping[str, Union[str, int]]


def in_chunks(call: Callable[[np.ndarray], np.ndarray], inputs: np.ndarray, chunk: int = CHUNK) -> np.ndarray:
    """Pass inputs [B,S,...] to `call` in chunks of at most `chunk` tokens; return the concatenated outputs [B,S,*]. A single output is not copied."""
    outputs = [call(inputs[:, start : start + chunk]) for start in range(0, inputs.shape[1], chunk)]
    return outputs[0] if len(outputs) == 1 else np.concatenate(outputs, axis=1)
