"""Weights of few bits as checkpoints hold them: codes with a scale and an offset for each block."""

import itertools
from dataclasses import dataclass
from typing import Any, Callable, Collection, Dict, Mapping, Optional, Protocol, Sequence, Tuple

import numpy as np


@dataclass(frozen=True)
class Blocks:
    """Weights [N,K] as code * scale + offset."""

    codes: np.ndarray  # [N,blocks,block] int8, of `bits` bits
    scales: np.ndarray  # [N,blocks] float32
    offsets: Optional[np.ndarray]  # [N,blocks] float32; None for 0
    bits: int  # 4 or 8

    def cut(self, block: int) -> "Blocks":
        """Return the same weights in smaller blocks, of a divisor of the block size."""
        rows, count, size = self.codes.shape
        codes = self.codes.reshape(rows, count * size // block, block)
        scales = np.repeat(self.scales, size // block, axis=1)
        offsets = self.offsets
        offsets = None if offsets is None else np.repeat(offsets, size // block, axis=1)
        return Blocks(codes, scales, offsets, self.bits)


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
    """A weight as rows [N] int64 of tensors of a checkpoint, numbered through `parts`."""

    parts: Sequence[Matrix]
    rows: np.ndarray

    def __deepcopy__(self, memo: Dict[int, Any]) -> "Stored":
        return self  # tensors are mapped from files, and a copy would read them into memory


# A matrix, and the index of each of its rows [N,1] in the order of transformers' tensor.
Numbered = Tuple[Matrix, np.ndarray]


def stored(
    sources: Mapping[str, Collection[str]], matrix: Callable[[str], Optional[Numbered]]
) -> Dict[str, Stored]:
    """Return the weights of a model as rows of matrices of a checkpoint, by parameter.

    Args:
        sources: for each parameter, the names of the tensors that form it, one after the other.
        matrix: returns a tensor by name, None if it is no matrix or is not quantized.
    """
    weights = {}
    for parameter, names in sources.items():
        numbered = [part for part in map(matrix, names) if part is not None]
        if not numbered or len(numbered) < len(names):
            continue
        firsts = itertools.accumulate((part.rows for part, _ in numbered), initial=0)
        rows = [first + own[:, 0] for first, (_, own) in zip(firsts, numbered, strict=False)]
        weights[parameter] = Stored([part for part, _ in numbered], np.concatenate(rows))
    return weights
