"""Every number of an artefact is compared with its module, and again with digests where it runs."""

from pathlib import Path
from typing import Any, Callable

import numpy as np
import onnx
import onnx_ir as ir
import pytest
import torch

from posenc_export.export import ReadAs, Sources, export, numbers
from posenc_export.export.describe import describe
from posenc_export.export.quantization.grid import Codes
from posenc_export.export.quantization.rounding import rounded
from posenc_export.export.targets import WRITERS
from posenc_export.export.targets.builder import Builder
from posenc_export.export.trace import Source
from posenc_export.export.verify import VerificationError
from posenc_export.models.config_json import from_json
from posenc_export.models.presets import seeded
from posenc_export.models.short_forms import block_config
from posenc_export.runtime import verify
from posenc_export.runtime.artefact import files
from posenc_export.runtime.artefact import manifest as manifests
from posenc_export.runtime.artefact.certificate import Check
from posenc_export.runtime.artefact.manifest import Manifest
from posenc_export.runtime.artefact.records import Weights
from posenc_export.runtime.graphs.onnx_nodes import read_nodes
from posenc_export.runtime.verification.constants import Constants, digests_of
from tests.cases import choice
from tests.reading import own_modules
from tests.tiny import decoder
from tests.traces import sources

UP, OUTPUTS = "layers.1.mlp.up.weight", 40
FORMATS = [
    *(("ort", name) for name in ("int8", "int8-32", "int4", "int4-128", "mixed", "keep")),
    *(("onnx", "int8"), ("onnx-static", "int8-32"), ("onnx-static", "int4")),
]
# Each layout of codes once; `make test-all` takes the others, too.
LAYOUTS = (("ort", "int8"), ("ort", "int4"), ("ort", "keep"), ("onnx-static", "int4"))
EACH = pytest.mark.parametrize(("target", "weights"), choice(FORMATS, LAYOUTS))
_made: dict[str, Source] = {}


def _source(weights: str) -> Source:
    """Return a source with rounded weights, those of "keep" with offsets that are no zero
    points.
    """
    if weights in _made:
        return _made[weights]
    model = seeded(decoder("rope", max_positions=64))
    names = [name for name, weight in model.named_parameters() if weight.dim() == 2]
    formats = {name: ("int4", "int8-32")[at % 2] for at, name in enumerate(names)}
    kind = "int4" if weights == "keep" else weights
    result = rounded(model, kind, formats=formats if weights == "mixed" else None)
    on_grid = dict(result.weights)
    if weights == "keep":
        for at, (name, (grid, codes)) in enumerate(on_grid.items()):
            offsets = codes.scales * np.float32(0.37)
            if at % 2 and name != UP:  # stored as minima in float16
                offsets = (codes.scales * 3).astype(np.float16) + np.float32(8) * codes.scales
            on_grid[name] = grid, Codes(codes.codes, codes.scales, codes.inputs, offsets)
            weight = result.model.get_parameter(name)
            weight.data.copy_(weight.new_tensor(on_grid[name][1].weight))
    _made[weights] = Source(result.model, on_grid=on_grid)
    return _made[weights]


def _written(source: Source, target: str, folder: Path, **bits: Any) -> Manifest:
    described = describe(source.model, target, "positions").replace(**bits)
    folder.mkdir()
    return WRITERS[target](source, described, folder)


def _check(source: Source, target: str, folder: Path, **bits: Any) -> Check:
    return numbers.compare(folder, _written(source, target, folder, **bits), source)[0]


def _of_outputs(array: np.ndarray) -> int:
    return array.shape.index(OUTPUTS)


def _rolled(array: np.ndarray) -> np.ndarray:
    return np.roll(array, 1, _of_outputs(array))


def _with_output(array: np.ndarray, change: Callable[[np.ndarray], np.ndarray]) -> np.ndarray:
    """Change the numbers of output 3."""
    outputs_first = np.moveaxis(array, _of_outputs(array), 0).copy()
    outputs_first[3] = change(outputs_first[3])
    return np.moveaxis(outputs_first, 0, _of_outputs(array))


def _exchanged(codes: np.ndarray) -> np.ndarray:
    if codes.dtype == np.uint8:
        return codes >> 4 | codes << 4
    return codes.reshape(-1, 2)[:, ::-1].reshape(codes.shape)


def _next_code(zeros: np.ndarray) -> np.ndarray:
    return zeros ^ 1


WITHOUT_ZEROS = ("int8", "int8-32", "keep", "mixed")  # formats without zero points
PACKING: dict[str, tuple[str, Callable[[np.ndarray], np.ndarray]]] = {
    "scales are rolled by one output": ("scales", _rolled),
    "codes are rolled by one output": ("codes", _rolled),
    "codes of an output are exchanged in pairs": ("codes", lambda a: _with_output(a, _exchanged)),
    "an output is zero": ("scales", lambda a: _with_output(a, np.zeros_like)),
    "zero points of an output are off by one": ("zeros", lambda a: _with_output(a, _next_code)),
}


def _plant(
    monkeypatch: pytest.MonkeyPatch, ends: str, change: Callable[[np.ndarray], np.ndarray]
) -> None:
    """Let the builder store other numbers in constants whose name ends so."""
    weight = Builder.weight

    def planted(op: Builder, name: str, made: Callable[[], np.ndarray], dtype: Any = None) -> Any:
        return weight(op, name, (lambda: change(made())) if name.endswith(ends) else made, dtype)

    monkeypatch.setattr(Builder, "weight", planted)


@EACH
def test_rounded_weights_of_a_right_artefact_are_those_of_the_module(
    target: str, weights: str, tmp_path: Path
) -> None:
    check = _check(_source(weights), target, tmp_path / "made", weights=Weights(weights))
    assert check.failures == {} and check.compared > 40000


PACKERS = [
    (*case, fault)
    for case in FORMATS
    for fault, (part, _) in PACKING.items()
    if part != "zeros" or case[1] not in WITHOUT_ZEROS
]


@pytest.mark.parametrize(
    ("target", "weights", "fault"),
    choice(PACKERS, [case for case in PACKERS if case[:2] in LAYOUTS]),
)
def test_a_wrong_packer_is_found(
    target: str, weights: str, fault: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    part, change = PACKING[fault]
    _plant(monkeypatch, f"{UP}.{part}", change)
    check = _check(_source(weights), target, tmp_path / "made", weights=Weights(weights))
    assert list(check.failures) and all(UP in place for place in check.failures)


def test_a_wrong_offset_of_a_kept_block_is_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _plant(monkeypatch, f"{UP}.offsets", lambda offsets: np.roll(offsets, 1, 0))
    check = _check(_source("keep"), "ort", tmp_path / "made", weights=Weights("keep"))
    assert list(check.failures) and all(UP in place for place in check.failures)


def _with_cache() -> Source:
    random = np.random.default_rng(0)
    model = seeded(decoder("rope", max_positions=64))
    names = [f"past_key_values.{layer}.{kind}" for layer in (0, 1) for kind in ("key", "value")]
    scales = {name: random.random((3, 16), np.float32) for name in names}
    return Source(model.eval(), cache_scales=scales)


def test_scales_of_a_cache_are_those_of_the_calibration(tmp_path: Path) -> None:
    assert _check(_with_cache(), "ort", tmp_path / "made", cache="int8").failures == {}


def test_a_wrong_scale_of_one_channel_of_a_cache_is_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _plant(monkeypatch, "1.key.scale", lambda scales: scales * np.where(np.arange(48) == 7, 2, 1))
    check = _check(_with_cache(), "ort", tmp_path / "made", cache="int8")
    assert list(check.failures) == ["past_key_values.1.key.scale"]


def _stored(folder: Path, variant: str, target: str, **how: str) -> Manifest:
    """Write an artefact with digests."""
    source = sources(decoder(variant, max_positions=440)).of(how.get("dtype", "float32"))
    manifest = _written(source, target, folder)
    check, digests = numbers.compare(folder, manifest, source)
    assert check.failures == {}
    return manifest.replace(constants=digests)


def _differing(folder: Path, manifest: Manifest) -> set[str]:
    result = digests_of(Constants(read_nodes(folder / "model.onnx"), folder))
    return {name for name, digest in result.items() if manifest.constants[name] != digest}


def _change(folder: Path, name: str, change: Callable[[np.ndarray], None]) -> None:
    """Change a constant in place, in model.onnx.data or in model.onnx."""
    model = onnx.load(folder / "model.onnx", load_external_data=False)
    tensor = next(t for t in model.graph.initializer if t.name.endswith(name))
    numbers_at = read_nodes(folder / "model.onnx").constants[tensor.name]
    array = np.array(numbers_at.array(folder))
    change(array)
    if numbers_at.file:
        with (folder / numbers_at.file).open("r+b") as stream:
            stream.seek(numbers_at.offset)
            stream.write(array.tobytes())
    else:
        tensor.raw_data = array.tobytes()
        onnx.save(model, folder / "model.onnx")


def _one_ulp(weight: np.ndarray) -> None:
    weight[3, 5] = np.nextafter(weight[3, 5], np.inf)


def _hole(table: np.ndarray) -> None:
    table[400:432] = 0


def _halved(slopes: np.ndarray) -> None:
    slopes[2] /= 2


FILES = [
    ("one weight is changed by one ulp", "onnx", "rope", "float32", "mlp.up.weight.T", _one_ulp),
    ("one weight is changed by one ulp", "ort", "rope", "float32", "mlp.up.weight.T", _one_ulp),
    ("a table has a hole", "onnx-static", "rope", "float32", "cos.rows", _hole),
    ("a table has a hole", "ort", "rope", "float32", "cos.rows", _hole),
    ("a table has a hole", "ort-cuda", "rope", "float16", "cos.rows", _hole),
    ("a slope is halved", "ort", "alibi", "float32", "view", _halved),
    ("a slope is halved", "onnx", "alibi", "float32", "view", _halved),
]


@pytest.mark.parametrize(("fault", "target", "variant", "dtype", "name", "change"), FILES)
def test_a_changed_file_has_another_digest(
    fault: str, target: str, variant: str, dtype: str, name: str, change: Any, tmp_path: Path
) -> None:
    manifest = _stored(tmp_path / "made", variant, target, dtype=dtype)
    assert _differing(tmp_path / "made", manifest) == set()
    _change(tmp_path / "made", name, change)
    assert _differing(tmp_path / "made", manifest) != set()
    source = sources(decoder(variant, max_positions=440)).of(dtype)
    check, _ = numbers.compare(tmp_path / "made", manifest, source)
    assert any(name in place for place in check.failures)


def test_another_scale_of_the_softmax_has_another_digest(tmp_path: Path) -> None:
    manifest = _stored(tmp_path / "made", "rope", "ort")
    model = onnx.load(tmp_path / "made/model.onnx", load_external_data=False)
    node = next(node for node in model.graph.node if node.op_type == "GroupQueryAttention")
    scale = next(attribute for attribute in node.attribute if attribute.name == "scale")
    scale.f *= 1.01
    onnx.save(model, tmp_path / "made/model.onnx")
    assert _differing(tmp_path / "made", manifest) == {"graph"}


def test_a_constant_of_no_parameter_is_a_failure(tmp_path: Path) -> None:
    source = sources(decoder("rope", max_positions=440)).of("float32")
    manifest = _stored(tmp_path / "made", "rope", "onnx")
    model = onnx.load(tmp_path / "made/model.onnx")
    for node in model.graph.node:
        for at, name in enumerate(node.input):
            if name.endswith("1.mlp.up.weight.T"):
                node.input[at] = "other"
    next(t for t in model.graph.initializer if t.name.endswith("1.mlp.up.weight.T")).name = "other"
    onnx.save(model, tmp_path / "made/model.onnx")
    check, _ = numbers.compare(tmp_path / "made", manifest, source)
    assert set(check.failures) == {"other", "model.layers.1.mlp.up.weight"}


def test_a_norm_without_weights_gets_ones_that_belong_to_no_parameter(tmp_path: Path) -> None:
    module: Any = own_modules.seeded("rotations")
    module.norms[0] = torch.nn.LayerNorm(own_modules.WIDTH, elementwise_affine=False)
    source = Sources(module, how=ReadAs(own_modules.inputs(module, 2, 12), 40)).of("float32")
    check = _check(source, "onnx", tmp_path / "made")
    assert check.failures == {}
    assert "float32 [32], no number of the module" in check.skipped.values()


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_export_refuses_a_wrong_table(
    dtype: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def holed(table: np.ndarray) -> np.ndarray:
        _hole(table := np.array(table))
        return table

    table = Builder.table

    def planted(op: Builder, value: ir.Value) -> ir.Value:
        if str(value.name).endswith("cos.rows") and value.const_value is not None:
            value.const_value = ir.tensor(holed(value.const_value.numpy()))
        return table(op, value)

    monkeypatch.setattr(Builder, "table", planted)
    model = seeded(decoder("rope", max_positions=440))
    with pytest.raises(VerificationError, match="check 'numbers' to pass, got .*cos.rows"):
        export(model, "ort-cuda", tmp_path / "made", dtype=dtype, verify="quick")


def test_verify_repeats_the_comparison_without_the_module(tmp_path: Path) -> None:
    result = tmp_path / "made"
    export(sources(decoder("rope", max_positions=440)), "ort", result, verify="quick")
    manifest = manifests.read(result)
    assert manifest.certificate is not None and manifest.constants
    assert manifest.certificate["checks"]["numbers"]["compared"] > 40000
    _change(result, "cos.rows", _hole)
    listed = {name: files.entry(result / name) for name in manifest.files}
    manifests.write(manifest.replace(files=listed), result)
    certificate = verify(result, quick=True)
    assert not certificate["passed"] and certificate["checks"]["numbers"]["failures"]


def test_digests_of_an_earlier_version_are_skipped(tmp_path: Path) -> None:
    export(sources(decoder("nope")), "ort", tmp_path / "made", verify="quick")
    manifest = manifests.read(tmp_path / "made")
    manifests.write(manifest.replace(constants={"node of a product": "0" * 64}), tmp_path / "made")
    check = verify(tmp_path / "made", quick=True)["checks"]["numbers"]
    assert "earlier version" in check["skipped"]["model.onnx"] and not check["failures"]


def test_artefacts_without_digests_keep_their_digest_and_skip_the_check(tmp_path: Path) -> None:
    result = tmp_path / "made"
    export(sources(decoder("rope", max_positions=440)), "ort", result, verify="quick")
    manifests.write(manifests.read(result).replace(constants={}), result)
    assert "constants" not in manifests.read(result).to_json()
    check = verify(result, quick=True)["checks"]["numbers"]
    assert check["failures"] == {} and list(check["skipped"]) == ["model.onnx"]
    assert from_json(manifests.read(result).config) == decoder("rope", max_positions=440)


@pytest.mark.parametrize("target", ["torchscript", "pt2"])
def test_tensors_of_a_torch_program_are_those_of_the_module(target: str, tmp_path: Path) -> None:
    source = sources(decoder("rope", max_positions=440)).of("float32")
    manifest = _written(source, target, tmp_path / "made")
    check, _ = numbers.compare(tmp_path / "made", manifest, source)
    assert check.failures == {} and check.compared > 40000
    other = Source(seeded(decoder("rope", max_positions=440), 1).eval())
    assert numbers.compare(tmp_path / "made", manifest, other)[0].failures


def test_a_square_matrix_with_its_rows_in_another_order_is_another_one(tmp_path: Path) -> None:
    config = block_config(16, 2, 64)
    manifest = _written(sources(config).of("float32"), "torchscript", tmp_path / "made")
    other = seeded(config).eval()
    weight = other.attention.projection.output.weight
    weight.data = weight.data.flip(0)
    assert numbers.compare(tmp_path / "made", manifest, Source(other))[0].failures
