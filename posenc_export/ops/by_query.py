"""Semantic operation of attention whose keys are turned further for each query."""

import torch
from torch import Tensor

from posenc_export import ops
from posenc_export.ops import graph
from posenc_export.ops.graph import emitting


def attend_turned_keys(
    q: Tensor,
    keys: Tensor,
    values: Tensor,
    mask: Tensor,
    positions: Tensor,
    key_positions: Tensor,
    first: Tensor,
    second: Tensor,
    interleaved: bool,
    first_turned: int,
    scale: float,
) -> Tensor:
    """Rotate the key at position t by (t - p) (w(p) - w(0)) for a query at position p, and attend:
    [B,S,H*D] in the dtype of values.

    w(p) is row p of the frequencies. Rows below first_turned are equal, so that nothing is rotated
    for queries there.

    Shapes: q [B,S,H,D], keys and values [B,K,T,D], mask [B,1 or H,S,T], positions [B,S] and
    key_positions [B,T] int64. first, second: frequencies [M,r/2] float32, as the sum of two parts.
    interleaved: see ops.rotate_pairs.
    """
    if not torch.jit.is_scripting():
        if emitting():
            return graph.AttendTurnedKeys.emit(
                values,
                [q.size(0), q.size(1), q.size(2) * values.size(3)],
                *(q, keys, values, mask, None, None),  # no content, no sinks
                *(positions, key_positions, first, second),
                *(q.size(2), keys.size(1), scale, 0.0),  # no softcap
                *(interleaved, first_turned),
            )
    else:  # a branch that depends on positions, which torch.export does not trace
        if int(positions.max()) < first_turned:
            return ops.attend(q, keys, values, mask, None, scale)
    angles = ops.reduced_angle(_angles(positions, key_positions, first, second))
    scores = _products(q, keys, angles, interleaved)
    return ops.weighted_values(ops.attention_weights(scale * scores, mask), values)


def _angles(positions: Tensor, key_positions: Tensor, first: Tensor, second: Tensor) -> Tensor:
    """Return the angles [B,1,S,T,r/2] float64 of keys for each query."""
    rows = positions.clamp(min=0)
    own, kept = torch.nn.functional.embedding(rows, first)[:, None, :, None], first[0]
    leading = own.to(torch.float64) - kept.to(torch.float64)
    rest = torch.nn.functional.embedding(rows, second)[:, None, :, None].to(torch.float64)
    drift = leading + (rest - second[0].to(torch.float64))  # [B,1,S,1,r/2]
    return ops.distances(positions, key_positions).to(torch.float64).unsqueeze(4) * drift


def _products(q: Tensor, keys: Tensor, angles: Tensor, interleaved: bool) -> Tensor:
    """Rotate the first r entries of keys [B,K,T,D] by angles [B,1,S,T,r/2] float32, which depend
    on the query, and multiply with q [B,S,H,D]: [B,H,S,T] float32.
    """
    size = 2 * angles.size(4)
    by_query = q.to(torch.float32).transpose(1, 2).unsqueeze(3)  # [B,H,S,1,D]
    by_key = keys.to(torch.float32).repeat_interleave(q.size(2) // keys.size(1), dim=1).unsqueeze(2)
    if interleaved:
        a, b = by_query[..., 0:size:2], by_query[..., 1:size:2]
        c, d = by_key[..., 0:size:2], by_key[..., 1:size:2]
    else:
        (a, b), (c, d) = by_query[..., :size].chunk(2, dim=-1), by_key[..., :size].chunk(2, dim=-1)
    scores = ((a * c + b * d) * angles.cos() + (b * c - a * d) * angles.sin()).sum(-1)
    return scores + ops.products(q[..., size:], keys[..., size:]) if size < q.size(3) else scores
