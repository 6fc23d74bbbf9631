"""Other runtimes of the same models. Each file is imported only in its contestant's process."""

import numpy as np

CHUNK = 1024  # most tokens per call, which limits the memory of attention scores


class CallSession:
    """A session whose prompts and steps both make `call`, which a peer defines. A call may return
    the outputs of its last token only. A peer with caches that do not follow `length` by themselves
    also overrides `reset` and `rewind`.
    """

    load_seconds: float | None = None  # without imports; None for the time of `open_session`

    chunk: int | None = CHUNK  # most tokens of a call; None for a prompt in one call
    length = 0  # tokens in the cache before a call

    def call(self, inputs: np.ndarray) -> np.ndarray:
        """Append [B,S] int64 ids or [B,S,E] hidden states; return outputs [B,S,*], or the last
        [B,1,*].
        """
        raise NotImplementedError

    def reset(self) -> None:
        self.length = 0

    def prefill(self, inputs: np.ndarray, logits_to_keep: int) -> np.ndarray:
        chunk = self.chunk or inputs.shape[1]
        starts = range(0, inputs.shape[1], chunk)
        outputs = [self._append(inputs[:, start : start + chunk]) for start in starts]
        return outputs[0] if len(outputs) == 1 else np.concatenate(outputs, axis=1)

    def step(self, inputs: np.ndarray) -> np.ndarray:
        return self._append(inputs[:, None])[:, -1]

    def rewind(self, n: int) -> None:
        self.length -= n

    def _append(self, inputs: np.ndarray) -> np.ndarray:
        output = self.call(inputs)
        self.length += inputs.shape[1]
        return output
