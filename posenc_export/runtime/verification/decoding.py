"""Decode codes with scales and zero points, as the documentation of the operators states it."""

from typing import Callable, Mapping, Optional

import numpy as np

from posenc_export.runtime.graphs.onnx_nodes import TYPES, Node


def unpacked(codes: np.ndarray, bits: int) -> np.ndarray:
    """Return unsigned codes int16 of bytes [...,n]; the lower half of a byte is the first code."""
    if bits == 8:
        return codes.astype(np.int16)
    if bits != 4:
        raise ValueError(f"graph: expected codes of 4 or 8 bits, got {bits}; export again")
    return np.stack([codes & 15, codes >> 4], axis=-1).reshape(*codes.shape[:-1], -1).astype("i2")


def of_blocks(
    codes: np.ndarray,
    scales: np.ndarray,
    zeros: Optional[np.ndarray],
    bits: int,
    inputs: int,
    dtype: str = "float32",
) -> np.ndarray:
    """Return (code - zero point) * scale of blocks along the last axis, computed in a dtype.

    Args:
        codes, scales: bytes of the codes [...,bytes], of which each block fills whole ones;
            [...,blocks].
        zeros: bytes of zero points in rows that fill whole bytes, or zero points in the dtype of
            scales; None for half the number of codes.
        inputs: number of codes of a row that are weights; the others are padding.
    """
    lead, blocks = scales.shape[:-1], scales.shape[-1]
    points: np.ndarray = np.full((*lead, blocks), 1 << (bits - 1), np.int16)
    if zeros is not None and zeros.dtype == np.uint8:
        points = unpacked(zeros.reshape(*lead, -1), bits)[..., :blocks]
    elif zeros is not None:
        points = zeros.reshape(*lead, blocks)
    unsigned = unpacked(codes.reshape(*lead, -1), bits).reshape(*lead, blocks, -1)
    weights = (unsigned - points[..., None]).astype(dtype)
    weights *= scales[..., None].astype(dtype)
    return weights.reshape(*lead, -1)[..., :inputs]


def dequantized(
    codes: np.ndarray,
    scales: np.ndarray,
    zeros: Optional[np.ndarray],
    axis: int,
    block: int,
    dtype: str = "float32",
) -> np.ndarray:
    """Return the output of DequantizeLinear (opset 21): scales of all, of an axis or of blocks."""

    def spread(part: np.ndarray) -> np.ndarray:
        if block:
            repeated = np.repeat(part, block, axis)
            return repeated[(slice(None),) * axis + (slice(codes.shape[axis]),)]
        if part.ndim == 0 or part.shape == (1,):
            return part.reshape(())
        return part.reshape([-1 if dim == axis else 1 for dim in range(codes.ndim)])

    axis %= codes.ndim
    centred = codes.astype(np.int16)
    if zeros is not None:
        centred = centred - spread(zeros).astype(np.int16)
    return centred.astype(dtype) * spread(scales).astype(dtype)


def _cast(numbers: np.ndarray, node: Node) -> np.ndarray:
    element = TYPES[node.attributes["to"]]
    return numbers.astype({"float": "float32", "double": "float64"}.get(element, element))


# Nodes of constants that are computed here, as scales and offsets of blocks are.
FOLDED: Mapping[str, Callable[..., np.ndarray]] = {
    "Cast": lambda node, x: _cast(x, node),
    "Transpose": lambda node, x: x.transpose(node.attributes.get("perm")),
    "Unsqueeze": lambda node, x, axes: np.expand_dims(x, tuple(axes.tolist())),
    "Add": lambda node, x, y: x + y,
    "Mul": lambda node, x, y: x * y,
}
