"""Log-length attention temperature (Chiang and Cholak 2022, Overcoming a Theoretical Limitation
of Self-Attention, 5.3; Su 2021; Llama 4; Ministral 3).
"""

import math
from typing import Literal, Mapping

import numpy as np
from torch import Tensor

from posenc_export.encodings.shared.base import Geometry, Oracle, PositionEncoding, Rows


class LogN(PositionEncoding):
    """q_i max(1, log(i + 1) / log(trained)), so that attention over many keys stays as sharp as
    over `trained` keys.

    The form "steps", of the layers without rotation in Llama 4, is q_i (1 + temperature log(1 +
    floor((i + first) / period))).

    Positions i count from 0: i + 1 is the number of keys up to the query, the n of the paper.

    Args:
        geometry: max_positions.
        trained: length in tokens that the model was trained on; for form "log".
        form: "log" or "steps".
        temperature, period: growth per logarithm, and number of tokens that share a value; for form
            "steps".
        first: number added to positions, 1 in Llama 4, 0 in Ministral 3; for form "steps".
    """

    any_size = True
    least = {"trained": 2, "temperature": 0, "period": 1}

    def rotate(self, q: Tensor, k: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        """q [B,S,H,D], k [B,S,K,D], positions [B,S] int64 to the same shapes and dtypes."""
        return (q * self.factors(positions).unsqueeze(3)).to(q.dtype), k

    def formulas(self) -> Mapping[str, Rows]:
        if self.form == "log":
            return {"factors": lambda p: np.maximum(1.0, np.log(p + 1) / math.log(self.trained))}
        steps = lambda p: (p + self.first) // self.period  # noqa: E731
        return {"factors": lambda p: 1 + self.temperature * np.log1p(steps(p))}

    def edges(self) -> dict[str, int]:
        last = self.period - self.first if self.form == "steps" else self.trained
        return {f"temperature from {last}": last}

    def __init__(
        self,
        geometry: Geometry,
        trained: int = 512,
        form: Literal["log", "steps"] = "log",
        temperature: float = 0.1,
        period: int = 8192,
        first: int = 1,
    ) -> None:
        super().__init__()
        if first not in (0, 1) or (first == 0 and form == "log"):
            raise ValueError(
                f"logn: expected first of 1, or 0 with form=steps, got {first} with "
                f"form={form}; the logarithm of 0 is not finite"
            )
        self.trained, self.form, self.temperature = trained, form, float(temperature)
        self.period, self.first = period, first
        self.factors = self.filled("factors", geometry.max_positions)


class LogNOracle(Oracle, of=LogN):
    def rotate(self, x: np.ndarray, position: int) -> np.ndarray:
        e = self.encoding
        if e.form == "log":
            return x * max(1.0, math.log(position + 1, e.trained))
        return x * (1 + e.temperature * math.log(1 + (position + e.first) // e.period))

    def rotate_key(self, x: np.ndarray, position: int) -> np.ndarray:
        return x
