"""Nodes for rounded weights, which nodes OnGrid name: of ai.onnx, of com.microsoft on CPUs, of the
library of packages/kernels, and of com.microsoft in half precision on CUDA.
"""

from dataclasses import replace
from typing import Any, Mapping

import numpy as np
import onnx_ir as ir

from posenc_export.export.quantization.grid import Codes, Grid, OnGrid, packed_codes
from posenc_export.export.targets import experts
from posenc_export.export.targets.builder import MICROSOFT, Builder, NodeLowering
from posenc_export.export.trace import transposed

ZERO = 8  # code that a 4-bit code has 0 at; the minimum of a block is its offset less ZERO scales
# Accuracy_level of MatMulNBits; activations are rounded in blocks of one token, so outputs do not
# depend on other tokens.
ROUNDED, PLAIN = 4, 0
ZERO_POINT = 128  # of activations in uint8, which has the faster kernel
BLOCKS = (128, 64, 32)  # of MatMulNBits, for weights with one scale per output


def stored_scales(op: Builder, name: str, numbers: np.ndarray) -> ir.Value:
    """Return scales in float32, as float16 in the file if these are equal, or in half precision.
    ONNX Runtime converts them once, when it loads the graph, as it computes nodes without inputs.
    """
    if op.dtype != "float32":
        return op.weight(name, lambda: numbers, op.onnx_dtype)
    half = _half(numbers)
    if half is None:
        return op.weight(name, lambda: numbers)
    return op.Cast(op.weight(name, lambda: half), to=ir.DataType.FLOAT)


def add_to_product(
    op: Builder, product: ir.Value, x: ir.Value | None, name: str, codes: Codes
) -> ir.Value:
    """Add offsets times the block sums of x [B,S,K]; products of one x share the sums.

    MatMulNBits also accepts zero points in float32, but then dequantizes the whole weight at each
    call: 120 to 160 times the time of a decode step, 1.3 to 2 times that of 128 tokens (ONNX
    Runtime 1.31, CPU, K and N of 576 to 2048). The product with the sums takes 1.2 times the time
    of a step without offsets.
    """
    if codes.offsets is None:
        return product
    sums = op.ReduceSum(op.Reshape(x, [0, 0, *codes.codes.shape[1:]]), [3], keepdims=0)
    return op.Add(product, op.MatMul(sums, op.Transpose(_offsets(op, name, codes), perm=[1, 0])))


def add_to_rows(
    op: Builder, blocks: ir.Value, ids: ir.Value | None, name: str, codes: Codes
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
    of_blocks = stored_scales(op, f"{name}.scales", codes.scales)
    return op.Add(stored, op.Mul(of_blocks, op.constant(ZERO, "float32")))


def _half(numbers: np.ndarray) -> np.ndarray | None:
    """Return numbers as float16, or None if that changes one."""
    with np.errstate(over="ignore"):
        half = numbers.astype(np.float16)
    return half if np.array_equal(half.astype(np.float32), numbers) else None


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
        self.stored: set[str] = set()

    def table(self) -> Mapping[str, NodeLowering]:
        """Lowerings by operator."""
        return {"MatMul": self.product, "Gather": self.rows}

    def product(self, op: Builder, node: ir.Node) -> ir.Value | None:
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
        self, op: Builder, node: ir.Node, x: ir.Value | None, name: str, on_grid: OnGrid
    ) -> ir.Value:
        """Return x W for the left operand of a MatMul, or for the part of it that an expert reads,
        and a weight [N,K].
        """
        grid, codes = on_grid
        dtype = ir.DataType.INT4 if grid.bits == 4 else None
        turned = codes.scales[:, 0] if grid.block is None else codes.scales.T
        stored = op.weight(f"{name}.codes", lambda: np.ascontiguousarray(flat(codes).T), dtype)
        scales = op.weight(f"{name}.scales", lambda: np.ascontiguousarray(turned))
        zeros = codes.zeros(grid.bits)
        inputs = [stored, scales]
        if zeros is not None:
            inputs.append(op.weight(f"{name}.zeros", lambda: np.ascontiguousarray(zeros.T), dtype))
        how: dict[str, Any] = {"axis": 1}
        if grid.block is not None:
            how = {"axis": 0, "block_size": grid.block}
        return op.MatMul(x, op.DequantizeLinear(*inputs, **how))

    def rows(self, op: Builder, node: ir.Node) -> ir.Value | None:
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

    def experts(self, op: Builder, node: ir.Node) -> ir.Value | None:
        """MoE as QMoE."""
        read = [op.rounded(node.inputs[index]) for index in (2, 4)]
        self.stored |= {name for name, on_grid in read if on_grid is not None}
        first, second = (on_grid for _, on_grid in read)
        if first and second and first[0] == second[0]:
            return experts.quantized(op, node, first, second, self.accuracy)
        return None

    def _product(
        self, op: Builder, node: ir.Node, x: ir.Value | None, name: str, on_grid: OnGrid
    ) -> ir.Value:
        grid, codes = on_grid
        if grid.block is None:
            if self.accuracy == PLAIN:
                return super()._product(op, node, x, name, on_grid)
            return self._by_token(op, node, x, name, codes)
        sizes: dict[str, Any] = {"K": codes.inputs, "N": len(codes.codes), "bits": grid.bits}
        sizes |= {"block_size": grid.block, "accuracy_level": self.accuracy}
        stored = self._packed(op, name, grid, codes)
        inputs = [x, stored, stored_scales(op, f"{name}.scales", codes.scales)]
        zeros = codes.zeros(grid.bits)
        if zeros is not None:
            even = np.pad(zeros, ((0, 0), (0, zeros.shape[1] % 2)))
            packed = op.weight(f"{name}.zeros", lambda: packed_codes(even, grid))
            return op.MatMulNBits(*inputs, packed, domain=self._domain(grid), **sizes)
        product = op.MatMulNBits(*inputs, domain=self._domain(grid), **sizes)
        return add_to_product(op, product, x, name, codes)

    def _domain(self, grid: Grid) -> str:
        """Return the domain of the product with weights in blocks."""
        return MICROSOFT

    def _rows(self, op: Builder, node: ir.Node, name: str, grid: Grid, codes: Codes) -> ir.Value:
        # Those of a tied head; computed once, when the graph is loaded.
        scales = op.Unsqueeze(stored_scales(op, f"{name}.scales", codes.scales), [2])
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
            blocks = add_to_rows(op, blocks, node.inputs[1], name, codes)
        flat = op.Reshape(blocks, [0, 0, -1])
        if codes.codes[0].size == codes.inputs:
            return flat
        return op.Slice(flat, [0], [codes.inputs], [2])

    def _by_token(
        self, op: Builder, node: ir.Node, x: ir.Value | None, name: str, codes: Codes
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


class InHalf(Fused):
    """Lower to MatMulNBits and GatherBlockQuantized with activations in half precision, which ONNX
    Runtime's CUDA kernels read as the CPU's do.

    Read in the sources of the CUDA provider, from before and after the repair of onnxruntime 31692:

    - GatherBlockQuantized takes the zero point of a block from packed numbers at the index of the
      block in the whole table, and before the repair 0 if there are none. Rows that are no multiple
      of the block shift all later blocks (32663).
    - DequantizeLinear has blocks for int4 and uint4 only.
    - MatMulNBits takes scales in the dtype of activations, and zero points in uint8. With
      ep.cuda.fpa_intb_gemm it needs blocks of 32, 64 or 128, K a multiple of the block, and N a
      multiple of 64, of 32 for 8 bits.
    """

    def _product(
        self, op: Builder, node: ir.Node, x: ir.Value | None, name: str, on_grid: OnGrid
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
        scales = stored_scales(op, of_scales, np.pad(codes.scales, ((0, 0), end)))
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
        with_offsets = add_to_rows(op, in_blocks, node.inputs[1], name, codes)
        return op.Reshape(with_offsets, [0, 0, -1])


def _in_blocks(grid: Grid, codes: Codes) -> OnGrid:
    """Return weights with one scale per output in blocks that repeat it."""
    if grid.block is not None:
        return grid, codes
    block = next((block for block in BLOCKS if codes.inputs % block == 0), BLOCKS[-1])
    count = -(-codes.inputs // block)
    padded = np.pad(flat(codes), ((0, 0), (0, count * block - codes.inputs)))
    blocks, scales = padded.reshape(-1, count, block), np.repeat(codes.scales, count, axis=1)
    return replace(grid, block=block), Codes(blocks, scales, codes.inputs)
