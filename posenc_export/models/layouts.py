"""Rotary layouts of checkpoints: interleaved pairs (the paper, Meta's complex form) and halves (transformers), by permuting the rows of q and k projections."""

from typing import Dict, Optional

import torch
from torch import Tensor


def to_half(weight: Tensor, heads: int, rotary: Optional[int] = None) -> Tensor:
    """Rows of a q or k projection [heads*D,E] (or its bias [heads*D]) for layout interleaved, reordered for layout half: scores stay what they were.

    Args:
        heads: query heads of a q, kv heads of a k projection.
        rotary: rotary size r; the head size D where None.

    Raises:
        ValueError: rows not divisible by heads, a rotary size that is odd or above D.
    """
    return weight.index_select(0, _rows(weight, heads, rotary))


def to_interleaved(weight: Tensor, heads: int, rotary: Optional[int] = None) -> Tensor:
    """The way back: rows for layout half, reordered for layout interleaved. Arguments and errors as `to_half`."""
    return weight.index_select(0, torch.argsort(_rows(weight, heads, rotary)))


def from_complex(weights: Dict[str, Tensor], heads: int, kv_heads: int) -> Dict[str, Tensor]:
    """{"qkv": [(H+2K)*D,E], "output": [E,H*D]} for layout half, from one layer of a checkpoint whose rotation multiplies complex numbers
    (view_as_complex of neighbouring entries, as Meta's): {"wq", "wk", "wv", "wo"}.

    Raises:
        ValueError: other names than these four.
    """
    if set(weights) != {"wq", "wk", "wv", "wo"}:
        raise ValueError(f"layouts: a layer holds wq, wk, wv, wo, got {', '.join(sorted(weights))}")
    packed = torch.cat((to_half(weights["wq"], heads), to_half(weights["wk"], kv_heads), weights["wv"]))
    return {"qkv": packed, "output": weights["wo"]}


def _rows(weight: Tensor, heads: int, rotary: Optional[int]) -> Tensor:
    """For each row of the half layout, its row in the interleaved one."""
    size, left = divmod(weight.size(0), heads)
    turning = size if rotary is None else rotary
    if left or turning % 2 or not 0 < turning <= size:
        raise ValueError(f"layouts: rows are heads times D and rotary is even and at most D, got {weight.size(0)} rows, {heads} heads, rotary={rotary}")
    within = torch.cat((torch.arange(0, turning, 2), torch.arange(1, turning, 2), torch.arange(turning, size)))
    return (torch.arange(heads)[:, None] * size + within).flatten()
