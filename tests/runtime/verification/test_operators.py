"""The kernels that run an artefact are compared with their contracts when it is exported and
verified.
"""

from collections import Counter
from pathlib import Path
from typing import Any, Callable, Dict, List

import numpy as np
import onnx
import onnxruntime
import pytest
from msgspec.structs import replace

from posenc_export.export import VerificationError, export
from posenc_export.models.short_forms import block_config, decoder_config
from posenc_export.runtime import load, verify
from posenc_export.runtime.artefact.certificate import Check
from posenc_export.runtime.graphs import onnx_parts
from posenc_export.runtime.graphs.onnx_nodes import read
from posenc_export.runtime.graphs.ort_options import session_options
from posenc_export.runtime.verification import checks, operators
from posenc_export.runtime.verification.kernels import Graph
from posenc_export.runtime.verification.operators import checked_nodes, of_artefact
from tests.kernels.calls import built
from tests.traces import sources

MODEL: Any = decoder_config(64, 1, 72, block_config(40, 5, 64, kv_heads=1))
KINDS = {
    "int8-ort": {"weights": "int8"},
    "int8-32-ort": {"weights": "int8-32"},
    "int4-ort": {"weights": "int4"},
    "int4-128-ort": {"weights": "int4-128"},
    "float16-ort": {"dtype": "float16"},
    "int8-onnx": {"weights": "int8"},
    "int4-onnx": {"weights": "int4"},
    "float16-onnx": {"dtype": "float16"},
}
pytestmark = pytest.mark.xdist_group("operators")


@pytest.fixture(scope="module")
def artefacts(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Return the folder of an artefact of a kind, which is exported once."""
    base, result = tmp_path_factory.mktemp("operators"), {}

    def of(kind: str) -> Path:
        if kind not in result:
            result[kind] = base / kind
            target = kind.rpartition("-")[2]
            export(sources(MODEL), target, result[kind], verify=False, **KINDS[kind])  # type: ignore[arg-type]
        return result[kind]

    return of


def checked(folder: Path) -> Check:
    """Return the check of an artefact."""
    check = checks.operators(folder, load(folder, provider="cpu", threads=1))
    assert check is not None
    return check


@pytest.mark.parametrize("kind", KINDS)
def test_every_product_of_an_artefact_keeps_its_contract(
    kind: str, artefacts: Callable[[str], Path]
) -> None:
    folder = artefacts(kind)
    places = checked_nodes(Graph(read(folder / "model.onnx"), folder, load(folder).manifest))
    rows = [place for place in places if "Gather" in place.name or "Dequant" in place.name]
    # qkv, output, gate and up together or apart, down, and the head; the table, unless in float16
    assert len(places) - len(rows) >= 5 and len(rows) == ("float16" not in kind)
    check = checked(folder)
    assert check.failures == {} and check.skipped == {} and 0 < check.worst <= 1


@pytest.mark.parametrize("target", ["ort", "torchscript"])
def test_an_artefact_without_such_operators_has_no_check(target: str, tmp_path: Path) -> None:
    manifest = export(sources(MODEL), target, tmp_path / "made", verify="quick")
    assert manifest.certificate is not None
    assert "operators" not in manifest.certificate["checks"]


@pytest.mark.parametrize("kind", KINDS)
def test_recorded_outputs_change_no_kernel(
    kind: str, artefacts: Callable[[str], Path], tmp_path: Path
) -> None:
    folder = artefacts(kind)
    manifest = load(folder).manifest
    graph = Graph(read(folder / "model.onnx"), folder, manifest)
    recorded = [
        name
        for place in checked_nodes(graph)
        if not place.alone
        for name in (*place.reads, place.output)
        if name not in graph.nodes.inputs
    ]
    counts = []
    for further in ([], recorded):
        outputs = list(dict.fromkeys((*graph.nodes.outputs, *further)))
        content = onnx_parts.serialised(
            graph.nodes, graph.nodes.nodes, outputs, tuple(graph.nodes.inputs)
        )
        options = session_options(manifest, 1)
        options.optimized_model_filepath = str(tmp_path / "optimized.onnx")
        options.add_session_config_entry(
            "session.model_external_initializers_file_folder_path", str(folder)
        )
        onnxruntime.InferenceSession(content, options, ["CPUExecutionProvider"])
        nodes = onnx.load(tmp_path / "optimized.onnx", load_external_data=False).graph.node
        # ONNX Runtime copies a DequantizeLinear of rows for each node that reads it.
        products = ("MatMul", "Gather", "QuantizeLinear", "Gemm")
        counts.append(
            Counter(
                (node.op_type, str(node.attribute))
                for node in nodes
                if node.op_type.startswith(products)
            )
        )
    assert counts[0] == counts[1] and counts[0]


def test_a_product_of_the_standard_target_rounds_activations_in_blocks_of_its_contract(
    artefacts: Callable[[str], Path], tmp_path: Path
) -> None:
    folder = artefacts("int8-onnx")
    options = session_options(load(folder).manifest, 1)
    options.optimized_model_filepath = str(tmp_path / "optimized.onnx")
    onnxruntime.InferenceSession(str(folder / "model.onnx"), options, ["CPUExecutionProvider"])
    nodes = onnx.load(tmp_path / "optimized.onnx", load_external_data=False).graph.node
    results = [
        {part.name: part.i for part in node.attribute}
        for node in nodes
        if node.op_type == "MatMulNBits"
    ]
    assert {(part["block_size"], part["accuracy_level"]) for part in results} == {(32, 4)}


def spoiled(
    change: Callable[[np.ndarray], np.ndarray], monkeypatch: pytest.MonkeyPatch, last: str
) -> None:
    """Let the kernel of a weight whose name ends so compute other numbers."""
    run = operators.Recorder.run

    def wrong(self: Any, call: Any, states: Any) -> np.ndarray:
        output = run(self, call, states)
        place = next(place for place in self.places if place.name.endswith(last))
        self.record[-1][place.output] = change(self.record[-1][place.output])
        return output

    init = operators.Recorder.__init__

    def with_places(self: Any, graph: Graph, *arguments: Any) -> None:
        self.places = checked_nodes(graph)
        init(self, graph, *arguments)

    monkeypatch.setattr(operators.Recorder, "__init__", with_places)
    monkeypatch.setattr(operators.Recorder, "run", wrong)


def _zero(y: np.ndarray) -> np.ndarray:
    return np.where(np.arange(y.shape[-1]) == 3, 0, y).astype(y.dtype)


def _slightly_large(y: np.ndarray) -> np.ndarray:
    return (y * np.float32(1.001)).astype(y.dtype)


def _of_steps(y: np.ndarray) -> np.ndarray:
    return np.roll(y, 1, axis=-1) if y.shape[1] == 1 else y


CHANGES: Dict[str, Callable[[np.ndarray], np.ndarray]] = {
    "an output of zeros": _zero,
    "a factor of 1.001": _slightly_large,
    "exchanged outputs of single tokens": _of_steps,
}


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("kind", [kind for kind in KINDS if "float16" not in kind])
def test_a_kernel_that_computes_other_numbers_is_found_and_named(
    kind: str, change: str, artefacts: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    spoiled(CHANGES[change], monkeypatch, "output.weight.codes")
    (name, failure), *others = checked(artefacts(kind)).failures.items()
    assert name.endswith("layers.0.attention.projection.output.weight.codes") and not others
    tokens = 1 if "single" in change else "[1-5]"
    assert pytest.approx(1) != float(failure.split()[3]) > 5
    assert f"of {tokens} tokens on one thread" in failure or tokens != 1


def test_a_wrong_kernel_is_refused_by_export_and_by_verify(
    artefacts: Callable[[str], Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "made"
    export(sources(MODEL), "ort", folder, weights="int4", verify="quick")
    assert verify(folder, provider="cpu", quick=True)["passed"]
    spoiled(_zero, monkeypatch, "down.weight.codes")
    certificate = verify(folder, provider="cpu", quick=True)
    failures = certificate["checks"]["operators"]["failures"]
    assert not certificate["passed"] and ["down" in name for name in failures] == [True]
    with pytest.raises(
        VerificationError, match="check 'operators' .*down.weight.codes: an error of"
    ):
        export(sources(MODEL), "ort", tmp_path / "other", weights="int4", verify="quick")


def test_an_accuracy_level_other_than_the_activations_of_the_manifest_is_found(
    artefacts: Callable[[str], Path], tmp_path: Path
) -> None:
    folder = artefacts("int4-ort")
    graph = read(folder / "model.onnx")
    product = next(node for node in graph.nodes if node.operator == "MatMulNBits")
    nodes = [
        onnx_parts.with_attribute(node, "accuracy_level", 1) if node is product else node
        for node in graph.nodes
    ]
    content = onnx_parts.serialised(graph, nodes, graph.outputs, tuple(graph.inputs))
    manifest = load(folder).manifest
    for name in manifest.files:
        (tmp_path / name).write_bytes((folder / name).read_bytes())
    (tmp_path / "model.onnx").write_bytes(content)
    check = of_artefact(tmp_path, manifest)
    assert check is not None
    failure = "accuracy_level 1 in place of 4, as the manifest says"
    assert check.failures == {f"MatMulNBits {product.inputs[1]}": failure}


def test_kernels_for_several_tokens_and_for_one_are_compared(
    artefacts: Callable[[str], Path],
) -> None:
    folder = artefacts("int4-ort")
    graph = Graph(read(folder / "model.onnx"), folder, load(folder).manifest)
    sizes: List[int] = []
    place = next(place for place in checked_nodes(graph) if place.name.startswith("MatMulNBits"))
    for record in operators.recorded(graph, [place.output], 1):
        sizes.append(record[place.output].shape[1])
    assert sizes == [5, 1, 2]


@pytest.fixture(scope="module", params=["int4", "int8"])
def experts(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the artefact of a decoder with experts whose gates are limited."""
    plain = decoder_config(64, 1, 40, block_config(40, 4, 24, kv_heads=2))
    mlp = {"name": "experts", "hidden": 24, "experts": 3, "chosen": 2}
    mlp |= {"bias": True, "unit": {"name": "clamped", "limit": 0.4}}
    layers = {name: replace(kind, mlp=mlp) for name, kind in plain.layers.items()}
    folder = tmp_path_factory.mktemp("experts") / "made"
    config = replace(plain, layers=layers)
    export(sources(config), "ort", folder, verify=False, weights=request.param)
    return folder


def test_chosen_experts_keep_their_contract(experts: Path) -> None:
    places = checked_nodes(Graph(read(experts / "model.onnx"), experts, load(experts).manifest))
    assert sum(place.name.startswith("QMoE") for place in places) == 1
    check = checked(experts)
    assert check.failures == {} and check.skipped == {} and 0 < check.worst <= 1


@pytest.mark.parametrize("change", CHANGES)
def test_experts_that_compute_other_numbers_are_found(
    change: str, experts: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    spoiled(CHANGES[change], monkeypatch, "gates.alternating.codes")
    ((name, failure),) = checked(experts).failures.items()
    assert name.startswith("QMoE") and "an error of" in failure


@pytest.fixture(scope="module", params=[-1, 3], ids=["all tokens", "a window"])
def cached(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the artefact of a block with an 8-bit cache."""
    config = block_config(64, 4, 64, kv_heads=2, head_size=16)
    if request.param > 0:
        sees = {"name": "window", "size": request.param}
        config = replace(config, attention=replace(config.attention, sees=sees))
    base = tmp_path_factory.mktemp("cached")
    hidden = np.random.default_rng(0).standard_normal((2048, 64)).astype(np.float32)
    np.save(base / "x.npy", hidden)
    how = {"calibrate": base / "x.npy", "cache": "int8"}
    export(sources(config), "ort", base / "made", verify=False, **how)  # type: ignore[arg-type]
    return base / "made"


def test_attention_with_8_bit_caches_keeps_its_contract(cached: Path) -> None:
    check = checked(cached)
    assert check.failures == {} and check.skipped == {} and 0 < check.worst <= 1


def _code(record: Dict[str, np.ndarray]) -> None:
    """Change the code that one call wrote, in its lowest bit."""
    codes = record["present.0.key"] = record["present.0.key"].copy()
    codes[0, 1, int(record["total_sequence_length"]) - 1, 3] ^= 1


def _scales(record: Dict[str, np.ndarray]) -> None:
    """Read values with the scales of the channels before."""
    name = next(name for name in record if "groupqueryattention" in name)
    channels = record[name].reshape(1, -1, 4, 16)
    factor = np.linspace(1, 1.01, 16, dtype=np.float32)
    record[name] = (channels * np.roll(factor, 1) / factor).reshape(record[name].shape)


def _slot(record: Dict[str, np.ndarray]) -> None:
    """Read a slot in place of the one after it."""
    values = record["present.0.value"] = record["present.0.value"].copy()
    end = int(record["total_sequence_length"]) - 1
    values[0, :, end - 1] = values[0, :, end]


def _half(record: Dict[str, np.ndarray]) -> None:
    """Change a number that one call rounded to float16, in its lowest bit."""
    keys = record["present.0.key"] = record["present.0.key"].copy()
    keys.view(np.uint16)[0, 1, int(record["seqlens_k"][0]), 3] ^= 1


def _change_steps(
    change: Callable[[Dict[str, np.ndarray]], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Change what is recorded of calls of one token."""
    run = operators.Recorder.run

    def wrong(self: Any, call: Any, states: Any) -> np.ndarray:
        output = run(self, call, states)
        if call.new == 1:
            change(self.record[-1])
        return output

    monkeypatch.setattr(operators.Recorder, "run", wrong)


@pytest.mark.parametrize("change", [_code, _scales, _slot], ids=["code", "scales", "slot"])
def test_wrong_8_bit_caches_are_found(
    change: Callable[[Dict[str, np.ndarray]], None], cached: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _change_steps(change, monkeypatch)
    ((name, failure),) = checked(cached).failures.items()
    assert name == "GroupQueryAttention past_key_values.0.key" and "of 1 tokens" in failure


@built
def test_a_wrong_number_of_a_cache_in_float16_is_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = block_config(64, 4, 64, kv_heads=2, head_size=16)
    export(sources(config), "ort-native", tmp_path / "a", verify=False, cache="float16")
    check = checked(tmp_path / "a")
    assert check.failures == {} and check.skipped == {} and 0 < check.worst <= 1
    _change_steps(_half, monkeypatch)
    ((name, failure),) = checked(tmp_path / "a").failures.items()
    assert name == "CachedAttention past_key_values.0.key" and "of 1 tokens" in failure
