"""Scales and offsets of blocks of quantized weights, code * scale + offset, for operators whose
weights are (code - zero point) * scale with whole zero points.

MatMulNBits also accepts zero points in float32, but then dequantizes the whole weight at each call:
120 to 160 times the time of a decode step, 1.3 to 2 times that of 128 tokens (ONNX Runtime 1.31,
CPU, K and N of 576 to 2048). A product with the sums of the blocks of x takes 1.2 times the time of
a step without offsets.

Numbers that are float16 in a GGUF file are stored so. ONNX Runtime converts them once, when it
loads the graph, because it computes nodes without inputs then.
"""

from typing import Optional

import numpy as np
import onnx_ir as ir

from posenc_export.export.quantization.grid import Codes
from posenc_export.export.targets.builder import Builder

ZERO = 8  # code that a 4-bit code has 0 at; the minimum of a block is its offset less ZERO scales


def scales(op: Builder, name: str, numbers: np.ndarray) -> ir.Value:
    """Return scales in float32, as float16 in the file if these are equal, or in half precision."""
    if op.dtype != "float32":
        return op.weight(name, lambda: numbers, op.onnx_dtype)
    half = _half(numbers)
    if half is None:
        return op.weight(name, lambda: numbers)
    return op.Cast(op.weight(name, lambda: half), to=ir.DataType.FLOAT)


def add_to_product(
    op: Builder, product: ir.Value, x: Optional[ir.Value], name: str, codes: Codes
) -> ir.Value:
    """Add offsets times the block sums of x [B,S,K]; products of one x share the sums."""
    if codes.offsets is None:
        return product
    sums = op.ReduceSum(op.Reshape(x, [0, 0, *codes.codes.shape[1:]]), [3], keepdims=0)
    return op.Add(product, op.MatMul(sums, op.Transpose(_offsets(op, name, codes), perm=[1, 0])))


def add_to_rows(
    op: Builder, blocks: ir.Value, ids: Optional[ir.Value], name: str, codes: Codes
) -> ir.Value:
    """Add the offsets to rows of a table in blocks [B,S,blocks,block]."""
    if codes.offsets is None:
        return blocks
    return op.Add(blocks, op.Unsqueeze(op.Gather(_offsets(op, name, codes), ids), [3]))


def _offsets(op: Builder, name: str, codes: Codes) -> ir.Value:
    """Return the offsets [N,blocks], as minima in float16 plus ZERO scales if these are equal."""
    offsets = codes.offsets
    assert offsets is not None
    if op.dtype != "float32":
        return op.weight(f"{name}.offsets", lambda: offsets, op.onnx_dtype)
    shift = np.float32(ZERO) * codes.scales
    minima = (offsets - shift).astype(np.float16)
    if _half(codes.scales) is None or not np.array_equal(
        minima.astype(np.float32) + shift, offsets
    ):
        return op.weight(f"{name}.offsets", lambda: offsets)
    stored = op.Cast(op.weight(f"{name}.minima", lambda: minima), to=ir.DataType.FLOAT)
    of_blocks = scales(op, f"{name}.scales", codes.scales)
    return op.Add(stored, op.Mul(of_blocks, op.constant(ZERO, "float32")))


def _half(numbers: np.ndarray) -> Optional[np.ndarray]:
    """Return numbers as float16, or None if that changes one."""
    with np.errstate(over="ignore"):
        half = numbers.astype(np.float16)
    return half if np.array_equal(half.astype(np.float32), numbers) else None
