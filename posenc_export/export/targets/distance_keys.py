"""Products of queries with sinusoids of distances, as products with a key for each distance, which
CachedAttention computes (packages/kernels).
"""

from typing import List, Optional, Tuple

import onnx_ir as ir

from posenc_export.export.targets import distance_tables, ort_slots
from posenc_export.export.targets.builder import Builder, numbers_of, size
from posenc_export.ops.graph import Attend, Mask, WaveProducts


def keys_of(op: Builder, node: Attend, mask: Mask, wide: int) -> Optional[List[Optional[ir.Value]]]:
    """Return the inputs distance_queries [B,H,S,wide] and distance_keys [H,range,wide] for the
    content of a node; None if that is not a number times the products of projected queries with
    sinusoids of the distances of the mask. wide: head size of cached keys.

    The projection is a constant W_h [D,E] of each head. A query times W_h times the sinusoids R_d
    is the query times the key W_h R_d: D multiplications in place of E.
    """
    factor, waves = _factor(node.content)
    product = None if waves is None else waves.q.producer()
    if waves is None or product is None or product.op_type != "MatMul":
        return None
    q, weight = product.inputs
    own = (waves.q_positions, waves.k_positions) == (mask.positions, mask.key_positions)
    if not own or q is None or weight is None or weight.const_value is None:
        return None
    count = min(size(waves.waves, 0), mask.before + 1 or op.max_positions)
    fits = node.heads * count * wide <= distance_tables.MOST
    if not fits or not ort_slots.in_slots(op, waves.k_positions):
        return None
    rows = op.Slice(waves.waves, [count - 1], [-1 - size(waves.waves, 0)], [0], [-1])
    cos, sin = op.several(2, "Split", rows, axis=-1, num_outputs=2)
    of_head = op.Transpose(weight, perm=[0, 2, 1])
    scaled = op.Mul(of_head, op.constant(factor, "float32"))
    keys = op.MatMul(op.Concat(sin, cos, axis=-1), scaled)
    missing, zero = wide - size(weight, 1), op.constant(0, "float32")
    if missing:
        q, keys = (op.Pad(value, [0, missing], zero, [-1]) for value in (q, keys))
    return [q, keys]


def _factor(content: Optional[ir.Value]) -> Tuple[float, Optional[WaveProducts]]:
    """Return the WaveProducts that a content is, times a constant number."""
    product = None if content is None else content.producer()
    if product is None or product.domain or product.op_type != "Mul":
        return 1.0, WaveProducts.of(content)
    for value, number in (product.inputs, product.inputs[::-1]):
        if number is not None and number.const_value is not None and number.const_value.size == 1:
            return float(numbers_of(number).reshape(())), WaveProducts.of(value)
    return 1.0, None
