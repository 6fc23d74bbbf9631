"""Offsets of blocks of quantized weights, code * scale + offset, for operators whose weights are (code - zero point) * scale with whole zero points.

MatMulNBits also accepts zero points in float32, but then dequantizes the whole weight at each call: 120 to 160 times the time of a decode step, 1.3 to 2 times that
of 128 tokens (ONNX Runtime 1.31, CPU, K and N of 576 to 2048). A product with the sums of the blocks of x takes 1.2 times the time of a step without offsets.
"""

from typing import Optional

import numpy as np
import onnx_ir as ir

from posenc_export.export.quantization.formats import Codes
from posenc_export.export.targets.rewriter import Builder


def add_to_product(op: Builder, product: ir.Value, x: Optional[ir.Value], name: str, codes: Codes) -> ir.Value:
    """Add the offsets' part of x W: the sum of each block of x [B,S,K] times its offset. Products with the same x share the sums."""
    offsets = codes.offsets
    if offsets is None:
        return product
    sums = op.ReduceSum(op.Reshape(x, [0, 0, *codes.codes.shape[1:]]), [3], keepdims=0)
    return op.Add(product, op.MatMul(sums, op.weight(f"{name}.offsets", lambda: np.ascontiguousarray(offsets.T))))


def add_to_rows(op: Builder, blocks: ir.Value, ids: Optional[ir.Value], name: str, codes: Codes) -> ir.Value:
    """Add the offsets to rows of a table in blocks [B,S,blocks,block]."""
    offsets = codes.offsets
    if offsets is None:
        return blocks
    return op.Add(blocks, op.Gather(op.weight(f"{name}.offsets_of_blocks", lambda: offsets[..., None]), ids))
