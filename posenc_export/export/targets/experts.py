"""Mixtures of experts: standard operators that compute all experts, and com.microsoft MoE, which computes only the chosen ones.

The semantic node Experts has the inputs x [B,S,E], weights of the experts [B,S,N] that are 0 for those not chosen, and constants: weights [N,E,H] and biases [N,H] of
gates and of ups, weights [N,H,E] and biases [N,E] of downs. Its unit is g sigmoid(alpha g) (u + beta), with g at most limit and u within -limit .. limit.
"""

import math
from typing import List, Optional, Sequence, Tuple

import numpy as np
import onnx_ir as ir

from posenc_export.export.quantization.formats import Codes, OnGrid
from posenc_export.export.targets.rewriter import Rewriter, constant_of, number, numbers_of, size

DOMAIN = "com.microsoft"
SMALLEST = float(np.finfo(np.float32).tiny)  # lower bound of weights, whose logarithm is taken


def dense(rewriter: Rewriter, node: ir.Node) -> ir.Value:
    """Compute all experts for all tokens."""
    x, shares, gates, gates_bias, ups, ups_bias, downs, downs_bias = _inputs(node, 8)
    read = rewriter.emit("Unsqueeze", [x, rewriter.constant([1])])
    hidden = _unit(rewriter, node, _linear(rewriter, read, gates, gates_bias), _linear(rewriter, read, ups, ups_bias))
    given = _linear(rewriter, hidden, downs, downs_bias)
    by_expert = rewriter.emit("Unsqueeze", [rewriter.emit("Transpose", [shares], attributes={"perm": [0, 2, 1]}), rewriter.constant([3])])
    return rewriter.emit("ReduceSum", [rewriter.emit("Mul", [given, by_expert]), rewriter.constant([1])], attributes={"keepdims": 0})


def sparse(rewriter: Rewriter, node: ir.Node) -> ir.Value:
    """Compute the chosen experts in float32 with MoE. It takes the softmax of its second input over the chosen experts, so the input has the logarithms of the
    weights, and the output is multiplied by their sum."""
    if rewriter.dtype != "float32":
        return dense(rewriter, node)
    x, shares, gates, gates_bias, ups, ups_bias, downs, downs_bias = _inputs(node, 8)
    assert gates is not None and downs is not None
    logits = rewriter.emit("Log", [rewriter.emit("Max", [shares, rewriter.constant(SMALLEST, "float32")])])
    by_token = rewriter.emit("Reshape", [logits, rewriter.constant([-1, size(gates, 0)])])
    first, first_bias = _alternating(rewriter, gates, ups), _alternating(rewriter, gates_bias, ups_bias)
    second = _second(rewriter, downs)
    attributes = {"k": number(node, "chosen"), "activation_type": "swiglu", "swiglu_fusion": 1}
    attributes |= {"activation_alpha": _factor(node, "alpha"), "activation_beta": _factor(node, "beta")}
    attributes |= {"swiglu_limit": _factor(node, "limit")} if math.isfinite(_factor(node, "limit")) else {}
    mixed = rewriter.emit("MoE", [x, by_token, first, first_bias, second, downs_bias], DOMAIN, attributes)
    total = rewriter.emit("ReduceSum", [shares, rewriter.constant([-1])], attributes={"keepdims": 1})
    # The condition is always false. It makes Where read x after MoE, which otherwise may write its output over x, and then gives zeros (ONNX Runtime 1.28 to 1.31).
    return rewriter.emit("Where", [rewriter.emit("Less", [total, rewriter.constant(0, "float32")]), x, rewriter.emit("Mul", [mixed, total])])


def quantized(rewriter: Rewriter, node: ir.Node, first: OnGrid, second: OnGrid, accuracy: int) -> ir.Value:
    """Replace MoE by QMoE. Widths that are not multiples of the block are padded with zeros.

    Args:
        first, second: codes of the weights [N,2*H,E] and [N,E,H] of the node.
        accuracy: accuracy_level, as for MatMulNBits.
    """
    x, logits, weights, bias, others, other_bias = _inputs(node, 6)
    grid, width, hidden = first[0], first[1].inputs, second[1].inputs
    wide, deep = (inputs if grid.block is None else -(-inputs // grid.block) * grid.block for inputs in (width, hidden))
    matrices = [_codes(rewriter, weights, first, (2 * deep, wide)), _codes(rewriter, others, second, (wide, deep))]
    biases = [_padded(rewriter, bias, 2 * deep), _padded(rewriter, other_bias, wide)]
    if wide > width:
        x = rewriter.emit("Pad", [x, rewriter.constant([0, wide - width]), None, rewriter.constant([2])])
    attributes = {name: attribute.value for name, attribute in node.attributes.items()}
    attributes |= {"expert_weight_bits": grid.bits} | ({"block_size": grid.block, "accuracy_level": accuracy} if grid.block else {})
    y = rewriter.emit("QMoE", [x, logits, *matrices[0], biases[0], *matrices[1], biases[1]], DOMAIN, attributes)
    return y if wide == width else rewriter.emit("Slice", [y, rewriter.constant([0]), rewriter.constant([width]), rewriter.constant([2])])


def parts(rewriter: Rewriter, x: Optional[ir.Value], experts: int) -> Sequence[Optional[ir.Value]]:
    """Return the input [B,1,S,K] of each expert. x is [B,1,S,K] from Unsqueeze if all experts read the same, otherwise [B,experts,S,K]."""
    producer = None if x is None else x.producer()
    if producer is not None and producer.op_type == "Unsqueeze":
        return [x] * experts
    return rewriter.emit_all("Split", [x], experts, attributes={"axis": 1, "num_outputs": experts})


def _codes(rewriter: Rewriter, source: Optional[ir.Value], found: OnGrid, shape: Tuple[int, int]) -> List[ir.Value]:
    """Return codes [experts,rows,bytes] uint8 and scales [experts,rows,blocks], or [experts,rows] without blocks, of a constant [experts,N,K].

    Args:
        shape: rows and inputs of each expert, to which codes are padded.
    """
    assert source is not None
    (grid, codes), (rows, inputs) = found, shape
    experts, outputs = codes.scales.shape[:2]
    below = (0, rows - outputs)

    def packed() -> np.ndarray:
        flat = codes.codes.reshape(experts, outputs, -1)  # the last block is padded already
        unsigned = (np.pad(flat, ((0, 0), below, (0, inputs - flat.shape[2]))).astype(np.int16) + (1 << (grid.bits - 1))).astype(np.uint8)
        return unsigned if grid.bits == 8 else unsigned[..., 0::2] | unsigned[..., 1::2] << 4

    def scales() -> np.ndarray:
        if grid.block is None:
            return codes.scales.reshape(experts, outputs)
        return np.pad(codes.scales.reshape(experts, outputs, -1), ((0, 0), below, (0, 0)))

    name = constant_of(source).name
    return [rewriter.weight(f"{name}.codes", packed), rewriter.weight(f"{name}.scales", scales)]


def _padded(rewriter: Rewriter, bias: Optional[ir.Value], outputs: int) -> Optional[ir.Value]:
    """Pad constant biases [N,m] to [N,outputs] with zeros; None for no biases."""
    if bias is None:
        return None
    numbers = numbers_of(bias)
    return rewriter.weight(f"{bias.name}.padded", lambda: np.pad(numbers, ((0, 0), (0, outputs - numbers.shape[1]))))


def _inputs(node: ir.Node, count: int) -> List[Optional[ir.Value]]:
    """Return the inputs of a node, None for missing ones."""
    return [*node.inputs, *[None] * (count - len(node.inputs))]


def _unit(rewriter: Rewriter, node: ir.Node, gate: ir.Value, up: ir.Value) -> ir.Value:
    """Apply the unit to gate and up [B,N,S,H]."""
    alpha, beta, limit = (_factor(node, name) for name in ("alpha", "beta", "limit"))

    def constant(number: float) -> ir.Value:
        return rewriter.constant(number, rewriter.dtype)

    if math.isfinite(limit):
        gate = rewriter.emit("Min", [gate, constant(limit)])
        up = rewriter.emit("Clip", [up, constant(-limit), constant(limit)])
    share = rewriter.emit("Sigmoid", [gate if alpha == 1 else rewriter.emit("Mul", [gate, constant(alpha)])])
    return rewriter.emit("Mul", [rewriter.emit("Mul", [gate, share]), rewriter.emit("Add", [up, constant(beta)]) if beta else up])


def _linear(rewriter: Rewriter, x: ir.Value, weights: Optional[ir.Value], bias: Optional[ir.Value]) -> ir.Value:
    """Apply the linear layers of all experts to x [B,1 or N,S,n], to [B,N,S,m]."""
    y = rewriter.emit("MatMul", [x, weights])
    return y if bias is None else rewriter.emit("Add", [y, rewriter.emit("Unsqueeze", [bias, rewriter.constant([1])])])


def _factor(node: ir.Node, name: str) -> float:
    return float(node.attributes[name].value)


def _by_output(weights: ir.Value) -> np.ndarray:
    """Return constant weights [N,n,m] as [N,m,n], and constant biases [N,m] unchanged."""
    numbers = numbers_of(constant_of(weights))
    return np.ascontiguousarray(np.swapaxes(numbers, 1, -1) if numbers.ndim == 3 else numbers)


def _second(rewriter: Rewriter, downs: ir.Value) -> ir.Value:
    """Return weights of downs [N,H,E] in a constant [N,E,H]."""
    name, found = rewriter.rounded(downs)
    made = rewriter.weight(f"{constant_of(downs).name}.by_output", lambda: _by_output(downs))
    return made if found is None else rewriter.mark(made, name, found)


def _alternating(rewriter: Rewriter, gates: Optional[ir.Value], ups: Optional[ir.Value]) -> Optional[ir.Value]:
    """Return weights or biases of gates and ups in one constant, in which their outputs alternate; None for no biases."""
    if gates is None or ups is None:
        return None

    def joined(parts: Sequence[np.ndarray]) -> np.ndarray:
        both = np.stack(parts, axis=2)
        return both.reshape(len(both), -1, *both.shape[3:])

    made = rewriter.weight(f"{constant_of(gates).name}.alternating", lambda: joined([_by_output(gates), _by_output(ups)]))
    (name, first), (_, second) = rewriter.rounded(gates), rewriter.rounded(ups)
    if first is None or second is None:
        return made
    return rewriter.mark(made, f"{name}.alternating", (first[0], Codes.joined([first[1], second[1]], joined)))
