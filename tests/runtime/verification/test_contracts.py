"""Kernels of ONNX Runtime keep the contracts that artefacts are compared with, and wrong kernels
do not.
"""

import functools
from typing import Any, Callable, Dict, Sequence

import numpy as np
import onnxruntime
import pytest
from onnx import helper, numpy_helper

from posenc_export.runtime.graphs import integer_products
from posenc_export.runtime.verification import contracts
from posenc_export.runtime.verification.contracts import Activations, Blocks

SHAPES = ((1, 33, 5), (2, 64, 1), (5, 200, 19), (4, 300, 24))  # M, K, N
SOFT = "session.set_denormal_as_zero"  # an option of all sessions of artefacts


def _activations(kind: str, shape: Sequence[int], seed: int) -> np.ndarray:
    """Return activations [M,K] of a kind."""
    draw = np.random.default_rng(seed)
    x = draw.standard_normal(shape)
    if kind == "outliers":
        x[:, draw.integers(0, shape[1], 2)] *= 100
    elif kind == "zeros":
        x[:, : shape[1] // 2], x[0] = 0, 0
    elif kind == "huge":
        x *= 1e30
    elif kind == "subnormal":
        x *= 10.0 ** draw.integers(-44, -30, shape)
    elif kind == "of all sizes":
        x *= 10.0 ** draw.integers(-44, 20, shape)
    elif kind == "at ties":
        x = np.rint(x * 40) + 0.5
        x[:, ::16] = 127
    return x.astype(np.float32)


KINDS = ("normal", "outliers", "zeros", "huge", "subnormal", "of all sizes", "at ties")


def _weights(shape: Sequence[int], bits: int, block: int, zeros: bool, seed: int = 0) -> Blocks:
    """Return random weights [N,K]."""
    draw, (outputs, inputs) = np.random.default_rng(seed), shape
    blocks = (outputs, -(-inputs // block))
    codes = draw.integers(0, 1 << bits, (*blocks, block)).astype(np.uint8)
    points = draw.integers(0, 1 << bits, blocks) if zeros else np.full(blocks, 1 << (bits - 1))
    scales = 0.05 * draw.standard_normal(blocks).astype(np.float32)
    return Blocks(codes, scales, points.astype(np.uint8), bits, inputs)


def _run(op: str, inputs: Dict[str, Any], constants: Dict[str, np.ndarray], **how: Any) -> Any:
    """Run an operator of com.microsoft with the options of artefacts."""
    node = helper.make_node(op, [*inputs, *constants], ["y"], domain="com.microsoft", **how)
    values = [
        helper.make_tensor_value_info(
            name, helper.np_dtype_to_tensor_dtype(array.dtype), array.shape
        )
        for name, array in inputs.items()
    ]
    graph = helper.make_graph(
        [node],
        "g",
        values,
        [helper.make_empty_tensor_value_info("y")],
        [numpy_helper.from_array(array, name) for name, array in constants.items()],
    )
    opsets = [helper.make_opsetid("", 21), helper.make_opsetid("com.microsoft", 1)]
    model = helper.make_model(graph, opset_imports=opsets, ir_version=10)
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = 1
    options.add_session_config_entry(SOFT, "1")
    integer_products.keep_exact(options, [op])
    content, provider = model.SerializeToString(), "CPUExecutionProvider"
    return onnxruntime.InferenceSession(content, options, [provider]).run(None, inputs)[0]


def _product(x: np.ndarray, weights: Blocks, level: int, zeros: bool = True) -> np.ndarray:
    """Return x W^T of MatMulNBits."""
    codes, points = weights.codes, weights.zeros
    if weights.bits == 4:
        points = np.pad(points, ((0, 0), (0, points.shape[1] % 2)))
        codes, points = (part[..., 0::2] | part[..., 1::2] << 4 for part in (codes, points))
    constants = {"codes": codes, "scales": weights.scales}
    product: np.ndarray = _run(
        "MatMulNBits",
        {"x": x},
        {**constants, "zeros": points} if zeros else constants,
        K=weights.inputs,
        N=len(weights.codes),
        bits=weights.bits,
        block_size=weights.block,
        accuracy_level=level,
    )
    return product


@functools.cache
def _rounds() -> bool:
    """Whether products round activations on this processor: with AVX2, but not with SSE4."""
    weights, x = _weights((24, 300), 4, 32, True), _activations("normal", (4, 300), 0)
    return bool(contracts.of_float(x, _product(x, weights, 4), weights).max() > 1)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("block", [16, 32, 64, 128])
@pytest.mark.parametrize("bits", [4, 8])
def test_products_that_round_activations_keep_their_contract(
    bits: int, block: int, kind: str
) -> None:
    for seed, (tokens, inputs, outputs) in enumerate(SHAPES):
        zeros = seed % 2 == 0
        weights = _weights((outputs, inputs), bits, block, zeros, seed)
        x = _activations(kind, (tokens, inputs), seed)
        contract = contracts.of_rounded if _rounds() else contracts.of_least
        assert contract(x, _product(x, weights, 4, zeros), weights).max() <= 1


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("bits", [4, 8])
def test_products_in_float32_keep_their_contract(bits: int, kind: str) -> None:
    for seed, (tokens, inputs, outputs) in enumerate(SHAPES):
        weights = _weights((outputs, inputs), bits, 32, True, seed)
        x = _activations(kind, (tokens, inputs), seed)
        assert contracts.of_float(x, _product(x, weights, 0), weights).max() <= 1


@pytest.mark.parametrize("bits", [4, 8])
def test_a_product_of_one_contract_does_not_keep_the_other(bits: int) -> None:
    weights, x = _weights((24, 300), bits, 32, True), _activations("normal", (4, 300), 0)
    assert contracts.of_rounded(x, _product(x, weights, 0), weights).min() > 5
    if not _rounds():
        pytest.skip("products round no activations on this processor")
    assert contracts.of_float(x, _product(x, weights, 4), weights).min() > 5


def _integers(rounded: Activations, weights: Blocks, add: Callable[..., Any]) -> np.ndarray:
    """Return x W^T of rounded activations, with sums [M,N,blocks] of products [M,N,blocks,block]
    of a function.
    """
    stored = np.arange(weights.codes.shape[1] * weights.block)
    codes = weights.columns(stored)[0] / np.repeat(weights.scales, weights.block, axis=1)
    codes = np.rint(codes).reshape(*weights.scales.shape, -1) + weights.zeros[..., None]
    sums = add(rounded.codes[:, None] * codes[None])
    of_zeros = rounded.codes.sum(axis=2)[:, None] * weights.zeros
    product: np.ndarray = (sums - of_zeros) * rounded.scales[:, None] * weights.scales
    return product.sum(axis=2).astype(np.float32)


def _saturated(products: np.ndarray) -> np.ndarray:
    """Add pairs of products with 16 bits, as vpmaddubsw does."""
    pairs = products[..., 0::2] + products[..., 1::2]
    total: np.ndarray = np.clip(pairs, -32768, 32767).sum(axis=3)
    return total


def _by_token(x: np.ndarray, weights: Blocks) -> np.ndarray:
    """Round activations with one scale per token."""
    scale = np.abs(x).max(axis=1, keepdims=True).astype(np.float64) / 127
    rounded = np.rint(x / scale) * scale
    product: np.ndarray = rounded @ weights.columns(np.arange(x.shape[1]))[0].T
    return product.astype(np.float32)


def _zero_point(x: np.ndarray, weights: Blocks) -> np.ndarray:
    points = weights.zeros.copy()
    points[3, 1] ^= 1
    return _product(x, _changed(weights, zeros=points), 4)


def _exchanged_scales(x: np.ndarray, weights: Blocks) -> np.ndarray:
    scales = weights.scales.copy()
    scales[3, :2] = scales[3, 1::-1]
    return _product(x, _changed(weights, scales=scales), 4)


def _zero_output(x: np.ndarray, weights: Blocks) -> np.ndarray:
    y = _product(x, weights, 4)
    y[:, 3] = 0
    return y


def _changed(weights: Blocks, **parts: Any) -> Blocks:
    names = ("codes", "scales", "zeros", "bits", "inputs")
    return Blocks(**{name: parts.get(name, getattr(weights, name)) for name in names})


FAULTS: Dict[str, Callable[[np.ndarray, Blocks], np.ndarray]] = {
    "a zero point off by one": _zero_point,
    "exchanged scales": _exchanged_scales,
    "an output of zeros": _zero_output,
    "activations rounded by token": _by_token,
}


@pytest.mark.parametrize("tokens", [1, 5])
@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("fault", FAULTS)
def test_a_wrong_product_exceeds_its_bound(fault: str, bits: int, tokens: int) -> None:
    for seed in range(4):
        weights = _weights((19, 300), bits, 32, True, seed)
        x = np.abs(_activations("normal", (tokens, 300), seed))
        assert contracts.of_rounded(x, FAULTS[fault](x, weights), weights).max() > 100


def test_sums_that_saturate_exceed_the_bound_of_sums_that_do_not() -> None:
    weights, x = _weights((19, 300), 8, 32, True), _activations("normal", (4, 300), 0)
    rounded = Activations.of(x, 32)
    exact = _integers(rounded, weights, lambda products: products.sum(axis=3))
    assert contracts.of_rounded(x, exact, weights).max() <= 1
    wrong = _integers(rounded, weights, _saturated)
    assert contracts.of_rounded(x, wrong, weights).min() > 1000


def test_either_code_of_a_tie_is_within_the_bound_and_no_other_code() -> None:
    weights, x = _weights((19, 64), 8, 32, True), np.ones((1, 64), np.float32)
    x[0, ::32], x[0, 5] = 127, 2.5
    weight = weights.columns(np.arange(64))[0]
    for code, keeps in ((1, False), (2, True), (3, True), (4, False)):
        x[0, 5] = code
        y = (x @ weight.T).astype(np.float32)
        x[0, 5] = 2.5
        assert (contracts.of_rounded(x, y, weights).max() <= 1) == keeps


@pytest.mark.parametrize("kind", ["normal", "outliers", "zeros"])
def test_products_of_integers_keep_their_contract(kind: str) -> None:
    for seed, (tokens, inputs, outputs) in enumerate(SHAPES):
        x = np.clip(np.rint(40 * _activations(kind, (tokens, inputs), seed)), -128, 127)
        draw = np.random.default_rng(seed)
        weight = draw.integers(-128, 128, (inputs, outputs)).astype(np.int8)
        scales = draw.standard_normal(outputs).astype(np.float32)
        constants = {"w": weight, "a": np.float32([1]), "s": scales, "z": np.uint8([128])}
        y = _run("MatMulIntegerToFloat", {"x": (x + 128).astype(np.uint8)}, constants)
        assert contracts.of_integers(x, y, weight, scales).max() <= 1


def test_a_product_of_integers_with_a_wrong_sum_exceeds_its_bound() -> None:
    draw = np.random.default_rng(0)
    x, weight = draw.integers(-128, 128, (4, 300)), draw.integers(-128, 128, (300, 19))
    scales = draw.standard_normal(19).astype(np.float32)
    y = ((x @ weight + 1) * scales).astype(np.float32)
    assert contracts.of_integers(x, y, weight.astype(np.int8), scales).min() > 1


def test_codes_of_activations_may_differ_at_ties_only() -> None:
    x, scale = np.float32([[2.5, 0.4, 127, -3.5]]), np.float32([[1]])
    for codes in ([2, 0, 127, -4], [3, 0, 127, -3]):
        assert contracts.of_codes(x, np.array([codes]), scale).max() == 0
    for codes in ([2, 1, 127, -4], [1, 0, 127, -4], [2, 0, 126, -4]):
        assert contracts.of_codes(x, np.array([codes]), scale).max() > 1


def test_a_sum_in_float16_exceeds_the_bound_of_a_sum_in_float32() -> None:
    draw = np.random.default_rng(0)
    x, weight = (draw.standard_normal(shape).astype(np.float16) for shape in ((4, 300), (300, 19)))
    right = (x.astype(np.float32) @ weight.astype(np.float32)).astype(np.float16)
    assert contracts.of_half(x, right, weight, contracts.UNIT).max() <= 1
    wrong = np.zeros((4, 19), np.float16)
    for index in range(300):
        wrong += x[:, index, None] * weight[index]
    assert contracts.of_half(x, wrong, weight, contracts.UNIT).min() > 1
    assert contracts.of_half(x, wrong, weight, contracts.HALF_UNIT).max() <= 1


def test_dequantized_rows_are_rounded_once() -> None:
    rows = np.arange(1, 9) * np.float64(np.float32(0.1)) * 3
    y = rows.astype(np.float32)[None]
    assert contracts.of_rows(y, rows[None]).max() <= 1
    assert contracts.of_rows(np.nextafter(y, np.float32(9)), rows[None]).max() > 1


@pytest.mark.parametrize("wrong", [np.nan, np.inf])
def test_an_output_that_is_not_finite_exceeds_its_bound(wrong: float) -> None:
    weights, x = _weights((19, 64), 4, 32, True), _activations("normal", (2, 64), 0)
    y = _product(x, weights, 4)
    y[1, 2] = wrong
    assert contracts.of_rounded(x, y, weights).tolist()[1] == np.inf
