"""Nodes for constant weights that lie on the grid of a quantized format. Other weights stay float32 constants, so these lowerings never change the value of a weight."""

from typing import Any, Callable, Dict, Mapping, Optional, Sequence, Tuple

import numpy as np
import onnx_ir as ir

from posenc_export.export.fewer_bits import Codes, Grid
from posenc_export.export.rewriter import NodeLowering, Rewriter
from posenc_export.export.targets import experts
from posenc_export.export.targets.experts import DOMAIN, OnGrid

ACCURACY = {"int8": 4, "float32": 0}  # accuracy_level of MatMulNBits; activations are rounded in blocks of one token, so outputs do not depend on other tokens
ZERO_POINT = 128  # of activations in uint8, which has the faster kernel
# Takes the MatMul, its left operand or the part of it that an expert reads, and name and codes of the weight.
Product = Callable[[Rewriter, ir.Node, Optional[ir.Value], str, OnGrid], ir.Value]


class Weights:
    """Find the codes of a graph's constants. Results are kept, so that each constant is examined once.

    Args:
        grids: grids to try, in this order.
    """

    def __init__(self, grids: Sequence[Grid]) -> None:
        self.grids = grids
        self._found: Dict[str, Optional[OnGrid]] = {}

    def count(self) -> int:
        """Return the number of constants that lie on a grid."""
        return sum(found is not None for found in self._found.values())

    def of_product(self, node: ir.Node) -> Tuple[str, Optional[OnGrid]]:
        """Return name and codes of the constant right operand [K,N] of a MatMul, which may be a transposed table [N,K]."""
        value = node.inputs[1]
        producer = None if value is None else value.producer()
        if producer is not None and producer.op_type == "Transpose" and _numbers(producer.inputs[0], 2) is not None:
            return self._of(producer.inputs[0], "rows", lambda table: table)
        return self._of(value, "columns", lambda weight: np.ascontiguousarray(weight.T))

    def of_table(self, node: ir.Node) -> Tuple[str, Optional[OnGrid]]:
        """Return name and codes of the table [N,K] from which a Gather reads rows."""
        axis = node.attributes.get_int("axis", 0)
        return self._of(node.inputs[0] if axis == 0 else None, "rows", lambda table: table)

    def of_each(self, node: ir.Node) -> Dict[str, OnGrid]:
        """Return the codes of the constant right operand [experts,K,N] of a MatMul with four axes, for each expert by name. Empty if it lies on no grid."""
        (x, source), found = node.inputs, {}
        weights = _numbers(source, 3)
        if source is None or weights is None or x is None or (x.shape is not None and len(x.shape) != 4):
            return {}
        for expert, weight in enumerate(weights):
            name = f"{source.name}.{expert}"
            codes = self._codes(name, np.ascontiguousarray(weight.T))
            if codes is None:
                return {}
            found[name] = codes
        return found

    def of_all(self, source: Optional[ir.Value]) -> Optional[OnGrid]:
        """Return the codes of a constant [experts,N,K] with the outputs of all experts in one axis, or None."""
        weights = _numbers(source, 3)
        return None if source is None or weights is None else self._codes(f"{source.name}", weights.reshape(-1, weights.shape[2]))

    def _of(self, source: Optional[ir.Value], outputs: str, by_output: Callable[[np.ndarray], np.ndarray]) -> Tuple[str, Optional[OnGrid]]:
        """Return a name for the constant, its grid and its codes. The grid and codes are None if `source` is not a constant matrix or lies on no grid.

        Args:
            outputs: "rows" or "columns", the axis of the outputs. It is part of the name.
            by_output: brings the constant to the shape [N,K].
        """
        weight = _numbers(source, 2)
        if source is None or weight is None:
            return "", None
        name = f"{source.name}.{outputs}"
        return name, self._codes(name, by_output(weight))

    def _codes(self, name: str, weight: np.ndarray) -> Optional[OnGrid]:
        """Return the codes of a weight [N,K] on the first grid it lies on, or None."""
        if name not in self._found:
            found = ((grid, grid.codes(weight)) for grid in self.grids)
            self._found[name] = next(((grid, codes) for grid, codes in found if codes is not None), None)
        return self._found[name]


class Fused:
    """Lower to com.microsoft operators.

    Grids with blocks use MatMulNBits and GatherBlockQuantized, which share one tensor if the head is tied. Grids with one scale per output use integer products.

    Args:
        grids: grids of the format.
        activations: "int8" to round activations to 8 bits in products, or "float32".
    """

    def __init__(self, grids: Sequence[Grid], activations: str) -> None:
        self.weights, self.accuracy = Weights(grids), ACCURACY[activations]
        self._zeros: Dict[Tuple[Any, ...], ir.Value] = {}  # by the axes of tokens

    def table(self) -> Mapping[str, NodeLowering]:
        """Lowerings by operator."""
        return {"MatMul": self.product, "Gather": self.rows, "MoE": self.experts}

    def product(self, rewriter: Rewriter, node: ir.Node) -> Optional[ir.Value]:
        """x W for x [B,S,K], or for the weights of all experts."""
        return _product(rewriter, node, self.weights, self._product)

    def experts(self, rewriter: Rewriter, node: ir.Node) -> Optional[ir.Value]:
        """MoE as QMoE."""
        first, second = (self.weights.of_all(node.inputs[index]) for index in (2, 4))
        return experts.quantized(rewriter, node, first, second, self.accuracy) if first and second and first[0] == second[0] else None

    def _product(self, rewriter: Rewriter, node: ir.Node, x: Optional[ir.Value], name: str, found: OnGrid) -> ir.Value:
        grid, codes = found
        if grid.block is None:
            return _dequantized(rewriter, node, x, name, found) if self.accuracy == ACCURACY["float32"] else self._by_token(rewriter, node, x, name, codes)
        sizes = {"K": codes.inputs, "N": len(codes.codes), "bits": grid.bits, "block_size": grid.block, "accuracy_level": self.accuracy}
        inputs = [x, self._packed(rewriter, name, grid, codes), rewriter.weight(f"{name}.scales", lambda: codes.scales)]
        return rewriter.emit("MatMulNBits", inputs, DOMAIN, sizes)

    def rows(self, rewriter: Rewriter, node: ir.Node) -> Optional[ir.Value]:
        """Rows of a table for ids [B,S]."""
        name, found = self.weights.of_table(node)
        if found is None or found[0].block is None:
            return None
        grid, codes = found
        scales = rewriter.weight(f"{name}.scales_of_blocks", lambda: codes.scales[..., None])
        attributes = {"bits": grid.bits, "block_size": grid.block, "gather_axis": 0, "quantize_axis": 2}
        blocks = rewriter.emit("GatherBlockQuantized", [self._packed(rewriter, name, grid, codes), node.inputs[1], scales], DOMAIN, attributes)
        flat = rewriter.emit("Reshape", [blocks, rewriter.constant([0, 0, -1])])
        if codes.codes[0].size == codes.inputs:
            return flat
        return rewriter.emit("Slice", [flat, rewriter.constant([0]), rewriter.constant([codes.inputs]), rewriter.constant([2])])

    def _by_token(self, rewriter: Rewriter, node: ir.Node, x: Optional[ir.Value], name: str, codes: Codes) -> ir.Value:
        """Round activations to 8 bits with one scale per token, and multiply integers. DynamicQuantizeMatMul has one scale for all tokens, so that outputs would depend
        on the other tokens of a call. If all activations of a token are 0, so is its scale: their codes are arbitrary, and their products are multiplied by 0."""
        largest = rewriter.emit("ReduceMax", [rewriter.emit("Abs", [x]), rewriter.constant([-1])], attributes={"keepdims": 1})
        of_token = rewriter.emit("Mul", [largest, rewriter.constant(1 / 127, "float32")])
        one, zero = rewriter.constant(1, "float32"), rewriter.constant(ZERO_POINT, "uint8")
        # One block per token. With Div and then QuantizeLinear with scale 1, a product takes 1.01 to 1.06 of the time.
        whole = rewriter.emit("QuantizeLinear", [x, of_token, self._zero_points(rewriter, node, of_token)], attributes={"axis": -1, "block_size": codes.inputs})
        weight = rewriter.weight(f"{name}.codes", lambda: np.ascontiguousarray(codes.codes[:, 0].T))
        scales = rewriter.weight(f"{name}.scales", lambda: codes.scales[:, 0].copy())
        return rewriter.emit("Mul", [rewriter.emit("MatMulIntegerToFloat", [whole, weight, one, scales, zero], DOMAIN), of_token])

    def _zero_points(self, rewriter: Rewriter, node: ir.Node, of_token: ir.Value) -> ir.Value:
        """Return a zero point for each token, in the shape of the scales. Products whose outputs have the same axes before the last share it."""
        axes = node.outputs[0].shape
        known = None if axes is None else tuple(axis if isinstance(axis, int) else axis.value for axis in axes[:-1])
        if known is None or None in known:
            return _filled(rewriter, of_token)
        if known not in self._zeros:
            self._zeros[known] = _filled(rewriter, of_token)
        return self._zeros[known]

    def _packed(self, rewriter: Rewriter, name: str, grid: Grid, codes: Codes) -> ir.Value:
        """Return the codes as unsigned integers [N,blocks,bytes] uint8. A byte holds two 4-bit codes, the first one in its lower half."""

        def made() -> np.ndarray:
            unsigned = (codes.codes.astype(np.int16) + (1 << (grid.bits - 1))).astype(np.uint8)
            return unsigned if grid.bits == 8 else unsigned[..., 0::2] | unsigned[..., 1::2] << 4

        return rewriter.weight(f"{name}.codes", made)


class Standard:
    """Lower to ai.onnx operators: DequantizeLinear before MatMul, which ONNX Runtime fuses to MatMulNBits, and Gather of codes before DequantizeLinear.

    A tied head has its own copy of the codes. If it shared the table's codes, ONNX Runtime would dequantize the whole table at each step. Whether products round
    activations is an option of the session (runtime/ort_graph.py).
    """

    def __init__(self, grids: Sequence[Grid], activations: str) -> None:
        self.weights = Weights(grids)

    def table(self) -> Mapping[str, NodeLowering]:
        """Lowerings by operator."""
        return {"MatMul": self.product, "Gather": self.rows}

    def product(self, rewriter: Rewriter, node: ir.Node) -> Optional[ir.Value]:
        """x W for x [B,S,K], or for the weights of all experts."""
        return _product(rewriter, node, self.weights, _dequantized)

    def rows(self, rewriter: Rewriter, node: ir.Node) -> Optional[ir.Value]:
        """Rows of a table for ids [B,S]. 4-bit codes are stored as int8, which Gather supports."""
        name, found = self.weights.of_table(node)
        if found is None or found[0].block is None:
            return None
        grid, codes = found
        table = rewriter.weight(f"{name}.codes_to_gather", lambda: np.ascontiguousarray(_flat(codes)))
        scales = rewriter.weight(f"{name}.scales_to_gather", lambda: codes.scales)
        gathered = [rewriter.emit("Gather", [part, node.inputs[1]]) for part in (table, scales)]
        return rewriter.emit("DequantizeLinear", gathered, attributes={"axis": 2, "block_size": grid.block})


def _dequantized(rewriter: Rewriter, node: ir.Node, x: Optional[ir.Value], name: str, found: OnGrid) -> ir.Value:
    """x W with DequantizeLinear before MatMul."""
    grid, codes = found
    stored = rewriter.weight(f"{name}.codes", lambda: np.ascontiguousarray(_flat(codes).T), ir.DataType.INT4 if grid.bits == 4 else None)
    scales = rewriter.weight(f"{name}.scales", lambda: codes.scales[:, 0].copy() if grid.block is None else np.ascontiguousarray(codes.scales.T))
    how: Dict[str, Any] = {"axis": 1} if grid.block is None else {"axis": 0, "block_size": grid.block}
    return rewriter.emit("MatMul", [x, rewriter.emit("DequantizeLinear", [stored, scales], attributes=how)])


def _flat(codes: Codes) -> np.ndarray:
    """Return the codes without padding [N,K] int8."""
    return codes.codes.reshape(len(codes.codes), -1)[:, : codes.inputs]


def _filled(rewriter: Rewriter, of_token: ir.Value) -> ir.Value:
    """Return ZERO_POINT in the shape of the scales [...,1], uint8."""
    return rewriter.emit("ConstantOfShape", [rewriter.emit("Shape", [of_token])], attributes={"value": ir.tensor(np.array([ZERO_POINT], np.uint8))})


def _product(rewriter: Rewriter, node: ir.Node, weights: Weights, one: Product) -> Optional[ir.Value]:
    """Replace a MatMul by the product `one` with quantized weights, or by one for each expert; return None if its weights lie on no grid."""
    of_experts = weights.of_each(node)
    if of_experts:
        read = experts.parts(rewriter, node.inputs[0], len(of_experts))
        return rewriter.emit("Concat", [one(rewriter, node, x, *found) for x, found in zip(read, of_experts.items(), strict=True)], attributes={"axis": 1})
    name, found = weights.of_product(node)
    return None if found is None else one(rewriter, node, node.inputs[0], name, found)


def _numbers(value: Optional[ir.Value], axes: int) -> Optional[np.ndarray]:
    """Return the content of a constant float32 tensor with this number of axes, or None for another value."""
    if value is None or value.const_value is None or value.dtype != ir.DataType.FLOAT or len(value.const_value.shape) != axes:
        return None
    return value.const_value.numpy()
