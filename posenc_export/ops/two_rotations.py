"""Semantic operations for heads that are rotated in two ways, near for queries below a position and
far for the others.

A key has the entries of both rotations, and a query has zeros for the entries of the rotation that
it does not use. Their product is the score.
"""

import torch
from torch import Tensor

from posenc_export.ops import graph
from posenc_export.ops.graph import emitting


def key(near: Tensor, far: Tensor, rotary: int) -> Tensor:
    """Join keys [B,S,K,D] that differ in the first r = `rotary` entries: [B,S,K,D+r]."""
    if not torch.jit.is_scripting() and emitting():
        shape = [*near.shape[:3], near.size(3) + rotary]
        return graph.JoinRotations.emit(near, shape, near, far, rotary)
    return torch.cat((near, far[..., :rotary]), dim=-1)


def query(near: Tensor, far: Tensor, positions: Tensor, rotary: int, first_far: int) -> Tensor:
    """Choose between queries [B,S,H,D] rotated in two ways for keys from `key`: far for
    positions [B,S] int64 from first_far on, otherwise near: [B,S,H,D+r].
    """
    if not torch.jit.is_scripting() and emitting():
        shape = [*near.shape[:3], near.size(3) + rotary]
        return graph.ChooseRotation.emit(near, shape, near, far, positions, rotary, first_far)
    is_far = positions.ge(first_far)[:, :, None, None]
    of_near = near[..., :rotary].masked_fill(is_far, 0.0)
    of_far = far[..., :rotary].masked_fill(~is_far, 0.0)
    return torch.cat((of_near, near[..., rotary:], of_far), dim=-1)
