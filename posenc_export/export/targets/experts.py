"""Experts: standard operators for all of them, or com.microsoft MoE for the chosen ones.

ops/graph.py describes the inputs of the semantic node Experts.
"""

import math
from typing import Any, Sequence

import numpy as np
import onnx_ir as ir

from posenc_export.export.quantization.grid import Codes, OnGrid, packed_codes
from posenc_export.export.targets.builder import MICROSOFT, Builder, constant_of, numbers_of, size
from posenc_export.ops.graph import Experts

SMALLEST = float(np.finfo(np.float32).tiny)  # lower bound of weights, whose logarithm is taken


def dense(op: Builder, node: Experts) -> ir.Value:
    """Compute all experts for all tokens."""
    x = op.Unsqueeze(node.x, [1])
    gate = _linear(op, x, node.gates, node.gates_bias)
    hidden = _unit(op, node, gate, _linear(op, x, node.ups, node.ups_bias))
    outputs = _linear(op, hidden, node.downs, node.downs_bias)
    by_expert = op.Unsqueeze(op.Transpose(node.weights, perm=[0, 2, 1]), [3])
    return op.ReduceSum(op.Mul(outputs, by_expert), [1], keepdims=0)


def flat(op: Builder, node: Experts) -> ir.Value:
    """Compute all experts in products of two dimensions: gates and ups of all experts side by side,
    and the sum over experts in the product with downs. CUDA's product of several matrices is
    addressed from the host (runtime/graphs/cuda_placement.py). Rounded weights are multiplied
    expert by expert.
    """
    if op.rounded(node.gates)[1] is not None:
        return dense(op, node)
    gate, up = (
        _beside(op, node.x, weights, bias)
        for weights, bias in ((node.gates, node.gates_bias), (node.ups, node.ups_bias))
    )
    by_expert = op.Reshape(_unit(op, node, gate, up), [0, 0, size(node.gates, 0), -1])
    weighted = op.Reshape(op.Mul(by_expert, op.Unsqueeze(node.weights, [3])), [0, 0, -1])
    y = op.MatMul(weighted, _stacked(op, node.downs, (-1, size(node.downs, 2))))
    return y if node.downs_bias is None else op.Add(y, op.MatMul(node.weights, node.downs_bias))


def _beside(op: Builder, x: ir.Value, weights: ir.Value, bias: ir.Value | None) -> ir.Value:
    """Apply the linear layers of all experts, weights [N,n,m], to x [B,S,n], to [B,S,N*m]."""
    beside = op.weight(f"{weights.name}.beside", lambda: np.hstack([*numbers_of(weights)]))
    y = op.MatMul(x, beside)
    return y if bias is None else op.Add(y, _stacked(op, bias, (-1,)))


def _stacked(op: Builder, value: ir.Value, shape: tuple[int, ...]) -> ir.Value:
    """Return a constant of all experts in a shape without their axis."""
    return op.weight(f"{value.name}.stacked", lambda: numbers_of(value).reshape(shape))


def sparse(op: Builder, node: Experts) -> ir.Value:
    """Compute the chosen experts in float32 with MoE. It takes the softmax of its second input over
    the chosen experts, so the input has the logarithms of the weights, and the output is multiplied
    by their sum.
    """
    if op.dtype != "float32":
        return dense(op, node)
    logits = op.Log(op.Max(node.weights, op.constant(SMALLEST, "float32")))
    by_token = op.Reshape(logits, [-1, size(node.gates, 0)])
    first = _alternating(op, node.gates, node.ups)
    first_bias = _alternating(op, node.gates_bias, node.ups_bias)
    name, on_grid = op.rounded(node.downs)
    by_output = f"{constant_of(node.downs).name}.by_output"  # [N,E,H]
    second = op.weight(by_output, lambda: _by_output(node.downs))
    second = second if on_grid is None else op.mark(second, name, on_grid)
    attributes: dict[str, Any] = {"k": node.chosen, "activation_type": "swiglu", "swiglu_fusion": 1}
    attributes |= {"activation_alpha": node.alpha, "activation_beta": node.beta}
    attributes |= {"swiglu_limit": node.limit} if math.isfinite(node.limit) else {}
    inputs = (by_token, first, first_bias, second, node.downs_bias)
    y = op.MoE(node.x, *inputs, domain=MICROSOFT, **attributes)
    total = op.ReduceSum(node.weights, [-1], keepdims=1)
    # The condition is always false. It makes Where read x after MoE, which otherwise may write its
    # output over x, and then gives zeros (ONNX Runtime 1.28 to 1.31).
    return op.Where(op.Less(total, op.constant(0, "float32")), node.x, op.Mul(y, total))


def quantized(op: Builder, node: ir.Node, first: OnGrid, second: OnGrid, accuracy: int) -> ir.Value:
    """Replace MoE by QMoE. Widths that are not multiples of the block are padded with zeros. With 8
    bits in blocks QMoE ignores accuracy_level and rounds activations (ONNX Runtime 1.31): where it
    must not, MoE reads weights that are dequantized when the graph is loaded.

    Args:
        first, second: codes of the weights [N,2*H,E] and [N,E,H] of the node.
        accuracy: accuracy_level, as for MatMulNBits.
    """
    x, logits, weights, bias, others, other_bias, *_ = (*node.inputs, None)
    grid, width, hidden = first[0], first[1].inputs, second[1].inputs
    attributes: dict[str, Any] = {name: item.value for name, item in node.attributes.items()}
    if grid.bits == 8 and grid.block and not accuracy:
        of_units = _dequantized(op, weights, first), bias
        of_downs = _dequantized(op, others, second), other_bias
        return op.MoE(x, logits, *of_units, *of_downs, domain=MICROSOFT, **attributes)
    block = grid.block or 1
    wide, deep = (-(-inputs // block) * block for inputs in (width, hidden))
    ups = _codes(op, weights, first, (2 * deep, wide))
    downs = _codes(op, others, second, (wide, deep))
    biases = [_padded(op, bias, 2 * deep), _padded(op, other_bias, wide)]
    if wide > width:
        x = op.Pad(x, [0, wide - width], None, [2])
    attributes |= {"expert_weight_bits": grid.bits} | (
        {"block_size": grid.block, "accuracy_level": accuracy} if grid.block else {}
    )
    inputs = (*ups, biases[0], *downs, biases[1])
    y = op.QMoE(x, logits, *inputs, domain=MICROSOFT, **attributes)
    return y if wide == width else op.Slice(y, [0], [width], [2])


def parts(op: Builder, x: ir.Value | None, experts: int) -> Sequence[ir.Value | None]:
    """Return x [B,1,S,K] of each expert: itself, if Unsqueeze made it, or a part of [B,N,S,K]."""
    producer = None if x is None else x.producer()
    if producer is not None and producer.op_type == "Unsqueeze":
        return [x] * experts
    return op.several(experts, "Split", x, axis=1, num_outputs=experts)


def _codes(
    op: Builder, source: ir.Value | None, on_grid: OnGrid, shape: tuple[int, int]
) -> list[ir.Value]:
    """Return codes [experts,rows,bytes] uint8 and scales [experts,rows,blocks], or [experts,rows]
    without blocks, of a constant [experts,N,K]. shape: rows and inputs of each expert, to which
    codes are padded.
    """
    assert source is not None
    (grid, codes), (rows, inputs) = on_grid, shape
    experts, outputs = codes.scales.shape[:2]
    below = (0, rows - outputs)

    def packed() -> np.ndarray:
        flat = codes.codes.reshape(experts, outputs, -1)  # the last block is padded already
        return packed_codes(np.pad(flat, ((0, 0), below, (0, inputs - flat.shape[2]))), grid)

    def scales() -> np.ndarray:
        if grid.block is None:
            return codes.scales.reshape(experts, outputs)
        return np.pad(codes.scales.reshape(experts, outputs, -1), ((0, 0), below, (0, 0)))

    name = constant_of(source).name
    return [op.weight(f"{name}.codes", packed), op.weight(f"{name}.scales", scales)]


def _dequantized(op: Builder, source: ir.Value | None, on_grid: OnGrid) -> ir.Value:
    """Return a constant [experts,N,K] as DequantizeLinear of its codes in blocks."""
    assert source is not None
    grid, codes = on_grid
    of_expert, name = codes.scales.shape[:2], constant_of(source).name
    whole = codes.codes.reshape(*of_expert, -1)[..., : codes.inputs]
    stored = op.weight(f"{name}.codes", lambda: np.ascontiguousarray(whole))
    scales = op.weight(f"{name}.scales", lambda: codes.scales.reshape(*of_expert, -1))
    return op.DequantizeLinear(stored, scales, axis=2, block_size=grid.block)


def _padded(op: Builder, bias: ir.Value | None, outputs: int) -> ir.Value | None:
    """Pad constant biases [N,m] to [N,outputs] with zeros; None for no biases."""
    if bias is None:
        return None
    numbers = numbers_of(bias)
    end = (0, outputs - numbers.shape[1])
    return op.weight(f"{bias.name}.padded", lambda: np.pad(numbers, ((0, 0), end)))


def _unit(op: Builder, node: Experts, gate: ir.Value, up: ir.Value) -> ir.Value:
    """Apply the unit to gate and up [B,N,S,H]."""
    alpha, beta, limit = node.alpha, node.beta, node.limit

    def constant(number: float) -> ir.Value:
        return op.table(op.constant(number, "float32"))

    if math.isfinite(limit):
        gate = op.Min(gate, constant(limit))
        up = op.Clip(up, constant(-limit), constant(limit))
    share = op.Sigmoid(gate if alpha == 1 else op.Mul(gate, constant(alpha)))
    return op.Mul(op.Mul(gate, share), op.Add(up, constant(beta)) if beta else up)


def _linear(op: Builder, x: ir.Value, weights: ir.Value, bias: ir.Value | None) -> ir.Value:
    """Apply the linear layers of all experts to x [B,1 or N,S,n], to [B,N,S,m]."""
    y = op.MatMul(x, weights)
    return y if bias is None else op.Add(y, op.Unsqueeze(bias, [1]))


def _by_output(weights: ir.Value) -> np.ndarray:
    """Return constant weights [N,n,m] as [N,m,n], and constant biases [N,m] unchanged."""
    numbers = numbers_of(constant_of(weights))
    return np.ascontiguousarray(np.swapaxes(numbers, 1, -1) if numbers.ndim == 3 else numbers)


def _alternating(op: Builder, gates: ir.Value | None, ups: ir.Value | None) -> ir.Value | None:
    """Return weights or biases of gates and ups in turn, as a constant; None for none."""
    if gates is None or ups is None:
        return None

    def joined(parts: Sequence[np.ndarray]) -> np.ndarray:
        both = np.stack(parts, axis=2)
        return both.reshape(len(both), -1, *both.shape[3:])

    both, alternating = (gates, ups), f"{constant_of(gates).name}.alternating"
    weight = op.weight(alternating, lambda: joined([_by_output(part) for part in both]))
    (name, first), (_, second) = op.rounded(gates), op.rounded(ups)
    if first is None or second is None:
        return weight
    codes = Codes.joined([first[1], second[1]], joined)
    return op.mark(weight, f"{name}.alternating", (first[0], codes))
