"""The contract of QMoE with activations in float32: the chosen experts, gated and summed.

Contract: ONNX Runtime's docs/ContribOperators.md. M tokens, K inputs, H hidden channels.
"""

from typing import Any, List, Mapping, Tuple

import numpy as np

from posenc_export.runtime.graphs.onnx_nodes import Node
from posenc_export.runtime.verification.conformance.attention import UNIT
from posenc_export.runtime.verification.conformance.operators import (
    BESIDE,
    Case,
    Values,
    activations,
    by_call,
    in_blocks,
    over,
)
from posenc_export.runtime.verification.conformance.trial import Feeds, Kernel, Outputs

# Absolute error of a sigmoid, which kernels approximate and limit near 0 and 1; and the largest
# slope of z sigmoid(z).
SIGMOID, SLOPE = 2.0**-21, 1.1
OF_SHARE = 24  # roundings of the weight of an expert, and of the sum of few experts

Bounded = Tuple[np.ndarray, np.ndarray]  # numbers in float64, and bounds of their errors


def chosen_experts(kernel: Kernel, node: Node, values: Values) -> Case:
    """QMoE."""
    random, known = np.random.default_rng(1), node.attributes
    stored = [values[name] if name else np.zeros(()) for name in (*node.inputs[2:], "", "")][:6]
    count, inputs = stored[3].shape[:2]
    x = activations(random, inputs, inputs, np.float16).astype(np.float32)
    scores = random.standard_normal((len(x), count), np.float32)

    def ratio(feeds: Feeds, found: Outputs) -> float:
        x, scores = (feeds[name].astype(np.float64) for name in node.inputs[:2])
        chosen = scores >= np.sort(scores, axis=1)[:, -known["k"], None]
        shares = np.where(chosen, np.exp(scores), 0)
        shares /= shares.sum(axis=1, keepdims=True)
        value, error = np.zeros(x.shape), np.zeros(x.shape)
        for expert in range(count):
            parts = [part[expert] if part.ndim else part for part in stored]
            numbers, away = _expert(known, parts, x)
            value += shares[:, expert, None] * numbers
            error += shares[:, expert, None] * (away + OF_SHARE * UNIT * (np.abs(numbers) + away))
        return over(found[0], value, error / UNIT, 1)

    calls = [dict(zip(node.inputs[:2], parts, strict=True)) for parts in by_call(x, scores)]
    return Case(calls, ratio)


def _expert(known: Mapping[str, Any], parts: List[np.ndarray], x: np.ndarray) -> Bounded:
    """Return the output of an expert: g sigmoid(alpha g) (u + beta) between two products."""
    numbers, error = _linear(known, parts[:3], (x, np.zeros_like(x)))
    gate, up = numbers[:, 0::2], numbers[:, 1::2]
    of_gate, of_up = error[:, 0::2], error[:, 1::2]
    limit = float(known.get("swiglu_limit", np.inf))
    gate, up = np.minimum(gate, limit), np.clip(up, -limit, limit)
    up = up + float(known["activation_beta"])
    with np.errstate(over="ignore"):
        unit = gate / (1 + np.exp(-float(known["activation_alpha"]) * gate))
    of_unit = SLOPE * of_gate + (SIGMOID + 4 * UNIT) * np.abs(gate)
    hidden = unit * up
    away = of_unit * (np.abs(up) + of_up) + np.abs(unit) * (of_up + 4 * UNIT * np.abs(up))
    return _linear(known, parts[3:], (hidden, away))


def _linear(known: Mapping[str, Any], parts: List[np.ndarray], x: Bounded) -> Bounded:
    """Return x [M,K] times the weight of an expert, plus its bias."""
    codes, scales, bias = parts
    blocks, inputs = scales.reshape(len(codes), -1), x[0].shape[1]
    w, sizes = in_blocks(codes, blocks, None, known["expert_weight_bits"], inputs)
    count = inputs + blocks.shape[1] + BESIDE
    error = x[1] @ np.abs(w).T
    error += count * UNIT * (1 + count * UNIT) * (np.abs(x[0]) @ sizes.T + np.abs(bias))
    return x[0] @ w.T + bias, error
