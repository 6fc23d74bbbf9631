"""Nodes of com.microsoft for rounded weights, of target `ort`."""

from typing import Any, Dict, Mapping, Optional

import numpy as np
import onnx_ir as ir

from posenc_export.export.quantization.grid import Codes, Grid, OnGrid, packed_codes
from posenc_export.export.targets import experts, offsets
from posenc_export.export.targets.builder import MICROSOFT, Builder
from posenc_export.export.targets.rewriter import NodeLowering
from posenc_export.export.targets.standard_weights import Standard, dequantized

# Accuracy_level of MatMulNBits; activations are rounded in blocks of one token, so outputs do not
# depend on other tokens.
ROUNDED, PLAIN = 4, 0
ZERO_POINT = 128  # of activations in uint8, which has the faster kernel


class Fused(Standard):
    """Lower to com.microsoft operators. Grids with blocks use MatMulNBits and GatherBlockQuantized,
    which share codes and scales if the head is tied. Grids with one scale per output use integer
    products. activations: "int8" to round activations to 8 bits in products, or their dtype.
    """

    def __init__(self, activations: str) -> None:
        super().__init__(activations)
        self.accuracy = ROUNDED if activations == "int8" else PLAIN

    def table(self) -> Mapping[str, NodeLowering]:
        return {**super().table(), "MoE": self.experts}

    def experts(self, op: Builder, node: ir.Node) -> Optional[ir.Value]:
        """MoE as QMoE."""
        read = [op.rounded(node.inputs[index]) for index in (2, 4)]
        self.stored |= {name for name, on_grid in read if on_grid is not None}
        first, second = (on_grid for _, on_grid in read)
        if first and second and first[0] == second[0]:
            return experts.quantized(op, node, first, second, self.accuracy)
        return None

    def _product(
        self, op: Builder, node: ir.Node, x: Optional[ir.Value], name: str, on_grid: OnGrid
    ) -> ir.Value:
        grid, codes = on_grid
        if grid.block is None:
            if self.accuracy == PLAIN:
                return dequantized(op, x, name, on_grid)
            return self._by_token(op, node, x, name, codes)
        sizes: Dict[str, Any] = {"K": codes.inputs, "N": len(codes.codes), "bits": grid.bits}
        sizes |= {"block_size": grid.block, "accuracy_level": self.accuracy}
        stored = self._packed(op, name, grid, codes)
        inputs = [x, stored, offsets.scales(op, f"{name}.scales", codes.scales)]
        zeros = codes.zeros(grid.bits)
        if zeros is not None:
            even = np.pad(zeros, ((0, 0), (0, zeros.shape[1] % 2)))
            packed = op.weight(f"{name}.zeros", lambda: packed_codes(even, grid))
            return op.MatMulNBits(*inputs, packed, domain=self._domain(grid), **sizes)
        product = op.MatMulNBits(*inputs, domain=self._domain(grid), **sizes)
        return offsets.add_to_product(op, product, x, name, codes)

    def _domain(self, grid: Grid) -> str:
        """Return the domain of the product with weights in blocks."""
        return MICROSOFT

    def _rows(self, op: Builder, node: ir.Node, name: str, grid: Grid, codes: Codes) -> ir.Value:
        # Those of a tied head; computed once, when the graph is loaded.
        scales = op.Unsqueeze(offsets.scales(op, f"{name}.scales", codes.scales), [2])
        attributes = {"bits": grid.bits, "block_size": grid.block}
        attributes |= {"gather_axis": 0, "quantize_axis": 2}
        stored, zeros = self._packed(op, name, grid, codes), codes.zeros(grid.bits)
        # Each block has a byte for its zero point, also with 4 bits.
        of_blocks = []
        if zeros is not None:
            points = (zeros.astype(np.int16) + grid.half).astype(np.uint8)[..., None]
            of_blocks = [op.weight(f"{name}.zeros_of_blocks", lambda: points)]
        inputs = (stored, node.inputs[1], scales, *of_blocks)
        blocks = op.GatherBlockQuantized(*inputs, domain=MICROSOFT, **attributes)
        if not of_blocks:
            blocks = offsets.add_to_rows(op, blocks, node.inputs[1], name, codes)
        flat = op.Reshape(blocks, [0, 0, -1])
        if codes.codes[0].size == codes.inputs:
            return flat
        return op.Slice(flat, [0], [codes.inputs], [2])

    def _by_token(
        self, op: Builder, node: ir.Node, x: Optional[ir.Value], name: str, codes: Codes
    ) -> ir.Value:
        """Round activations to 8 bits with one scale per token, and multiply integers.
        DynamicQuantizeMatMul has one scale for all tokens, so that outputs would depend on the
        other tokens of a call. If all activations of a token are 0, so is its scale: their codes
        are arbitrary, and their products are multiplied by 0.
        """
        # The axis is at least 0: ONNX Runtime 1.31 leaves a tensor without tokens as it is if the
        # axis is negative, and QuantizeLinear refuses such scales.
        assert node.outputs[0].shape is not None
        last = op.constant([len(node.outputs[0].shape) - 1])
        largest = op.ReduceMax(op.Abs(x), last, keepdims=1)
        of_token = op.Mul(largest, op.constant(1 / 127, "float32"))
        one, zero = op.constant(1, "float32"), op.constant(ZERO_POINT, "uint8")
        # One block per token. With Div and then QuantizeLinear with scale 1, a product takes 1.01
        # to 1.06 of the time.
        points = ir.tensor(np.array([ZERO_POINT], np.uint8))
        zeros = op.ConstantOfShape(op.Shape(of_token), value=points)
        whole = op.QuantizeLinear(x, of_token, zeros, axis=-1, block_size=codes.inputs)
        weight = op.weight(f"{name}.codes", lambda: codes.codes[:, 0].T)
        scales = op.weight(f"{name}.scales", lambda: codes.scales[:, 0].copy())
        y = op.MatMulIntegerToFloat(whole, weight, one, scales, zero, domain=MICROSOFT)
        return op.Mul(y, of_token)

    def _packed(self, op: Builder, name: str, grid: Grid, codes: Codes) -> ir.Value:
        """Return the codes as unsigned integers [N,blocks,bytes] uint8."""
        return op.weight(f"{name}.codes", lambda: packed_codes(codes.codes, grid))
