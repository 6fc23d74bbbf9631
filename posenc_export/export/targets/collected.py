"""Lowerings of ops.collect_by_distance: one adds up the shares of all keys, the other reads only the shares of keys within the clipping distance, by slot."""

import numpy as np
import onnx_ir as ir

from posenc_export.export.targets import standard
from posenc_export.export.targets.rewriter import Rewriter, number


def collect_by_distance(rewriter: Rewriter, node: ir.Node) -> ir.Value:
    """Add the share of each key to the sum at its clipped distance: [B,H,S,left+right+1]."""
    shares, positions, key_positions = node.inputs
    left, right = number(node, "left"), number(node, "right")
    queries = rewriter.emit("Unsqueeze", [positions, rewriter.constant([1, 3])])
    distances = rewriter.emit("Sub", [rewriter.emit("Unsqueeze", [key_positions, rewriter.constant([1, 2])]), queries])
    index = rewriter.emit("Add", [rewriter.emit("Clip", [distances, rewriter.constant(-left), rewriter.constant(right)]), rewriter.constant(left)])
    leading = rewriter.emit("Slice", [rewriter.emit("Shape", [shares]), rewriter.constant([0]), rewriter.constant([3])])
    shape = rewriter.emit("Concat", [leading, rewriter.constant([left + right + 1])], attributes={"axis": 0})
    zeros = rewriter.emit("Expand", [rewriter.constant(0, "float32"), shape])
    for_heads = standard.for_every_head(rewriter, index, shares)
    return rewriter.emit("ScatterElements", [zeros, for_heads, shares], attributes={"axis": -1, "reduction": "add"})


def collect_from_slots(rewriter: Rewriter, node: ir.Node, slots: ir.Value) -> ir.Value:
    """Read the shares at distances -left + 1 .. 0. Earlier keys share distance -left, whose sum is 1 minus these shares; later keys are not seen and have share 0.

    Args:
        slots: slot of each query [B,S]. A key at distance d is d slots further. `left` is at least 1.
    """
    shares, left, zero = node.inputs[0], number(node, "left"), rewriter.constant(0, "float32")
    near = rewriter.emit("Add", [rewriter.emit("Unsqueeze", [slots, rewriter.constant([1, 3])]), rewriter.constant(np.arange(1 - left, 1))])
    index = standard.for_every_head(rewriter, rewriter.emit("Max", [near, rewriter.constant(0)]), shares)
    found = rewriter.emit("GatherElements", [shares, index], attributes={"axis": -1})
    of_near = rewriter.emit("Where", [rewriter.emit("GreaterOrEqual", [near, rewriter.constant(0)]), found, zero])
    rest = rewriter.emit("Sub", [rewriter.constant(1, "float32"), rewriter.emit("ReduceSum", [of_near, rewriter.constant([-1])])])
    behind = rewriter.emit("Concat", [rest, of_near], attributes={"axis": -1})
    return rewriter.emit("Pad", [behind, rewriter.constant([0, number(node, "right")]), zero, rewriter.constant([3])])
