"""Nodes of ai.onnx for rounded weights."""

from typing import Mapping, Optional

import numpy as np
import onnx_ir as ir

from posenc_export.export.quantization.grid import Codes, Grid
from posenc_export.export.targets.builder import Builder
from posenc_export.export.targets.quantized_weights import Weights, dequantized, flat, product
from posenc_export.export.targets.rewriter import NodeLowering


class Standard:
    """Lower to ai.onnx operators: DequantizeLinear before MatMul, which ONNX Runtime fuses to
    MatMulNBits, and Gather of codes before DequantizeLinear.

    A tied head has its own copy of the codes. If it shared the table's codes, ONNX Runtime would
    dequantize the whole table at each step. Whether products round activations is an option of the
    session (runtime/graphs/ort_options.py).
    """

    def __init__(self, activations: str) -> None:
        self.weights = Weights()

    def table(self) -> Mapping[str, NodeLowering]:
        """Lowerings by operator."""
        return {"MatMul": self.product, "Gather": self.rows}

    def product(self, op: Builder, node: ir.Node) -> Optional[ir.Value]:
        """x W for x [B,S,K], or for the weights of all experts."""
        return product(op, node, self.weights, dequantized)

    def rows(self, op: Builder, node: ir.Node) -> Optional[ir.Value]:
        """Rows of a table for ids [B,S]. 4-bit codes are stored as int8, which Gather supports."""
        for name, (grid, codes) in self.weights.of_table(op, node).items():
            return self._rows(op, node, name, grid, codes)
        return None

    def _rows(self, op: Builder, node: ir.Node, name: str, grid: Grid, codes: Codes) -> ir.Value:
        table = op.weight(f"{name}.codes_to_gather", lambda: np.ascontiguousarray(flat(codes)))
        scales = op.weight(f"{name}.scales_to_gather", lambda: codes.scales)
        zeros = codes.zeros(grid.bits)
        parts = [table, scales]
        if zeros is not None:
            parts.append(op.weight(f"{name}.zeros_to_gather", lambda: zeros))
        gathered = [op.Gather(part, node.inputs[1]) for part in parts]
        return op.DequantizeLinear(*gathered, axis=2, block_size=grid.block)
