"""Weights of few bits as checkpoints hold them: codes with a scale and an offset for each block."""

from dataclasses import dataclass
from typing import Any, Dict, Optional, Protocol, Tuple

import numpy as np


@dataclass(frozen=True)
class Blocks:
    """Weights [N,K] as code * scale + offset."""

    codes: np.ndarray  # [N,blocks,block] int8, of `bits` bits
    scales: np.ndarray  # [N,blocks] float32
    offsets: Optional[np.ndarray]  # [N,blocks] float32; None for 0
    bits: int  # 4 or 8


class Matrix(Protocol):
    """A tensor [rows,K] of a checkpoint."""

    @property
    def rows(self) -> int:
        """The number of rows."""

    @property
    def quantized(self) -> bool:
        """Whether it has few bits."""

    def weight(self) -> np.ndarray:
        """Return the tensor as float32."""

    def blocks(self) -> Optional[Blocks]:
        """Return its blocks, or None if its type has others than codes with a scale and an offset
        for 16 or more inputs.
        """


@dataclass(frozen=True)
class Stored:
    """A weight as rows [N] int64 of a tensor of a checkpoint."""

    matrix: Matrix
    rows: np.ndarray

    def __deepcopy__(self, memo: Dict[int, Any]) -> "Stored":
        return self  # tensors are mapped from files, and a copy would read them into memory


# A matrix, and the index of each of its rows [N,1] in the order of transformers' tensor.
Numbered = Tuple[Matrix, np.ndarray]
