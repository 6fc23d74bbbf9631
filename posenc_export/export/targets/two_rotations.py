"""Lowerings of ops/two_rotations.py to standard operators."""

import onnx_ir as ir

from posenc_export.export.targets.builder import Builder, size
from posenc_export.ops.graph import ChooseRotation, JoinRotations


def key(op: Builder, node: JoinRotations) -> ir.Value:
    """Join the entries of both rotations of a key."""
    return op.Concat(node.near, _entries(op, node.far, 0, node.rotary), axis=3)


def query(op: Builder, node: ChooseRotation) -> ir.Value:
    """Set the entries of the rotation that a query does not use to 0."""
    rotary, head_size, zero = node.rotary, size(node.near, 3), op.constant(0, op.dtype)
    is_far = op.Unsqueeze(is_far_at(op, node, node.positions), [2, 3])
    parts = [op.Where(is_far, zero, _entries(op, node.near, 0, rotary))]
    if rotary < head_size:
        parts.append(_entries(op, node.near, rotary, head_size))
    parts.append(op.Where(is_far, _entries(op, node.far, 0, rotary), zero))
    return op.Concat(*parts, axis=3)


def is_far_at(op: Builder, node: ChooseRotation, positions: ir.Value) -> ir.Value:
    """Return whether queries at positions are far: bool, in the shape of positions."""
    return op.GreaterOrEqual(positions, node.first_far)


def _entries(op: Builder, heads: ir.Value, start: int, end: int) -> ir.Value:
    """Entries start .. end - 1 of heads [B,S,N,D]."""
    return op.Slice(heads, [start], [end], [3])
