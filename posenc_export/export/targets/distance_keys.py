"""Products of queries with sinusoids of distances, as products with keys of distances, which
CachedAttention computes (packages/kernels).
"""

from typing import List, Optional, Sequence

import onnx_ir as ir

from posenc_export.export.targets import distance_tables, ort_slots
from posenc_export.export.targets.builder import Builder, size
from posenc_export.ops.graph import Attend, Mask, WaveProducts

INPUTS = 2  # of the operator, for such products
# Distances before 0 and after the largest one that have keys, for those between two keys: twice
# NEIGHBOURS of packages/kernels/source/call.h.
BEYOND = 32


def keys_of(op: Builder, node: Attend, mask: Mask, wide: int) -> Optional[List[Optional[ir.Value]]]:
    """Return the inputs distance_queries [B,H,S,wide] and distance_keys [H,n,wide] for the
    content of a node; None if that is not the products of projected queries with sinusoids of the
    distances of the mask. wide: head size of cached keys.

    The projection is a constant W_h [D,E] of each head. A query times W_h times the sinusoids R_d
    is the query times the key W_h R_d: D multiplications in place of E. Keys of every second
    distance are enough, because sinusoids with at most 1 radian per position can be interpolated.
    """
    waves = WaveProducts.of(node.content)
    product = None if waves is None else waves.q.producer()
    if waves is None or product is None or product.op_type != "MatMul":
        return None
    q, weight = product.inputs
    own = (waves.q_positions, waves.k_positions) == (mask.positions, mask.key_positions)
    if not own or q is None or weight is None or weight.const_value is None:
        return None
    count = min(size(waves.waves, 0), mask.before + 1 or op.max_positions)
    fits = node.heads * count * wide <= distance_tables.MOST and count > BEYOND
    if not fits or not ort_slots.in_slots(op, waves.k_positions):
        return None
    of_head = op.Transpose(weight, perm=[0, 2, 1])
    keys = op.MatMul(_sinusoids(op, waves.waves, count), of_head)
    missing, zero = wide - size(weight, 1), op.constant(0, "float32")
    if missing:
        q, keys = (op.Pad(value, [0, missing], zero, [-1]) for value in (q, keys))
    return [q, keys]


def _sinusoids(op: Builder, waves: ir.Value, count: int) -> ir.Value:
    """Return sines and cosines [n,E] of every second distance, from at least count - 1 + BEYOND to
    -BEYOND, as nodes of constants, which ONNX Runtime computes when it loads the graph.
    """

    def rows(first: int, end: int) -> Sequence[ir.Value]:
        return op.several(2, "Split", op.Slice(waves, [first], [end], [0]), axis=-1, num_outputs=2)

    cos, sin = rows(1, BEYOND + 1)
    (of_last, own), (of_cos, of_sin) = rows(count - 1, count), rows(0, count)
    after_cos = op.Sub(op.Mul(of_last, cos), op.Mul(own, sin))
    after_sin = op.Add(op.Mul(own, cos), op.Mul(of_last, sin))
    before_cos, before_sin = (
        op.Slice(part, [BEYOND - 1], [-BEYOND - 1], [0], [-1]) for part in (cos, op.Neg(sin))
    )
    sines = op.Concat(before_sin, of_sin, after_sin, axis=0)
    cosines = op.Concat(before_cos, of_cos, after_cos, axis=0)
    whole = op.Concat(sines, cosines, axis=1)  # distances -BEYOND .. count - 1 + BEYOND
    last = count - 1 + 2 * BEYOND
    return op.Slice(whole, [last - last % 2], [-last - 2], [0], [-2])
