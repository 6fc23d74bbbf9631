"""Nodes of ai.onnx for rounded weights, which nodes OnGrid name."""

from typing import Any, Dict, Mapping, Optional, Set

import numpy as np
import onnx_ir as ir

from posenc_export.export.quantization.grid import Codes, Grid, OnGrid
from posenc_export.export.targets import experts
from posenc_export.export.targets.builder import Builder, transposed
from posenc_export.export.targets.rewriter import NodeLowering


def dequantized(op: Builder, x: Optional[ir.Value], name: str, on_grid: OnGrid) -> ir.Value:
    """x W with DequantizeLinear before MatMul."""
    grid, codes = on_grid
    dtype = ir.DataType.INT4 if grid.bits == 4 else None
    turned = codes.scales[:, 0] if grid.block is None else codes.scales.T
    stored = op.weight(f"{name}.codes", lambda: np.ascontiguousarray(flat(codes).T), dtype)
    scales = op.weight(f"{name}.scales", lambda: np.ascontiguousarray(turned))
    zeros = codes.zeros(grid.bits)
    inputs = [stored, scales]
    if zeros is not None:
        inputs.append(op.weight(f"{name}.zeros", lambda: np.ascontiguousarray(zeros.T), dtype))
    how: Dict[str, Any] = {"axis": 1}
    if grid.block is not None:
        how = {"axis": 0, "block_size": grid.block}
    return op.MatMul(x, op.DequantizeLinear(*inputs, **how))


def flat(codes: Codes) -> np.ndarray:
    """Return the codes without padding [N,K] int8."""
    return codes.codes.reshape(len(codes.codes), -1)[:, : codes.inputs]


class Standard:
    """Lower to ai.onnx operators: DequantizeLinear before MatMul, which ONNX Runtime fuses to
    MatMulNBits, and Gather of codes before DequantizeLinear.

    A tied head has its own copy of the codes. If it shared the table's codes, ONNX Runtime would
    dequantize the whole table at each step. Whether products round activations is an option of the
    session (runtime/graphs/ort_options.py).

    Attributes:
        stored: names of the rounded weights that were found.
    """

    def __init__(self, activations: str) -> None:
        self.stored: Set[str] = set()

    def table(self) -> Mapping[str, NodeLowering]:
        """Lowerings by operator."""
        return {"MatMul": self.product, "Gather": self.rows}

    def product(self, op: Builder, node: ir.Node) -> Optional[ir.Value]:
        """x W for x [B,S,K] and a transposed weight [N,K], or for x [B,1 or experts,S,K] and
        weights [experts,K,N], with a product for each expert.
        """
        x, value = node.inputs
        name, on_grid = op.rounded(transposed(value))
        if on_grid is not None and on_grid[1].scales.ndim == 2:
            self.stored.add(name)
            return self._product(op, node, x, name, on_grid)
        name, on_grid = op.rounded(value)
        if (
            on_grid is None
            or x is None
            or (x.shape is not None and len(x.shape) != 4)
            or on_grid[1].scales.ndim != 3
        ):
            return None
        grid, codes = on_grid
        of_experts, products = list(zip(codes.codes, codes.scales, strict=True)), []
        for index, read in enumerate(experts.parts(op, x, len(of_experts))):
            self.stored.add(f"{name}.{index}")
            of_expert = grid, Codes(*of_experts[index], codes.inputs)
            products.append(self._product(op, node, read, f"{name}.{index}", of_expert))
        return op.Concat(*products, axis=1)

    def _product(
        self, op: Builder, node: ir.Node, x: Optional[ir.Value], name: str, on_grid: OnGrid
    ) -> ir.Value:
        """Return x W for the left operand of a MatMul, or for the part of it that an expert reads,
        and a weight [N,K].
        """
        return dequantized(op, x, name, on_grid)

    def rows(self, op: Builder, node: ir.Node) -> Optional[ir.Value]:
        """Rows of a table [N,K] for ids [B,S]."""
        name, on_grid = op.rounded(node.inputs[0])
        if on_grid is None or node.attributes.get_int("axis", 0) != 0:
            return None
        self.stored.add(name)
        return self._rows(op, node, name, *on_grid)

    def _rows(self, op: Builder, node: ir.Node, name: str, grid: Grid, codes: Codes) -> ir.Value:
        """Return rows of a table. 4-bit codes are stored as int8, which Gather supports."""
        table = op.weight(f"{name}.codes_to_gather", lambda: np.ascontiguousarray(flat(codes)))
        scales = op.weight(f"{name}.scales_to_gather", lambda: codes.scales)
        zeros = codes.zeros(grid.bits)
        parts = [table, scales]
        if zeros is not None:
            parts.append(op.weight(f"{name}.zeros_to_gather", lambda: zeros))
        gathered = [op.Gather(part, node.inputs[1]) for part in parts]
        return op.DequantizeLinear(*gathered, axis=2, block_size=grid.block)
