"""Nodes for rounded weights in half precision that ONNX Runtime's CUDA kernels read as the CPU's
do, of target `ort-cuda`.

Read in the sources of the CUDA provider, from before and after the repair of onnxruntime 31692:

- GatherBlockQuantized takes the zero point of a block from packed numbers at the index of the
  block in the whole table, and before the repair 0 if there are none. Rows that are no multiple of
  the block shift all later blocks (32663).
- DequantizeLinear has blocks for int4 and uint4 only.
- MatMulNBits takes scales in the dtype of activations, and zero points in uint8. With
  ep.cuda.fpa_intb_gemm it needs blocks of 32, 64 or 128, K a multiple of the block, and N a
  multiple of 64, of 32 for 8 bits.
"""

from dataclasses import replace
from typing import Optional

import numpy as np
import onnx_ir as ir

from posenc_export.export.quantization.grid import Codes, Grid, OnGrid, packed_codes
from posenc_export.export.targets import offsets
from posenc_export.export.targets.builder import MICROSOFT, Builder
from posenc_export.export.targets.fused_weights import Fused

BLOCKS = (128, 64, 32)  # of MatMulNBits, for weights with one scale per output


class InHalf(Fused):
    """Lower to MatMulNBits and GatherBlockQuantized with activations in half precision."""

    def _product(
        self, op: Builder, node: ir.Node, x: Optional[ir.Value], name: str, on_grid: OnGrid
    ) -> ir.Value:
        product = super()._product(op, node, x, name, _in_blocks(*on_grid))
        # Read by the fusion of a sum and the norm after it.
        product.shape, product.type = node.outputs[0].shape, node.outputs[0].type
        return product

    def _rows(self, op: Builder, node: ir.Node, name: str, grid: Grid, codes: Codes) -> ir.Value:
        """Rows of a table [N,K]: each row has whole blocks, and whole bytes of zero points, so that
        the index of a block in the table is that of its zero point.
        """
        assert grid.block is not None
        blocks, missing = codes.scales.shape[1], codes.scales.shape[1] * grid.bits % 8 // 4
        end = (0, missing)
        zeros = codes.zeros(grid.bits)
        points = np.zeros(codes.scales.shape, np.int8) if zeros is None else zeros
        flat = np.pad(codes.codes, ((0, 0), end, (0, 0))).reshape(len(points), -1)
        table = op.weight(f"{name}.codes_to_gather", lambda: packed_codes(flat, grid))
        of_scales = f"{name}.scales_to_gather" if missing else f"{name}.scales"
        scales = offsets.scales(op, of_scales, np.pad(codes.scales, ((0, 0), end)))
        padded = np.pad(points, ((0, 0), end))
        of_blocks = op.weight(f"{name}.zeros_to_gather", lambda: packed_codes(padded, grid))
        rows = op.GatherBlockQuantized(
            table, node.inputs[1], scales, of_blocks, domain=MICROSOFT,
            bits=grid.bits, block_size=grid.block, gather_axis=0, quantize_axis=1,
        )  # fmt: skip
        if missing or blocks * grid.block > codes.inputs:
            rows = op.Slice(rows, [0], [codes.inputs], [2])
        if zeros is not None or codes.offsets is None:
            return rows
        in_blocks = op.Reshape(rows, [0, 0, blocks, grid.block])
        with_offsets = offsets.add_to_rows(op, in_blocks, node.inputs[1], name, codes)
        return op.Reshape(with_offsets, [0, 0, -1])


def _in_blocks(grid: Grid, codes: Codes) -> OnGrid:
    """Return weights with one scale per output in blocks that repeat it."""
    if grid.block is not None:
        return grid, codes
    block = next((block for block in BLOCKS if codes.inputs % block == 0), BLOCKS[-1])
    count = -(-codes.inputs // block)
    flat = codes.codes.reshape(len(codes.codes), -1)[:, : codes.inputs]
    padded = np.pad(flat, ((0, 0), (0, count * block - codes.inputs)))
    scales = np.repeat(codes.scales, count, axis=1)
    blocks = padded.reshape(len(flat), count, block)
    return replace(grid, block=block), Codes(blocks, scales, codes.inputs)
