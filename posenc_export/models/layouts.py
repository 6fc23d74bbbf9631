"""Layouts of rotary pairs, interleaved (RoFormer, Meta) and half (transformers), by rows."""

from typing import Optional

import torch
from torch import Tensor

from posenc_export.shared.refusal import refusal


def to_half(weight: Tensor, heads: int, rotary: Optional[int] = None) -> Tensor:
    """Reorder the rows of a q or k projection [heads*D,E], or of its bias [heads*D], from layout
    interleaved to layout half. Scores do not change.

    Args:
        weight: the weight or bias.
        heads: number of query heads for a q projection, of kv heads for a k projection.
        rotary: number of rotated entries r of a head; None for the head size D.

    Raises:
        ValueError: rows not divisible by heads, a rotary size that is odd or above D.
    """
    return weight.index_select(0, _rows(weight, heads, rotary))


def to_interleaved(weight: Tensor, heads: int, rotary: Optional[int] = None) -> Tensor:
    """Reorder rows from layout half to interleaved: the inverse of `to_half`."""
    return weight.index_select(0, torch.argsort(_rows(weight, heads, rotary)))


def _rows(weight: Tensor, heads: int, rotary: Optional[int]) -> Tensor:
    """Return, for each row of layout half, the index of its row in layout interleaved."""
    size, remainder = divmod(weight.size(0), heads)
    rotated = size if rotary is None else rotary
    if remainder or rotated % 2 or not 0 < rotated <= size:
        rule = "heads * D rows and an even rotary size of at most D"
        got = f"{weight.size(0)} rows, {heads} heads, rotary={rotary}"
        raise refusal("layouts", rule, got, "correct heads or rotary")
    even, odd = torch.arange(0, rotated, 2), torch.arange(1, rotated, 2)
    within = torch.cat((even, odd, torch.arange(rotated, size)))
    return (torch.arange(heads)[:, None] * size + within).flatten()
