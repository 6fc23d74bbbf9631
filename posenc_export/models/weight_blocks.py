"""Weights of few bits as checkpoints hold them: codes with a scale and an offset for each block."""

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any

import numpy as np


@dataclass(frozen=True)
class Blocks:
    """Weights [N,K] as code * scale + offset."""

    codes: np.ndarray  # [N,blocks,block] int8, of `bits` bits
    scales: np.ndarray  # [N,blocks] float32
    offsets: np.ndarray | None  # [N,blocks] float32; None for 0
    bits: int  # 4 or 8


class Matrix(ABC):
    """A tensor [rows,K] of a checkpoint that has few bits."""

    rows: int

    @abstractmethod
    def weight(self) -> np.ndarray:
        """Return the tensor as float32."""

    @abstractmethod
    def blocks(self) -> Blocks | None:
        """Return its blocks, or None if its type has others than codes with a scale and an offset
        for 16 or more inputs.
        """

    def __deepcopy__(self, memo: dict[int, Any]) -> "Matrix":
        return self  # tensors are mapped from files, and a copy would read them into memory
