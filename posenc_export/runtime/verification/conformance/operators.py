"""Contracts of operators: what their documentation says, in float64, and bounds of the rounding.

Contracts: ONNX Runtime's docs/ContribOperators.md, and the operators of ONNX. Bounds: Higham,
Accuracy and Stability of Numerical Algorithms, section 3.1: a sum of products in which no product
passes through more than m roundings is off by at most m u / (1 - m u) times the sum of the
magnitudes of the products, in whatever order it is computed.

Shapes: M tokens, K inputs, N outputs, B rows, P cached and S new tokens,
H hidden channels of an expert.
"""

import platform
from typing import Any, Callable, Mapping, NamedTuple, Sequence

import numpy as np

from posenc_export.runtime.graphs import kernel_library
from posenc_export.runtime.graphs.onnx_nodes import Node
from posenc_export.runtime.verification import constants
from posenc_export.runtime.verification.conformance.attention import (
    INPUTS,
    ROTATED,
    by_query_head,
    cached_attention,
    rotated,
    softmax,
    tolerance,
)
from posenc_export.runtime.verification.conformance.trial import (
    UNIT,
    Case,
    Feeds,
    Kernel,
    Outputs,
    Values,
    uniform,
)

HALF_UNIT = 2.0**-11  # unit roundoff of float16
# Processors of ARM may add products of float16 in float16.
SUMS_OF_HALF = HALF_UNIT if platform.machine().lower() in ("arm64", "aarch64") else UNIT
# Scales of a block below 2^-126 are flushed to 0, and with them a sum below 2^24, of at most 2^12
# blocks.
UNDERFLOW = 2.0**-90
# Roundings that a product of a block passes through beside the sum over blocks: 2 of the scale of
# activations (amax / 127, or as the reciprocal of 127 / amax), 1 of its product with the scale of
# weights or with the sum of codes, 1 of the zero point times its scale, 1 of the product of the
# integer sum with these, 5 of sums over at most 32 partial sums of a register or of several, 1 of
# the parts with codes and with zero points, and 1 of a bias.
BESIDE = 12
LEAST = 4  # accuracy_level of products that may round activations to 8 bits
# Block of activations of a product whose weight has one scale per output
# (session.qdq_matmulnbits_block_size).
BLOCK = 32
# Absolute error of a sigmoid, which kernels approximate and limit near 0 and 1; and the largest
# slope of z sigmoid(z).
SIGMOID, SLOPE = 2.0**-21, 1.1
OF_SHARE = 24  # roundings of the weight of an expert, and of the sum of few experts
TOKENS = (1, 1, 1, 1, 1, 2, 5, 17)  # of calls: kernels compute several at a time, then the rest
# B, P and S of calls.
SIZES = ((1, 0, 1), (2, 0, 5), (1, 1, 1), (3, 7, 1), (2, 30, 2), (1, 62, 3), (1, 0, 65),
         (2, 255, 1), (1, 512, 17))  # fmt: skip
HIDDEN = float(np.finfo(np.float32).min)
CACHED = ("GroupQueryAttention", kernel_library.OPERATOR)
Bounded = tuple[np.ndarray, np.ndarray]  # numbers in float64, and bounds of their errors


def over(
    y: np.ndarray, value: np.ndarray, size: np.ndarray, count: int, unit: float = UNIT
) -> float:
    """Return the largest error over its bound of numbers that passed through `count` roundings in
    sums of magnitudes `size`; infinity for NaN. Numbers in float16 were rounded once more.
    """
    bound = size * (count * unit / (1 - min(count * unit, 0.5))) + UNDERFLOW
    if y.dtype == np.float16:
        bound = bound + (np.abs(value) + bound) * HALF_UNIT + 2.0**-25
    with np.errstate(invalid="ignore"):
        return float(np.nan_to_num(np.abs(y - value) / bound, nan=np.inf, posinf=np.inf).max())


def activations(random: np.random.Generator, inputs: int, block: int, dtype: Any) -> np.ndarray:
    """Return activations [M,K] of all calls. In codes of 8 bits for each block, they are by turns
    of all sizes, small but for one, zeros, and the largest; scales, too, are of all sizes. No
    quotient is near a tie.
    """
    shape = sum(TOKENS), -(-inputs // block), block
    codes = random.integers(-127, 128, shape)
    codes[1::5] //= 60
    codes[3::5] = codes[..., 0] = 127
    codes[2::5] = 0
    near = (codes + random.uniform(-0.4, 0.4, shape) * (codes != 0)).clip(-127, 127)
    near[..., 0] = codes[..., 0]
    scales = 10 ** random.uniform(-3, -1, (*shape[:2], 1))
    if dtype == np.float32:
        scales[4::5] = 10.0 ** random.integers(-20, 16, scales[4::5].shape)
    return np.asarray((scales * near).reshape(shape[0], -1)[:, :inputs].astype(dtype))


def in_8_bits(x: np.ndarray, block: int) -> np.ndarray:
    """Return activations [...,K] that are rounded to multiples of amax / 127 in each block."""
    parts = np.pad(x, [(0, 0)] * (x.ndim - 1) + [(0, -x.shape[-1] % block)])
    parts = parts.reshape(*x.shape[:-1], -1, block)
    scales = np.abs(parts).max(-1, keepdims=True) / 127
    codes = np.rint(parts / np.where(scales == 0, 1, scales))
    return np.asarray((codes * scales).reshape(*x.shape[:-1], -1)[..., : x.shape[-1]])


def by_call(*arrays: np.ndarray) -> Sequence[tuple[np.ndarray, ...]]:
    """Return arrays [M,...] of each call."""
    ends = np.cumsum(TOKENS)[:-1]
    return list(zip(*(np.split(array, ends) for array in arrays), strict=True))


def _product(
    kernel: Kernel, w: np.ndarray, sizes: np.ndarray, block: int, level: int, dtype: Any
) -> Case:
    """Calls of x W^T, W [N,K]. At level LEAST, activations are rounded, or not if this processor
    has no kernel for blocks of this size: then, and at other levels, an output passes through an
    addition for each input, too.

    Args:
        sizes: bounds [N,K] of the numbers that kernels sum.
        block: of a scale; 0 for weights without scales.
    """
    count = -(-w.shape[1] // block) + BESIDE if block else 2
    x = activations(np.random.default_rng(1), w.shape[1], block or BLOCK, dtype)
    unit = SUMS_OF_HALF if dtype == np.float16 else UNIT

    def ratio(feeds: Feeds, found: Outputs) -> float:
        exact = feeds[kernel.nodes[-1].inputs[0]].astype(np.float64)
        sums = [(exact, w.shape[1] + count)]
        sums += [(in_8_bits(exact, block), count)] if level == LEAST else []
        return min(over(found[0], x @ w.T, np.abs(x) @ sizes.T, n, unit) for x, n in sums)

    return Case([{kernel.nodes[-1].inputs[0]: part[None]} for (part,) in by_call(x)], ratio)


def in_blocks(
    codes: np.ndarray, scales: np.ndarray, zeros: np.ndarray | None, bits: int, inputs: int
) -> tuple[np.ndarray, np.ndarray]:
    """Return weights (code - zero) * scale [N,K], and bounds of the numbers that kernels sum: codes
    and zero points, which may be summed apart, may both be moved by up to half the number of codes.
    """
    w = constants.of_blocks(codes, scales, zeros, bits, inputs, "float64")
    each = np.abs(scales.astype(np.float64)) * (2 << bits)
    return w, np.repeat(each, codes.shape[-1] * 8 // bits, -1)[..., :inputs]


def _by_block(kernel: Kernel, node: Node, values: Values) -> Case:
    """MatMulNBits."""
    codes, scales, *others = (values[name] for name in node.inputs[1:])
    known = node.attributes
    parts = in_blocks(codes, scales, others[0] if others else None, known["bits"], known["K"])
    level = known.get("accuracy_level", 0)
    return _product(kernel, *parts, known["block_size"], level, scales.dtype)


def _multiplied(kernel: Kernel, node: Node, values: Values) -> Case:
    """MatMul with weights [K,N] in float16, or of DequantizeLinear."""
    w, before = values[node.inputs[1]].astype(np.float64).T, kernel.nodes[-2:-1]
    if not before or before[0].operator != "DequantizeLinear":
        return _product(kernel, w, np.abs(w), 0, 0, np.float16)
    maker, stored = before[0].node, {value.name: value for value in kernel.constants}
    bits, scales = int(stored[maker.inputs[0]].element[3:]), np.abs(values[maker.inputs[1]])
    whole = np.full(w.T.shape, 2 << bits, np.int16)
    known = maker.attributes
    sizes = constants.dequantized(whole, scales, None, known["axis"], known.get("block_size", 0))
    level = dict(kernel.sizes)["accuracy_level"]
    return _product(kernel, w, sizes.T, known.get("block_size", 0) or BLOCK, level, np.float32)


def _of_integers(kernel: Kernel, node: Node, values: Values) -> Case:
    """MatMulIntegerToFloat of codes with a scale for each token, and the QuantizeLinear before it.
    Sums of integers are exact; they pass through at most 4 roundings.
    """
    names = kernel.nodes[0].inputs
    weight, factor, scales, point = (values[n].astype(np.float64) for n in node.inputs[1:])
    x = activations(np.random.default_rng(1), len(weight), len(weight), np.float32)
    of_token = np.abs(x).max(1, keepdims=True) / np.float32(127)
    of_token[of_token == 0] = 1
    of_token[3::5] /= 2  # numbers beyond the largest code
    points = np.full(of_token.shape, point, np.uint8)
    calls = [dict(zip(names, parts, strict=True)) for parts in by_call(x, of_token, points)]

    def ratio(feeds: Feeds, found: Outputs) -> float:
        x, of_token, _ = (feeds[name].astype(np.float64) for name in names)
        exact = np.rint(x / of_token).clip(-128, 127) @ (weight * scales * factor)
        return over(found[0], exact, np.abs(exact), 4)

    return Case(calls, ratio)


def _rows(count: int, ids: str, exact: Callable[[np.ndarray], np.ndarray]) -> Case:
    """Calls that read rows of a table of `count`, which are rounded once."""
    others = np.random.default_rng(1).integers(0, count, (2, 7))
    at = (np.array([[0]]), np.array([[count - 1]]), others)

    def ratio(feeds: Feeds, found: Outputs) -> float:
        value = exact(feeds[ids]).reshape(found[0].shape)
        return over(found[0], value, np.abs(value), 1)

    return Case([{ids: part} for part in at], ratio)


def _gathered(kernel: Kernel, node: Node, values: Values) -> Case:
    """GatherBlockQuantized."""
    codes, scales, *zeros = (values[name] for name in (node.inputs[0], *node.inputs[2:]))
    bits = node.attributes["bits"]
    inputs = codes.shape[-1] * 8 // bits
    rows, _ = in_blocks(codes, scales, zeros[0] if zeros else None, bits, inputs)
    return _rows(len(codes), node.inputs[1], lambda at: rows[at])


def _dequantized_rows(kernel: Kernel, node: Node, values: Values) -> Case:
    """DequantizeLinear of codes, scales and zero points that Gather reads from tables."""
    codes, scales, *zeros = (values[step.inputs[0]] for step in kernel.nodes[:-1])
    parts = (codes, scales, zeros[0] if zeros else None)
    rows = constants.dequantized(*parts, 1, node.attributes["block_size"], "float64")
    return _rows(len(codes), kernel.nodes[0].inputs[1], lambda at: rows[at])


def by_head(x: np.ndarray, heads: int) -> np.ndarray:
    """Return numbers [B,S,H*D] or [B,H,S,D] by head [B,H,S,D] float64."""
    flat = x.astype(np.float64)
    return flat if x.ndim == 4 else flat.reshape(*x.shape[:2], heads, -1).transpose(0, 2, 1, 3)


def _attention(kernel: Kernel, node: Node, values: Values) -> Case:
    """Attention with a mask, over keys and values, or cached ones before new ones."""
    random, sizes, known = np.random.default_rng(0), dict(kernel.sizes), node.attributes
    heads, kv_heads, free = sizes["heads"], sizes["kv_heads"], dict(kernel.free)
    roles = dict(zip(("q", "k", "v", "mask", "past_k", "past_v"), node.inputs, strict=False))
    scale, softcap = float(known.get("scale", sizes["size"] ** -0.5)), known.get("softcap", 0.0)

    def feeds(rows: int, past: int, new: int) -> Feeds:
        drawn: Feeds = {}
        kinds = (("q", heads, "size"), ("k", kv_heads, "size"), ("v", kv_heads, "value_size"))
        for name, count, size in kinds:
            tokens = new if "past_k" in roles or name == "q" else past + new
            x = uniform(random, (rows, count, tokens, sizes[size]))
            flat = x.transpose(0, 2, 1, 3).reshape(rows, tokens, -1)
            drawn[name] = flat if "q_num_heads" in known else x
            drawn[f"past_{name}"] = uniform(random, (rows, count, past, sizes[size]))
        seen = random.random((rows, 1, new, past + new)) < 0.7
        seen[..., 0] = True
        biases = random.standard_normal(seen.shape, np.float32)
        boolean = free.get(roles.get("mask", "")) == "bool"
        drawn["mask"] = seen if boolean else np.where(seen, biases, np.float32(HIDDEN))
        return {name: drawn[role] for role, name in roles.items() if name}

    def ratio(feeds: Feeds, found: Outputs) -> float:
        given = {role: feeds[name] for role, name in roles.items() if name}
        q, k, v = (
            by_head(given[n], h) for n, h in zip("qkv", (heads, kv_heads, kv_heads), strict=True)
        )
        if "past_k" in given:
            k, v = (np.concatenate((given[f"past_{n}"], x), 2) for n, x in (("k", k), ("v", v)))
            if not (np.array_equal(found[1], k) and np.array_equal(found[2], v)):
                return np.inf
        errors = []
        for row, y in enumerate(by_head(found[0], heads)):
            mask = given["mask"][row] if "mask" in given else np.ones((1, 1), bool)
            biases, seen = ([], mask) if mask.dtype == bool else ([mask], np.ones((1, 1), bool))
            keys, numbers = (by_query_head(part[row], heads) for part in (k, v))
            scores = scale * (q[row] @ keys.transpose(0, 2, 1))
            exact = softmax(scores, seen, biases, softcap) @ numbers
            errors.append(np.abs(y - exact).max())
        return float(np.max(errors) / tolerance(scale, sizes["size"]))

    return Case([feeds(*size) for size in SIZES], ratio)


def _rotary(kernel: Kernel, node: Node, values: Values) -> Case:
    """RotaryEmbedding by tables, of which positions may choose the rows."""
    random, sizes = np.random.default_rng(0), dict(kernel.sizes)
    heads, packed = sizes["heads"], "num_heads" in node.attributes
    interleaved = bool(node.attributes.get("interleaved", 0))
    calls: list[Feeds] = []
    for rows, past, new in SIZES:
        x = uniform(random, (rows, heads, new, sizes["size"]))
        x = x.transpose(0, 2, 1, 3).reshape(rows, new, -1) if packed else x
        positions = random.integers(0, past + new + 1, (rows, new))
        positions[0, -1] = past + new
        shape = (past + new + 1,) if len(node.inputs) > 3 else (rows, new)
        angles = random.uniform(0, 6, (*shape, sizes["pairs"]))
        tables = (np.cos(angles).astype(np.float32), np.sin(angles).astype(np.float32))
        arrays: list[np.ndarray] = [x, *tables, positions]
        calls.append(dict(zip(node.inputs, arrays, strict=False)))

    def ratio(feeds: Feeds, found: Outputs) -> float:
        x, cos, sin, *chosen = (feeds[name] for name in node.inputs)
        cos, sin = (part[chosen[0]] if chosen else part for part in (cos, sin))  # [B,S,pairs]
        exact = rotated(by_head(x, heads), cos[:, None], sin[:, None], interleaved)
        return float(np.abs(by_head(found[0], heads) - exact).max() / ROTATED)

    return Case(calls, ratio)


def _scattered(kernel: Kernel, node: Node, values: Values) -> Case:
    """TensorScatter: writes S tokens along an axis, from a slot of each row on."""
    random, rank = np.random.default_rng(0), dict(kernel.sizes)["rank"]
    axis = int(node.attributes.get("axis", -2)) % rank
    calls: list[Feeds] = []
    element = dict(kernel.free)[node.inputs[0]]
    dtype = {"float": "float32"}.get(element, element)
    for rows, past, new in SIZES:
        shapes = [[rows, *[3] * (rank - 1)] for _ in range(2)]
        shapes[0][axis], shapes[1][axis] = past + new, new
        memory, update = ((100 * uniform(random, shape)).astype(dtype) for shape in shapes)
        at = random.integers(0, past + 1, rows)
        at[0] = past
        calls.append(dict(zip(node.inputs, (memory, update, at), strict=True)))

    def ratio(feeds: Feeds, found: Outputs) -> float:
        memory, update, at = (feeds[name].copy() for name in node.inputs)
        for row, first in enumerate(at):
            slots = np.moveaxis(memory[row], axis - 1, 0)
            slots[first : first + update.shape[axis]] = np.moveaxis(update[row], axis - 1, 0)
        return 0.0 if np.array_equal(found[0], memory) else np.inf

    return Case(calls, ratio)


def _summed(kernel: Kernel, node: Node, values: Values) -> Case:
    """CumSum or ReduceSum of integers [B,S]."""
    random, known, x = np.random.default_rng(0), node.attributes, node.inputs[0]
    axis = int(values[node.inputs[1]].reshape(-1)[0])

    def ratio(feeds: Feeds, found: Outputs) -> float:
        numbers = feeds[x]
        if node.operator == "ReduceSum":
            exact = numbers.sum(axis, keepdims=bool(known.get("keepdims", 1)))
        else:
            numbers = np.flip(numbers, axis) if known.get("reverse") else numbers
            exact = numbers.cumsum(axis) - (numbers if known.get("exclusive") else 0)
            exact = np.flip(exact, axis) if known.get("reverse") else exact
        return 0.0 if np.array_equal(found[0], exact) else np.inf

    return Case([{x: random.integers(-2, 1 << 40, size[::2])} for size in SIZES], ratio)


def _chosen_experts(kernel: Kernel, node: Node, values: Values) -> Case:
    """QMoE with activations in float32: the chosen experts, gated and summed."""
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


def _expert(known: Mapping[str, Any], parts: list[np.ndarray], x: np.ndarray) -> Bounded:
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


def _linear(known: Mapping[str, Any], parts: list[np.ndarray], x: Bounded) -> Bounded:
    """Return x [M,K] times the weight of an expert, plus its bias."""
    codes, scales, bias = parts
    blocks, inputs = scales.reshape(len(codes), -1), x[0].shape[1]
    w, sizes = in_blocks(codes, blocks, None, known["expert_weight_bits"], inputs)
    count = inputs + blocks.shape[1] + BESIDE
    error = x[1] @ np.abs(w).T
    error += count * UNIT * (1 + count * UNIT) * (np.abs(x[0]) @ sizes.T + np.abs(bias))
    return x[0] @ w.T + bias, error


class Contract(NamedTuple):
    """What is known of an operator.

    Args:
        case: returns calls of a kernel.
        attributes: that the contract knows.
        inputs: number of inputs that it knows.
        computed: number of inputs that are no constants, of products and rows; -1 for any.
    """

    case: Callable[[Kernel, Node, Values], Case]
    attributes: str
    inputs: int
    computed: int = -1


ROUTED = "k activation_type swiglu_fusion activation_alpha activation_beta swiglu_limit"
FUSED = "num_heads kv_num_heads scale softcap local_window_size chunk_size do_rotary key_row_scale"
FUSED += " rotary_interleaved k_quant_type v_quant_type kv_cache_bit_width qk_output"
BLOCKS = "bits block_size"
CONTRACTS: Mapping[str, Contract] = {
    "MatMulNBits": Contract(_by_block, f"K N {BLOCKS} accuracy_level", 4, 1),
    "MatMul": Contract(_multiplied, "", 2, 1),
    "MatMulIntegerToFloat": Contract(_of_integers, "", 5, 3),
    "GatherBlockQuantized": Contract(_gathered, f"{BLOCKS} gather_axis quantize_axis", 4, 1),
    "DequantizeLinear": Contract(_dequantized_rows, "axis block_size", 3, 1),
    "QMoE": Contract(
        _chosen_experts, f"{ROUTED} expert_weight_bits block_size accuracy_level", 8, 2
    ),
    **dict.fromkeys(CACHED, Contract(cached_attention, FUSED, len(INPUTS))),
    "Attention": Contract(_attention, "scale softcap q_num_heads kv_num_heads", 6),
    "RotaryEmbedding": Contract(_rotary, "interleaved num_heads rotary_embedding_dim", 4),
    "TensorScatter": Contract(_scattered, "axis mode", 3),
    "CumSum": Contract(_summed, "exclusive reverse", 2),
    "ReduceSum": Contract(_summed, "keepdims noop_with_empty_axes", 2),
}
