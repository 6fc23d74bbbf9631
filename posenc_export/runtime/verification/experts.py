"""The contract of QMoE with activations in float32: the chosen experts, gated and summed.

Contract: ONNX Runtime's docs/ContribOperators.md. M tokens, K inputs, H hidden channels.
"""

from typing import Sequence, Tuple

import numpy as np

from posenc_export.runtime.graphs.onnx_nodes import Node
from posenc_export.runtime.verification import contracts
from posenc_export.runtime.verification.contracts import BESIDE, UNDERFLOW, UNIT, Blocks
from posenc_export.runtime.verification.decoding import split
from posenc_export.runtime.verification.kernels import CheckedNode, Graph, Record, rows

# Absolute error of a sigmoid, which kernels approximate and limit near 0 and 1; and the largest
# slope of z sigmoid(z).
SIGMOID, SLOPE = 2.0**-21, 1.1
OF_SHARE = 24  # roundings of the weight of an expert, and of the sum of few experts

Bounded = Tuple[np.ndarray, np.ndarray]  # numbers in float64, and bounds of their errors


def chosen_experts(graph: Graph, node: Node) -> CheckedNode:
    """A QMoE."""
    x, logits, output = (*node.inputs[:2], node.outputs[0])
    level = int(node.attributes.get("accuracy_level", 0))

    def ratios(records: Sequence[Record]) -> np.ndarray:
        read, scores, y = (rows(records, name) for name in (x, logits, output))
        shares, sure = _shares(scores.astype(np.float64), int(node.attributes["k"]))
        value, bound = np.zeros((2, *y.shape))
        for expert in range(scores.shape[1]):
            at = np.flatnonzero(shares[:, expert])
            if at.size:
                share = shares[at, expert, None]
                numbers, error = _expert(graph, node, expert, read[at].astype(np.float64))
                value[at] += share * numbers
                bound[at] += share * (error + OF_SHARE * UNIT * (np.abs(numbers) + error))
        return contracts.over(y, value, np.where(sure[:, None], bound + UNDERFLOW, np.inf))

    wrong = f"accuracy_level {level} in place of 0" if level else ""
    return CheckedNode(f"QMoE {node.inputs[2]}", output, (x, logits), ratios, wrong)


def _shares(scores: np.ndarray, count: int) -> Tuple[np.ndarray, np.ndarray]:
    """Return weights of experts [M,experts], and whether their choice is certain [M]."""
    order = np.sort(scores, axis=1)[:, ::-1]
    least = order[:, count - 1 : count]
    sure = np.ones(len(scores), bool)
    if count < scores.shape[1]:
        sure = order[:, count - 1] > order[:, count]
    chosen = scores >= least
    shares = np.where(chosen, np.exp(scores - order[:, :1]), 0)
    return shares / shares.sum(axis=1, keepdims=True), sure


def _expert(graph: Graph, node: Node, expert: int, x: np.ndarray) -> Bounded:
    """Return the output of an expert: g sigmoid(alpha g) (u + beta) between two products."""
    numbers, error = _linear(graph, node, (2, 3, 4), expert, (x, np.zeros_like(x)))
    gate, up = numbers[:, 0::2], numbers[:, 1::2]
    of_gate, of_up = error[:, 0::2], error[:, 1::2]
    limit = float(node.attributes.get("swiglu_limit", np.inf))
    gate, up = np.minimum(gate, limit), np.clip(up, -limit, limit)
    up = up + float(node.attributes["activation_beta"])
    with np.errstate(over="ignore"):
        unit = gate / (1 + np.exp(-float(node.attributes["activation_alpha"]) * gate))
    of_unit = SLOPE * of_gate + (SIGMOID + 4 * UNIT) * np.abs(gate)
    hidden = unit * up
    away = of_unit * (np.abs(up) + of_up) + np.abs(unit) * (of_up + 4 * UNIT * np.abs(up))
    return _linear(graph, node, (5, 6, 7), expert, (hidden, away))


def _linear(graph: Graph, node: Node, at: Tuple[int, int, int], expert: int, x: Bounded) -> Bounded:
    """Return x [M,K] times the weight of an expert, plus its bias; at: inputs of its constants."""
    codes, scales, bias = (node.inputs[index] if index < len(node.inputs) else "" for index in at)
    stored, scale = graph.numbers(codes)[expert], graph.numbers(scales)[expert]
    blocks, bits = scale.reshape(len(stored), -1), int(node.attributes["expert_weight_bits"])
    unsigned, points = split(stored, blocks, None, bits)
    weights = Blocks(unsigned, blocks, points, bits, x[0].shape[1])
    weight, magnitude = weights.columns(np.arange(x[0].shape[1]))
    added = graph.numbers(bias)[expert].astype(np.float64) if bias else np.zeros(len(stored))
    count = x[0].shape[1] + blocks.shape[1] + BESIDE
    error = x[1] @ np.abs(weight).T
    error += count * UNIT * (1 + count * UNIT) * (np.abs(x[0]) @ magnitude.T + np.abs(added))
    return x[0] @ weight.T + added, error
