"""Semantic operations that rotate heads, and angles of any size reduced to one turn."""

import math

import torch
from torch import Tensor

from posenc_export.ops import graph
from posenc_export.ops.graph import emitting


def rotate_pairs(
    x: Tensor, positions: Tensor, cos: Tensor, sin: Tensor, interleaved: bool, linear: bool = True
) -> Tensor:
    """Rotate the first r entries of x [B,S,N,D] by the rows positions [B,S] int64 (-1 reads row 0)
    of cos and sin [M,r/2] float32. The result has the dtype of x.

    interleaved: rotate the pairs (0, 1), (2, 3), ..., otherwise (0, r/2), (1, r/2 + 1), ... linear:
    angles are proportional to the row, so that scores depend only on differences of positions, and
    S is at most M.
    """
    if not torch.jit.is_scripting() and emitting():
        return graph.Rotate.emit(x, x.shape, x, positions, cos, sin, interleaved, linear)
    c, s = _of_tokens(positions, cos, sin)
    return apply_rotation(x, c, s, interleaved)


def rotate_both(
    q: Tensor,
    k: Tensor,
    positions: Tensor,
    cos: Tensor,
    sin: Tensor,
    interleaved: bool,
    linear: bool = True,
) -> tuple[Tensor, Tensor]:
    """Apply `rotate_pairs` to q [B,S,H,D] and k [B,S,K,D] with the same positions and tables."""
    if not torch.jit.is_scripting() and emitting():
        turned_q = rotate_pairs(q, positions, cos, sin, interleaved, linear)
        return turned_q, rotate_pairs(k, positions, cos, sin, interleaved, linear)
    c, s = _of_tokens(positions, cos, sin)
    turned = apply_rotation(torch.cat((q, k), dim=2), c, s, interleaved)  # [B,S,H+K,D]
    q, k = turned.split([q.size(2), k.size(2)], dim=2)
    return q, k


def apply_rotation(x: Tensor, cos: Tensor, sin: Tensor, interleaved: bool) -> Tensor:
    """Rotate the first r entries of x [B,S,N,D] by cos, sin [B,S,1 or N,r/2] float32."""
    size = 2 * cos.size(3)
    turned = x if size == x.size(3) else x[..., :size]
    turned = turned if x.dtype == cos.dtype else turned.to(cos.dtype)
    if interleaved:
        first, second = turned[..., 0::2], turned[..., 1::2]
        parts = (first * cos - second * sin, second * cos + first * sin)
        turned = torch.stack(parts, dim=-1).flatten(-2)
    else:
        first, second = turned.split(cos.size(3), dim=-1)
        turned = torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)
    turned = turned if x.dtype == cos.dtype else turned.to(x.dtype)
    return turned if size == x.size(3) else torch.cat((turned, x[..., size:]), dim=-1)


def reduced_angle(radians: Tensor) -> Tensor:
    """Reduce float64 angles of any size to one turn, float32."""
    # 1 / (2 pi) is given in two parts, which are float32 numbers: the exporter of torch 2.13 rounds
    # scalars of float64 expressions to float32.
    turns = radians * 0.15915493667125702 + radians * 6.4206384e-09
    return ((turns - turns.floor()) * (2 * math.pi)).to(torch.float32)


def _of_tokens(positions: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    """Look up rows positions [B,S] int64 (-1 reads row 0) of tables [M,r/2]: [B,S,1,r/2] each."""
    rows = positions.clamp(min=0).unsqueeze(2)
    return torch.nn.functional.embedding(rows, cos), torch.nn.functional.embedding(rows, sin)
