"""The operator MatMulNBits of the library against products in float64, and against itself in other
divisions of the same work.
"""

import os
import re
import subprocess
import sys
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

from posenc_export.runtime.graphs import kernel_library, onnx_files
from posenc_export.runtime.graphs.kernel_library import DOMAIN, PRODUCT
from posenc_export.runtime.verification.constants import of_blocks
from tests.kernels.calls import built, session
from tests.kernels.test_instructions import SETS, skip_without

pytestmark = built
ROWS = (1, 2, 3, 7, 8, 9, 70)  # kernels compute 8 rows together, then 4, 2 and 1; a task has 64
SIZES = [
    (inputs, outputs, bits, block, zeros)
    for inputs, outputs in ((32, 1), (64, 16), (100, 33), (576, 70))
    for bits in (4, 8)
    for block in (32, 128)
    for zeros in (False, True)
]
SIZES += [(inputs, 33, bits, inputs, False) for inputs in (576, 11008) for bits in (4, 8)]
Weights = tuple[np.ndarray, np.ndarray, np.ndarray | None]


def weights(inputs: int, outputs: int, bits: int, block: int, zeros: bool) -> Weights:
    """Return codes [N,blocks,bytes], scales [N,blocks] and packed zero points or None."""
    random, blocks = np.random.default_rng(0), -(-inputs // block)
    codes = random.integers(0, 256, (outputs, blocks, block * bits // 8), dtype=np.uint8)
    scales = random.uniform(0.01, 0.1, (outputs, blocks)).astype(np.float32)
    points = random.integers(0, 256, (outputs, -(-blocks * bits // 8)), dtype=np.uint8)
    return codes, scales, points if zeros else None


def model(parts: Weights, inputs: int, bits: int, block: int, fed: str = "", **changed: int) -> Any:
    """Return a session of one node. fed: an input that is no constant. changed: attributes."""
    named = dict(zip(("codes", "scales", "zeros"), parts, strict=True))
    stored = {name: array for name, array in named.items() if array is not None}
    sizes = {"K": inputs, "N": len(parts[0]), "bits": bits, "block_size": block, **changed}
    node = helper.make_node(
        PRODUCT, ["x", *stored], ["y"], domain=DOMAIN, accuracy_level=4, **sizes
    )
    free = {"x": TensorProto.FLOAT, **({fed: TensorProto.UINT8} if fed else {})}
    graph = helper.make_graph(
        [node],
        "call",
        [helper.make_tensor_value_info(name, kind, None) for name, kind in free.items()],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, None)],
        [numpy_helper.from_array(array, name) for name, array in stored.items() if name != fed],
    )
    opsets = [helper.make_opsetid("", 21), helper.make_opsetid(DOMAIN, 1)]
    whole = onnx.ModelProto(ir_version=10, graph=graph, opset_import=opsets)
    return whole.SerializeToString(deterministic=True)


def codes_of(rows: int, inputs: int, block: int) -> np.ndarray:
    """Return activations [M,K] that 8 bits represent exactly: 127 and other whole numbers, times a
    power of two for each block.
    """
    random, blocks = np.random.default_rng(rows), -(-inputs // block)
    whole = random.integers(-127, 128, (rows, blocks, block)).astype(np.float32)
    whole[..., 0] = 127
    scales = np.exp2(random.integers(-8, 8, (rows, blocks, 1)))
    x: np.ndarray = (whole * scales).reshape(rows, -1)[:, :inputs].astype(np.float32)
    return x


def check(inputs: int, outputs: int, bits: int, block: int, zeros: bool) -> None:
    """Compare products of several numbers of rows with float64."""
    parts = weights(inputs, outputs, bits, block, zeros)
    exact = of_blocks(*parts, bits, inputs, "float64")
    for rows in ROWS:
        x = codes_of(rows, inputs, block)
        (y,) = session(model(parts, inputs, bits, block)).run(None, {"x": x})
        bound = np.abs(x).astype(np.float64) @ np.abs(exact).T
        assert (np.abs(y - x.astype(np.float64) @ exact.T) <= 1e-6 * bound).all(), (rows, inputs)


@pytest.mark.parametrize(("inputs", "outputs", "bits", "block", "zeros"), SIZES)
def test_a_product_of_whole_numbers_agrees_with_float64(
    inputs: int, outputs: int, bits: int, block: int, zeros: bool
) -> None:
    check(inputs, outputs, bits, block, zeros)


@pytest.mark.parametrize("instructions", SETS)
def test_products_of_each_instruction_set_agree_with_float64(instructions: str) -> None:
    skip_without(instructions, kernel_library.path())
    code = "from tests.kernels.test_products import SIZES, check; [check(*size) for size in SIZES]"
    environment = {**os.environ, "POSENC_INSTRUCTIONS": instructions}
    subprocess.run([sys.executable, "-c", code], env=environment, check=True)


@pytest.mark.parametrize("bits", [4, 8])
def test_a_row_has_the_same_bits_alone_among_others_and_on_any_number_of_threads(bits: int) -> None:
    content = model(weights(576, 70, bits, 32, True), 576, bits, 32)
    x = np.random.default_rng(1).standard_normal((3, 67, 576)).astype(np.float32)
    (together,) = session(content, threads=4).run(None, {"x": x})
    alone = [session(content).run(None, {"x": row})[0] for row in x.reshape(-1, 576)]
    assert np.array_equal(together.reshape(-1, 70), np.stack(alone))


def test_activations_are_rounded_to_127_steps_of_the_largest_of_a_block() -> None:
    parts = weights(96, 8, 4, 32, False)
    x = np.random.default_rng(2).standard_normal((5, 96)).astype(np.float32)
    (y,) = session(model(parts, 96, 4, 32)).run(None, {"x": x})
    steps = np.abs(x.reshape(5, 3, 32)).max(-1, keepdims=True).astype(np.float64) / 127
    rounded = (np.rint(x.reshape(5, 3, 32) / steps) * steps).reshape(5, 96)
    exact = of_blocks(*parts, 4, 96, "float64")
    np.testing.assert_allclose(y, rounded @ exact.T, atol=2e-5 * np.abs(exact).sum(1).max())
    assert not np.allclose(y, x @ exact.T, atol=1e-4)


def test_zeros_give_zeros_and_a_row_that_is_not_finite_changes_no_other() -> None:
    content = model(weights(64, 33, 4, 32, True), 64, 4, 32)
    x = codes_of(4, 64, 32)
    x[1] = 0
    (before,) = session(content).run(None, {"x": x})
    x[2, 40], x[3, 1] = np.nan, np.inf
    (y,) = session(content).run(None, {"x": x})
    assert not y[1].any() and np.array_equal(y[:2], before[:2])
    assert np.isnan(y[2]).all() and not np.isfinite(y[3]).any()


BLOCK = "block_size to be a multiple of 32 up to 256, or K up to 65536, got"
FAULTS: dict[str, tuple[dict[str, Any], str]] = {
    "codes that are fed": ({"fed": "codes"}, "B that is a constant of the graph"),
    "2 bits": ({"bits": 2}, "bits 4 or 8, got 2"),
    "blocks of 16": ({"block_size": 16}, f"{BLOCK} 16"),
    "large blocks": ({"block_size": 512}, f"{BLOCK} 512"),
    "no inputs": ({"K": 0}, "K and N from 1 to 2^31"),
    "negative outputs": ({"N": -1}, "K and N from 1 to 2^31"),
    "more outputs": ({"N": 2**31}, "B [N,blocks,bytes of a block]"),
    "more inputs": ({"K": 4096}, "B [N,blocks,bytes of a block]"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_graph_that_breaks_a_rule_is_refused_when_it_is_loaded(fault: str) -> None:
    changed, said = FAULTS[fault]
    content = model(weights(64, 16, 4, 32, True), 64, changed.pop("bits", 4), 32, **changed)
    with pytest.raises(onnx_files.load_errors(), match=re.escape(f"MatMulNBits: expected {said}")):
        session(content)


def test_zero_points_of_large_blocks_are_refused() -> None:
    with pytest.raises(onnx_files.load_errors(), match="no zero_points of blocks above 256"):
        session(model(weights(288, 16, 8, 288, True), 288, 8, 288))


def test_activations_of_another_width_are_refused_when_the_graph_runs() -> None:
    content = model(weights(64, 16, 4, 32, True), 64, 4, 32)
    with pytest.raises(Exception, match=r"MatMulNBits: expected A \[\.\.\.,64\]"):
        session(content).run(None, {"x": np.ones((2, 96), np.float32)})
    (empty,) = session(content).run(None, {"x": np.ones((0, 3, 64), np.float32)})
    assert empty.shape == (0, 3, 16)
