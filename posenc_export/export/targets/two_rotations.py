"""Lowerings of ops/two_rotations.py to standard operators."""

from typing import Optional

import onnx_ir as ir

from posenc_export.export.targets.rewriter import Rewriter, number, size


def key(rewriter: Rewriter, node: ir.Node) -> ir.Value:
    """Join the entries of both rotations of a key."""
    near, far = node.inputs
    first = _entries(rewriter, far, 0, number(node, "rotary"))
    return rewriter.emit("Concat", [near, first], attributes={"axis": 3})


def query(rewriter: Rewriter, node: ir.Node) -> ir.Value:
    """Set the entries of the rotation that a query does not use to 0."""
    near, far, positions = node.inputs
    rotary, head_size, zero = number(node, "rotary"), size(near, 3), rewriter.constant(0, rewriter.dtype)
    is_far = rewriter.emit("Unsqueeze", [is_far_at(rewriter, node, positions), rewriter.constant([2, 3])])
    parts = [rewriter.emit("Where", [is_far, zero, _entries(rewriter, near, 0, rotary)])]
    if rotary < head_size:
        parts.append(_entries(rewriter, near, rotary, head_size))
    parts.append(rewriter.emit("Where", [is_far, _entries(rewriter, far, 0, rotary), zero]))
    return rewriter.emit("Concat", parts, attributes={"axis": 3})


def is_far_at(rewriter: Rewriter, query: ir.Node, positions: Optional[ir.Value]) -> ir.Value:
    """Return whether queries of a ChooseRotation at positions are far: bool, in the shape of positions."""
    return rewriter.emit("GreaterOrEqual", [positions, rewriter.constant(number(query, "first_far"))])


def _entries(rewriter: Rewriter, heads: Optional[ir.Value], start: int, end: int) -> ir.Value:
    """Entries start .. end - 1 of heads [B,S,N,D]."""
    return rewriter.emit("Slice", [heads, rewriter.constant([start]), rewriter.constant([end]), rewriter.constant([3])])
