"""Log-length attention temperature (Chiang and Cholak 2022, Overcoming a Theoretical Limitation of Self-Attention, 5.3; Su 2021)."""

import math
from typing import Tuple

import numpy as np
from torch import Tensor

from posenc_export.encodings.base import Geometry, Oracle, PositionEncoding, Table


class LogN(PositionEncoding):
    """q_i max(1, log(i + 1) / log(trained)): attention stays as sharp over many keys as it was over `trained` of them.

    Hook: rotate (queries only). State: none. Range: 0 .. max_positions - 1.

    Args:
        geometry: max_positions.
        trained: length in tokens that the model was trained on.

    Raises:
        ValueError: trained below 2.
    """

    def __init__(self, geometry: Geometry, trained: int = 512) -> None:
        super().__init__()
        if trained < 2:
            raise ValueError(f"logn: trained is at least 2 tokens, got {trained}; set trained=N")
        self.trained = trained
        self.factors = Table(np.maximum(1.0, np.log(np.arange(1, geometry.max_positions + 1)) / math.log(trained))[:, None])

    def rotate(self, q: Tensor, k: Tensor, positions: Tensor) -> Tuple[Tensor, Tensor]:
        """q [B,S,H,D], k [B,S,K,D], positions [B,S] int64 to the same shapes and dtypes."""
        return (q * self.factors(positions).unsqueeze(3)).to(q.dtype), k

    def oracle(self) -> Oracle:
        return LogNOracle(self.trained)


class LogNOracle(Oracle):
    def __init__(self, trained: int) -> None:
        self.trained = trained

    def rotate(self, x: np.ndarray, position: int) -> np.ndarray:
        return x * max(1.0, math.log(position + 1, self.trained))

    def rotate_key(self, x: np.ndarray, position: int) -> np.ndarray:
        return x
