"""Numbers that keep float32 in a cast: tables computed in float64, and trained factors."""

from dataclasses import dataclass
from typing import Sequence

import numpy as np
import torch
from torch import Tensor

from posenc_export.shared.numerics import FINE
from posenc_export.shared.refusal import refusal

# Numbers of a table from which graphs store two levels instead; below, nodes cost more than bytes.
LARGE = 1 << 20


@dataclass(frozen=True, eq=False)
class TwoLevels:
    """Tables from which cosines and sines of the angles p w_k of positions p are computed in
    float64, by the addition theorem for the angles of FINE (p // FINE) and p % FINE.

    coarse [ceil(M/FINE),2n] and fine [FINE,2n]: float64, cosines before sines.
    """

    coarse: np.ndarray
    fine: np.ndarray

    def rows(self, count: int) -> tuple[np.ndarray, np.ndarray]:
        """Return cosines and sines [count,n] float64."""
        cos, sin = np.split(self.coarse[:, None], 2, axis=2)
        of_fine = np.split(self.fine, 2, axis=1)
        waves = cos * of_fine[0] - sin * of_fine[1], sin * of_fine[0] + cos * of_fine[1]
        cosines, sines = (wave.reshape(-1, wave.shape[2])[:count] for wave in waves)
        return cosines, sines


class Float32(torch.nn.Module):
    """Tensors that a cast of the model leaves in float32."""

    def _apply(self, fn, recurse=True):  # type: ignore[no-untyped-def]
        def moved(tensor: Tensor) -> Tensor:
            return tensor.to(fn(torch.empty(0, device=tensor.device)).device)

        return super()._apply(moved, recurse)


class Table(Float32):
    """Rows [M,n] computed in float64, kept in float32 when the model is cast, and read with Gather.

    Args:
        rows: the numbers.
        levels: two levels that have the rows as cosines, or as sines if `sines`. ONNX graphs of
            some targets store them in place of the rows.

    Raises:
        ValueError: rows that are not finite.
    """

    rows: Tensor

    def __init__(
        self, rows: np.ndarray, levels: TwoLevels | None = None, sines: bool = False
    ) -> None:
        super().__init__()
        self.levels, self.sines = levels, sines
        with np.errstate(over="ignore"):  # reported below
            numbers = np.ascontiguousarray(rows, dtype=np.float32)
        if not np.isfinite(numbers).all():
            remedy = "choose parameters closer to their defaults"
            raise refusal("encoding", "tables of finite numbers", "infinity or NaN", remedy)
        self.register_buffer("rows", torch.from_numpy(numbers), persistent=False)

    def forward(self, positions: Tensor) -> Tensor:
        """positions [B,S] int64 (-1 is read as 0) to [B,S,n] float32."""
        return torch.nn.functional.embedding(positions.clamp(min=0), self.rows)


def wave_tables(
    frequencies: Sequence[float], count: int, magnitude: float = 1.0
) -> tuple[Table, Table]:
    """Tables of cosines and sines of p w_k times a magnitude, at positions p = 0 .. count - 1.

    Args:
        frequencies: w_k, n numbers.

    Raises:
        ValueError: numbers that are not finite.
    """
    if count * len(frequencies) < LARGE:
        angles = np.outer(np.arange(count), frequencies)
        return Table(np.cos(angles) * magnitude), Table(np.sin(angles) * magnitude)
    np.empty((count, len(frequencies)))  # raises MemoryError at once, before what fits is computed
    starts, places = np.arange(0, count, FINE), np.arange(FINE)
    coarse, fine = (np.outer(positions, frequencies) for positions in (starts, places))
    levels = TwoLevels(
        np.concatenate((np.cos(coarse), np.sin(coarse)), axis=1) * magnitude,
        np.concatenate((np.cos(fine), np.sin(fine)), axis=1),
    )
    cosines, sines = levels.rows(count)
    return Table(cosines, levels), Table(sines, levels, sines=True)


def levels_of(module: torch.nn.Module) -> dict[str, tuple[str, Table]]:
    """Return the tables in two levels of a module by the name of the buffer of their rows, each
    with the name that begins those of its two constants, which cosines and sines share.
    """
    names: dict[TwoLevels, str] = {}
    levels: dict[str, tuple[str, Table]] = {}
    for name, part in module.named_modules(remove_duplicate=False):
        if isinstance(part, Table) and part.levels is not None:
            levels[f"{name}.rows"] = names.setdefault(part.levels, name), part
    return levels


class Exact(Float32):
    """A trained tensor that stays float32, because it multiplies positions."""

    def __init__(self, value: Tensor) -> None:
        super().__init__()
        self.value = torch.nn.Parameter(value.to(torch.float32))

    def forward(self) -> Tensor:
        """Return the tensor, float32."""
        return self.value
