"""Lowerings of ops.collect_by_distance: one adds up the weights of all keys, the other reads only those of keys within the clipping distance, by slot."""

import numpy as np
import onnx_ir as ir

from posenc_export.export.targets import standard
from posenc_export.export.targets.rewriter import Builder
from posenc_export.ops.graph import CollectByDistance


def collect_by_distance(op: Builder, node: CollectByDistance) -> ir.Value:
    """Add the weight of each key to the sum at its clipped distance: [B,H,S,left+right+1]."""
    weights, left, right = node.weights, node.left, node.right
    queries = op.Unsqueeze(node.positions, [1, 3])
    distances = op.Sub(op.Unsqueeze(node.key_positions, [1, 2]), queries)
    index = op.Add(op.Clip(distances, -left, right), left)
    leading = op.Slice(op.Shape(weights), [0], [3])
    shape = op.Concat(leading, [left + right + 1], axis=0)
    zeros = op.Expand(op.constant(0, "float32"), shape)
    for_heads = standard.for_every_head(op, index, weights)
    return op.ScatterElements(zeros, for_heads, weights, axis=-1, reduction="add")


def collect_from_slots(op: Builder, node: CollectByDistance, slots: ir.Value) -> ir.Value:
    """Read the weights at distances -left + 1 .. 0. Earlier keys share distance -left, whose sum is 1 minus these weights; later keys are not seen and have weight 0.

    Args:
        slots: slot of each query [B,S]. A key at distance d is d slots further. `left` is at least 1.
    """
    weights, left, zero = node.weights, node.left, op.constant(0, "float32")
    near = op.Add(op.Unsqueeze(slots, [1, 3]), np.arange(1 - left, 1))
    index = standard.for_every_head(op, op.Max(near, 0), weights)
    near_weights = op.GatherElements(weights, index, axis=-1)
    of_near = op.Where(op.GreaterOrEqual(near, 0), near_weights, zero)
    rest = op.Sub(op.constant(1, "float32"), op.ReduceSum(of_near, [-1]))
    behind = op.Concat(rest, of_near, axis=-1)
    return op.Pad(behind, [0, node.right], zero, [3])
