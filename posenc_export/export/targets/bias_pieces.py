"""Biases that two layers compute from one number, as pieces of a linear function, which
CachedAttention adds (packages/kernels).
"""

from typing import List, Optional

import numpy as np
import onnx_ir as ir

from posenc_export.export.targets import distance_tables
from posenc_export.export.targets.builder import DOUBLE, FLOAT, Builder, size
from posenc_export.ops.graph import LayersOfRatio, Mask

INPUTS = 3  # of the operator, for such a bias


def pieces_of(op: Builder, mask: Mask) -> Optional[List[Optional[ir.Value]]]:
    """Return the inputs number_of_distance [range], query_factors [B,S] and pieces [H,pieces,3] for
    the bias of a mask, or None if it is no function of a number of the distance over one of the
    query.
    """
    node = LayersOfRatio.of(mask.bias)
    if node is None:
        return None
    weights = (node.first, node.first_bias, node.second, node.second_bias)
    numbers = distance_tables.at_distances(op, mask, node.numbers)
    if numbers is None or not all(weight.const_value for weight in weights):
        return None
    return [numbers, op.Reciprocal(node.divisors), _pieces(op, *weights)]


def _pieces(
    op: Builder, first: ir.Value, first_bias: ir.Value, second: ir.Value, second_bias: ir.Value
) -> ir.Value:
    """Emit nodes of constants, which ONNX Runtime computes in float64 when it loads the graph.

    A unit of the first layer is 0 on one side of the number -bias / weight: pieces begin at these
    numbers in order, and the first one at -inf. Units with weight 0 are the same everywhere, and
    their points, with 1 in place of the weight, change nothing.
    """
    count, zero = size(first, 0), op.constant(0, "float64")
    parts = (op.Reshape(first, [-1]), first_bias, op.Transpose(second, perm=[1, 0]), second_bias)
    weight, bias, of_units, offset = (op.Cast(part, to=DOUBLE) for part in parts)
    is_flat = op.Equal(weight, zero)
    points = op.Div(op.Neg(bias), op.Add(weight, op.Cast(is_flat, to=DOUBLE)))
    in_order = op.several(2, "TopK", points, op.constant([count]), largest=0)[0]
    starts = op.Concat(op.constant([-np.inf], "float64"), in_order, axis=0)
    by_piece = op.Unsqueeze(starts, [1])
    is_after = op.LessOrEqual(points, by_piece)  # [pieces,n]
    rises = op.And(op.Equal(is_after, op.Greater(weight, zero)), op.Not(is_flat))
    constant = op.And(is_flat, op.Greater(bias, zero))
    active = op.Cast(op.Or(rises, constant), to=DOUBLE)
    slopes = op.MatMul(op.Mul(active, weight), of_units)  # [pieces,H]
    values = op.Add(op.MatMul(op.Mul(active, bias), of_units), offset)
    columns = (op.Expand(by_piece, op.Shape(slopes)), slopes, values)
    turned = (op.Unsqueeze(op.Transpose(column, perm=[1, 0]), [2]) for column in columns)
    return op.Cast(op.Concat(*turned, axis=2), to=FLOAT)
