"""Offsets of two tokens in a window (Liu et al. 2021, Swin Transformer, 3.2)."""

import math

import torch
from torch import Tensor

from posenc_export.encodings.shared.base import Geometry
from posenc_export.shared.refusal import refusal


def window_of(name: str, geometry: Geometry, rows: int, columns: int) -> tuple[int, int]:
    """Rows and columns of a window; each 0 is replaced by the side of the smallest square that
    holds max_positions. ValueError: a window that does not hold max_positions.
    """
    side = math.isqrt(geometry.max_positions - 1) + 1
    if (rows or side) * (columns or side) < geometry.max_positions:
        rule = f"a window that holds max_positions {geometry.max_positions}"
        raise refusal(name, rule, f"{rows} x {columns}", "set rows=N, columns=N")
    return rows or side, columns or side


def offsets(
    q_positions: Tensor, k_positions: Tensor, rows: int, columns: int
) -> tuple[Tensor, Tensor]:
    """q_positions [B,S], k_positions [B,T] int64 to offsets in rows and in columns, query less key,
    each [B,S,T] int64 and counted from 0.

    Position p is at row p // columns and column p % columns. Entries at padding are arbitrary.
    """
    q, k = q_positions.clamp(min=0).unsqueeze(2), k_positions.clamp(min=0).unsqueeze(1)
    q_row = torch.div(q, columns, rounding_mode="floor")  # [B,S,1]
    k_row = torch.div(k, columns, rounding_mode="floor")  # [B,1,T]
    down = q_row - k_row + (rows - 1)
    return down, torch.remainder(q, columns) - torch.remainder(k, columns) + (columns - 1)


def offset_index(q_positions: Tensor, k_positions: Tensor, rows: int, columns: int) -> Tensor:
    """`offsets` as one index [B,S,T], 0 .. (2 rows - 1)(2 columns - 1) - 1, columns fastest."""
    down, right = offsets(q_positions, k_positions, rows, columns)
    return (down * (2 * columns - 1) + right).clamp(0, (2 * rows - 1) * (2 * columns - 1) - 1)


def offset_rules(rows: int, columns: int) -> list[str]:
    """What `offsets` gives, as rules of positions."""
    down, right = f"q // {columns} - k // {columns}", f"q % {columns} - k % {columns}"
    return [f"{down} + {rows - 1}", f"{right} + {columns - 1}"]


def offset_rule(rows: int, columns: int) -> str:
    """The index that `offset_index` gives, as a rule of positions."""
    down, right = offset_rules(rows, columns)
    most = (2 * rows - 1) * (2 * columns - 1) - 1
    return f"min(max(({down}) * {2 * columns - 1} + {right}, 0), {most})"
