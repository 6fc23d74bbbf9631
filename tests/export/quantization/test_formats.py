"""Quantized weights: which weights are rounded, how they are stored, and how the artefact is
verified.
"""

import itertools
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
import onnxruntime
import pytest
import torch
from onnx.reference import ReferenceEvaluator

from posenc_export.export import VerificationError, export, quality, verify
from posenc_export.export.quantization import grid
from posenc_export.export.quantization.formats import FORMATS
from posenc_export.export.quantization.grid import Grid
from posenc_export.export.quantization.rounding import rounded
from posenc_export.export.targets import standard
from posenc_export.export.targets.builder import Builder, finish, replace_nodes
from posenc_export.export.targets.weights import Fused, Standard
from posenc_export.models.config_json import widest
from posenc_export.models.presets import seeded
from posenc_export.models.pretrained import from_pretrained
from posenc_export.models.short_forms import block_config, decoder_config
from posenc_export.ops import graph as semantic
from posenc_export.runtime import verify as verify_here
from posenc_export.runtime.artefact.certificate import FORM
from posenc_export.runtime.graphs import ort_options
from posenc_export.shared.numerics import SAFETY, rounding_noise, tolerance, worst_error
from tests.cases import choice
from tests.models.checkpoints import saved
from tests.tiny import block, encoder
from tests.traces import sources

VOCABULARY = 257  # large enough that the trace does not fold the tied table into two constants
# Sizes that are not multiples of a block.
ATTENTION = block_config(40, 4, 48, kv_heads=2, head_size=16, encoding={"name": "rope"})
ROPE = decoder_config(VOCABULARY, 1, 56, ATTENTION)
FEW_BIT_TARGETS = ("ort", "onnx", "onnx-static")


def _weight(rows: int = 24, inputs: int = 70) -> np.ndarray:
    return np.random.default_rng(0).standard_normal((rows, inputs)).astype(np.float32)


GRIDS = [Grid(8, None), Grid(8, 32), Grid(4, 32), Grid(4, 32, zeros=True), Grid(4, 128, zeros=True)]


@pytest.mark.parametrize("grid", GRIDS, ids=str)
def test_products_of_codes_and_scales_are_exact_in_float32(grid: Grid) -> None:
    result = grid.rounded(_weight())
    assert np.abs(result.codes.astype(int)).max() <= 1 << (grid.bits - 1)
    zeros, scales = result.zeros(grid.bits), result.scales.astype(np.float64)[..., None]
    assert (zeros is not None) == grid.zeros
    codes = result.codes - (0 if zeros is None else zeros[..., None].astype(int))
    np.testing.assert_array_equal((codes * scales).reshape(24, -1)[:, :70], result.weight)


@pytest.mark.parametrize("grid", GRIDS, ids=str)
def test_the_rounding_error_is_at_most_the_declared_noise(grid: Grid) -> None:
    weight = _weight(64, 256)
    errors = np.square(grid.rounded(weight).weight - weight).mean()
    noise = rounding_noise(grid.bits, grid.block or weight.shape[1])
    assert errors <= noise**2 * np.square(weight).mean()


def test_a_block_of_4_bits_has_the_scale_of_the_smallest_squared_error(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    weight, errors = _weight(64, 256), []
    monkeypatch.setattr(grid, "REFITTED", 0)
    for searched in (grid.SEARCHED, *((factor,) for factor in grid.SEARCHED)):
        monkeypatch.setattr(grid, "SEARCHED", searched)
        squares = np.square(Grid(4, 32).rounded(weight).weight - weight)
        errors.append(squares.reshape(64, -1, 32).sum(2))
    np.testing.assert_allclose(errors[0], np.min(errors[1:], axis=0), rtol=1e-5)


@pytest.mark.parametrize("grid", GRIDS, ids=str)
def test_blocks_of_zeros_stay_zeros(grid: Grid) -> None:
    weight = _weight()
    weight[3] = weight[:, :32] = 0
    result = grid.rounded(weight).weight
    assert not result[3].any() and not result[:, :32].any() and np.isfinite(result).all()


def test_zero_points_reduce_the_error_of_blocks_whose_weights_have_one_sign() -> None:
    weight = np.abs(_weight(64, 256))
    both = (Grid(4, 32, zeros).rounded(weight).weight for zeros in (False, True))
    without, with_zeros = (np.square(one - weight).mean() for one in both)
    assert with_zeros < 0.5 * without


def test_scales_of_4_bits_are_numbers_of_float16() -> None:
    scales = Grid(4, 32, zeros=True).rounded(_weight(64, 256)).scales
    np.testing.assert_array_equal(scales.astype(np.float16).astype(np.float32), scales)


@pytest.mark.parametrize("target", choice(["ort", "onnx"], ["ort"]))
def test_constants_that_lie_on_a_grid_by_chance_are_not_quantized(
    target: str, tmp_path: Path
) -> None:
    # Its table of biases has one column.
    one_head = block_config(24, 1, 48, head_size=24, encoding={"name": "t5"})
    model = seeded(decoder_config(61, 1, 56, one_head))
    names = rounded(model, "int4").weights
    manifest = export(model, target, tmp_path / "made", verify=False, weights="int4")
    assert manifest.weights is not None and manifest.weights.matrices == len(names) == 6
    graph = onnx.load(tmp_path / "made/model.onnx", load_external_data=False).graph
    stored = [tensor.name for tensor in graph.initializer if ".scales" in tensor.name]
    assert {name.partition(".scales")[0] for name in stored} == set(names)


def test_only_linear_layers_and_the_token_table_are_rounded() -> None:
    config = decoder_config(61, 1, 56, block_config(32, 4, 64, encoding={"name": "fire"}))
    model = seeded(config)
    result, names = rounded(model, "int4")
    pairs = zip(model.named_parameters(), result.parameters(), strict=True)
    changed = {name for (name, one), two in pairs if not torch.equal(one, two)}
    linear = {
        f"{name}.weight"
        for name, part in model.named_modules()
        if isinstance(part, torch.nn.Linear) and ".encoding." not in name
    }
    # The tied weight has one name.
    wanted = (linear | {"tokens.embedding.weight"}) - {"head.linear.weight"}
    assert changed == set(names) == wanted
    assert result.head.linear.weight is result.tokens.embedding.weight  # type: ignore[union-attr]


@pytest.mark.parametrize(
    ("target", "weights"), choice(itertools.product(FEW_BIT_TARGETS, FORMATS), [("ort", "int4")])
)
def test_a_decoder_is_verified_in_float32_and_quantized(
    target: str, weights: str, tmp_path: Path
) -> None:
    manifest = export(sources(ROPE), target, tmp_path / "made", weights=weights)
    assert manifest.certificate is not None and manifest.certificate["passed"]
    assert manifest.weights is not None and manifest.weights.matrices == 6
    result = manifest.quality
    assert result is not None
    assert result.exact <= result.exact_tolerance == tolerance("float32", 1, widest(ROPE))
    assert result.error > 0 and result.tokens == 3 * 36


def test_the_loss_is_measured_on_the_provider_of_the_certificate(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    loaded: list[str] = []
    right = quality.load

    def noted(*given: Any, provider: str = "auto", **named: Any) -> Any:
        loaded.append(provider)
        return right(*given, provider=provider, **named)

    monkeypatch.setattr(quality, "load", noted)
    manifest = export(sources(ROPE), "ort", tmp_path / "made", weights="int4")
    assert manifest.certificate is not None and loaded == [manifest.certificate["provider"]]


@pytest.mark.exhaustive
@pytest.mark.parametrize("target", FEW_BIT_TARGETS)
def test_signature_mask_is_verified(target: str, tmp_path: Path) -> None:
    manifest = export(sources(ROPE), target, tmp_path / "made", "mask", weights="int4")
    assert manifest.certificate is not None and manifest.certificate["passed"]


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    "config",
    [block("alibi"), block("t5"), block("fox"), encoder("deberta")],
    ids=["alibi", "t5", "fox", "encoder"],
)
@pytest.mark.parametrize("weights", ["int8", "int4"])
@pytest.mark.parametrize("target", FEW_BIT_TARGETS)
def test_blocks_and_encoders_are_verified(
    target: str, weights: str, config: Any, tmp_path: Path
) -> None:
    manifest = export(sources(config), target, tmp_path / "made", weights=weights)
    assert manifest.certificate is not None and manifest.certificate["passed"]


# Matrices of checkpoints on ort: 7 of each layer (4 of gpt2; 6 of gpt_oss, two of which hold those
# of all experts), the token table, and a head that is not tied to it. gpt2's table of positions is
# not rounded.
MATRICES = {"llama with biases": 16, "gemma3_text": 15, "gpt2": 9, "gpt_oss": 14}
OF_EXPERTS = 3 * 5 - 2  # further matrices of a layer of gpt_oss on onnx: three of each expert


@pytest.mark.exhaustive
@pytest.mark.parametrize(("name", "count"), MATRICES.items())
@pytest.mark.parametrize("target", ["ort", "onnx"])
def test_checkpoints_are_verified_and_every_linear_layer_is_quantized(
    target: str, name: str, count: int, tmp_path: Path
) -> None:
    _, folder = saved(name, tmp_path / "checkpoint")
    manifest = export(from_pretrained(folder), target, tmp_path / "made", weights="int4")
    assert manifest.certificate is not None
    assert manifest.certificate["passed"]
    assert manifest.weights is not None
    further = 2 * OF_EXPERTS if (name, target) == ("gpt_oss", "onnx") else 0
    assert manifest.weights.matrices == count + further


def test_a_tied_table_is_stored_once_on_ort(tmp_path: Path) -> None:
    export(sources(ROPE), "ort", tmp_path / "made", verify=False, weights="int4")
    graph = onnx.load(tmp_path / "made/model.onnx", load_external_data=False).graph
    product = next(node for node in graph.node if "logits" in node.output)
    rows = next(node for node in graph.node if node.op_type == "GatherBlockQuantized")
    assert product.op_type == "MatMulNBits" and product.input[1] == rows.input[0]


@pytest.mark.parametrize("weights", choice(["int8", "int4"], ["int4"]))
def test_the_standard_form_has_only_standard_operators(weights: str, tmp_path: Path) -> None:
    manifest = export(sources(ROPE), "onnx", tmp_path / "made", verify=False, weights=weights)
    # A tied head has its own codes.
    assert set(manifest.opset) == {""} and manifest.operators["DequantizeLinear"] == 7


@pytest.mark.parametrize("weights", FORMATS)
@pytest.mark.parametrize("inputs", [96, 70])
def test_the_reference_evaluator_of_onnx_reads_the_standard_form(inputs: int, weights: str) -> None:
    model, x, wanted = _product(Standard, weights, inputs)
    result = ReferenceEvaluator(model).run(None, {"x": x})[0]  # type: ignore[index]
    assert worst_error(result, wanted) <= tolerance("float32", 1, inputs)


@pytest.mark.parametrize("weights", FORMATS)
@pytest.mark.parametrize("inputs", [96, 70])
@pytest.mark.parametrize("form", [Fused, Standard])
def test_products_are_within_the_rounding_of_activations(
    form: Any, inputs: int, weights: str
) -> None:
    model, x, wanted = _product(form, weights, inputs)
    bound = SAFETY * rounding_noise(8, FORMATS[weights].shared)
    assert worst_error(_run(model, x), wanted) <= bound


@pytest.mark.parametrize("weights", FORMATS)
def test_the_output_of_a_token_does_not_depend_on_other_tokens(weights: str) -> None:
    model, x, _ = _product(Fused, weights, 96)
    each = np.split(x, x.shape[1], axis=1)
    alone = np.concatenate([_run(model, token) for token in each], axis=1)
    assert worst_error(alone, _run(model, x)) <= tolerance("float32", 1, 96)


@pytest.mark.parametrize("weights", FORMATS)
@pytest.mark.parametrize("form", [Fused, Standard])
def test_a_product_of_no_tokens_has_none(form: Any, weights: str) -> None:
    model, x, _ = _product(form, weights, 96)
    assert _run(model, x[:, :0]).shape == (1, 0, 24)


def test_a_token_of_zeros_gives_zeros() -> None:
    model, x, _ = _product(Fused, "int8", 96)
    x[:, 2] = 0
    assert not _run(model, x)[:, 2].any()


def _product(
    form: Any, weights: str, inputs: int
) -> tuple[onnx.ModelProto, np.ndarray, np.ndarray]:
    """Return a graph of one product in a format, x [1,9,K] with tokens of different magnitudes,
    and the product in float64.
    """
    grid = FORMATS[weights].projections
    codes = grid.rounded(_weight(24, inputs))
    kind, shape = ir.TensorType(ir.DataType.FLOAT), ir.Shape([1, "tokens", 24])
    x = ir.Value(name="x", shape=ir.Shape([1, "tokens", inputs]), type=kind)
    stored = ir.tensor(codes.weight, name="w")
    held = ir.Value(name="w", shape=ir.Shape(codes.weight.shape), type=kind, const_value=stored)
    read = ir.node("OnGrid", [held], {"name": "w"}, domain=semantic.DOMAIN)
    turned = ir.node("Transpose", read.outputs, {"perm": [1, 0]})
    node = ir.node("MatMul", [x, turned.outputs[0]])
    output = node.outputs[0]
    output.name, output.type, output.shape = "y", kind, shape
    opsets, nodes = {"": 23, "com.microsoft": 1}, [read, turned, node]
    graph = ir.Graph([x], [output], nodes=nodes, initializers=[held], opset_imports=opsets)
    model = ir.Model(graph, ir_version=10)
    op = Builder(model, "float32", 64, on_grid={"w": (grid, codes)})
    replace_nodes(op, form("int8").table())
    finish(op)
    graph.outputs[0].type, graph.outputs[0].shape = kind, shape
    tokens = np.random.default_rng(1).standard_normal((1, 9, inputs)).astype(np.float32)
    tokens *= np.float32(2) ** np.arange(9, dtype=np.float32)[:, None]
    return ir.to_proto(model), tokens, tokens.astype(np.float64) @ codes.weight.T.astype(np.float64)


def _run(model: onnx.ModelProto, x: np.ndarray) -> np.ndarray:
    options, provider = onnxruntime.SessionOptions(), "CPUExecutionProvider"
    ort_options.keep_exact(options, {node.op_type for node in model.graph.node})
    session = onnxruntime.InferenceSession(model.SerializeToString(), options, [provider])
    return session.run(None, {"x": x})[0]


@pytest.mark.exhaustive
def test_an_artefact_is_verified_again_with_and_without_its_module(tmp_path: Path) -> None:
    result = export(sources(ROPE), "ort", tmp_path / "made", weights="int4").certificate
    again = verify(tmp_path / "made")
    assert result is not None and again["cells"] == result["cells"]
    assert again["checks"].keys() == result["checks"].keys()
    assert verify_here(tmp_path / "made", "cpu")["passed"]


def test_a_fault_smaller_than_the_rounding_of_activations_is_detected_in_float32(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    scores_of = standard.scores_of

    def wrong(node: Any) -> Any:
        scores = scores_of(node)
        return {**scores, **({"scale": 1.01 * scores["scale"]} if "scale" in scores else {})}

    monkeypatch.setattr(standard, "scores_of", wrong)
    with pytest.raises(VerificationError) as failure:
        export(sources(ROPE), "ort", tmp_path / "made", weights="int4")
    made, least = failure.value.certificate, tolerance("float32", 1, widest(ROPE))
    assert least <= made["tolerance"] < 2 * least  # other shapes of a call round otherwise
    assert max(e for name, e in made["cells"].items() if name.startswith(FORM)) > made["tolerance"]


REFUSALS: dict = {
    "an unknown format": (("ort", "int3"), {}, "int8, int8-32, int4, int4-128, keep, got 'int3'"),
    "TorchScript": (
        ("torchscript", "int4"),
        {},
        "onnx or onnx-static or ort or ort-native in float32 for weights int4, got torchscript",
    ),
    "a program of torch.export": (("pt2", "int8"), {}, "got pt2"),
    "float16": (("ort", "int4"), {"dtype": "float16"}, "got ort in float16"),
}


@pytest.mark.parametrize(("given", "more", "message"), REFUSALS.values(), ids=REFUSALS)
def test_an_unsupported_combination_is_refused(
    given: tuple[str, str], more: dict, message: str, tmp_path: Path
) -> None:
    with pytest.raises(ValueError, match=message):
        export(sources(ROPE), given[0], tmp_path / "made", weights=given[1], **more)
