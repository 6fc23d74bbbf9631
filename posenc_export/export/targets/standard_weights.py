"""Nodes of ai.onnx for rounded weights, which nodes OnGrid name."""

from typing import Any, Callable, Dict, Mapping, Optional, Set

import numpy as np
import onnx_ir as ir

from posenc_export.export.quantization.grid import Codes, Grid, OnGrid
from posenc_export.export.targets import experts
from posenc_export.export.targets.builder import Builder, transposed
from posenc_export.export.targets.rewriter import NodeLowering

# Takes the MatMul, its left operand or the part of it that an expert reads, and name and codes of
# the weight.
Product = Callable[[Builder, ir.Node, Optional[ir.Value], str, OnGrid], ir.Value]


class Weights:
    """The rounded weights that nodes of a graph read.

    Attributes:
        stored: names of the weights that were found.
    """

    def __init__(self) -> None:
        self.stored: Set[str] = set()

    def of_product(self, op: Builder, node: ir.Node) -> Dict[str, OnGrid]:
        """Return the right operand of a MatMul by name: a transposed weight [N,K], or weights
        [experts,K,N] by expert; empty if it is not rounded.
        """
        x, value = node.inputs
        name, on_grid = op.rounded(transposed(value))
        if on_grid is not None and on_grid[1].scales.ndim == 2:
            return self._found(name, on_grid)
        name, on_grid = op.rounded(value)
        if (
            on_grid is None
            or x is None
            or (x.shape is not None and len(x.shape) != 4)
            or on_grid[1].scales.ndim != 3
        ):
            return {}
        grid, codes = on_grid
        by_expert = {
            f"{name}.{expert}": (grid, Codes(*parts, codes.inputs))
            for expert, parts in enumerate(zip(codes.codes, codes.scales, strict=True))
        }
        self.stored |= set(by_expert)
        return by_expert

    def of_table(self, op: Builder, node: ir.Node) -> Dict[str, OnGrid]:
        """Return the rounded table [N,K] that a Gather reads, by name; else empty."""
        if node.attributes.get_int("axis", 0) == 0:
            return self._found(*op.rounded(node.inputs[0]))
        return {}

    def of_all(self, op: Builder, value: Optional[ir.Value]) -> Optional[OnGrid]:
        """Return weights [experts,N,K] that MoE reads, or None if they are not rounded."""
        name, on_grid = op.rounded(value)
        self._found(name, on_grid)
        return on_grid

    def _found(self, name: str, on_grid: Optional[OnGrid]) -> Dict[str, OnGrid]:
        self.stored |= set() if on_grid is None else {name}
        return {} if on_grid is None else {name: on_grid}


def product(op: Builder, node: ir.Node, weights: Weights, emit: Product) -> Optional[ir.Value]:
    """Replace a MatMul by products `emit` with a rounded weight, or one for each expert."""
    rounded = weights.of_product(op, node)
    if len(rounded) < 2:
        return next((emit(op, node, node.inputs[0], *of) for of in rounded.items()), None)
    read = experts.parts(op, node.inputs[0], len(rounded))
    pairs = zip(read, rounded.items(), strict=True)
    return op.Concat(*(emit(op, node, x, *of) for x, of in pairs), axis=1)


def dequantized(
    op: Builder, node: ir.Node, x: Optional[ir.Value], name: str, on_grid: OnGrid
) -> ir.Value:
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
