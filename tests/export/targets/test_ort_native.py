"""Target ort-native: what its operator takes the place of, and sessions on it."""

import math
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
import torch
from onnx import numpy_helper

from posenc_export import encodings
from posenc_export.encodings.shared.base import PositionEncoding
from posenc_export.export import TARGETS, export
from posenc_export.export.targets import runnable
from posenc_export.models.short_forms import block_config, decoder_config
from posenc_export.runtime import load
from posenc_export.runtime.artefact.certificate import exported_error
from posenc_export.runtime.graphs import kernel_library
from posenc_export.runtime.graphs.kernel_library import DOMAIN, OPERATOR
from posenc_export.runtime.graphs.ort_graph import OrtGraph
from posenc_export.runtime.verification import checks
from posenc_export.shared.numerics import tolerance, worst_error
from tests.encodings.test_laws import SHIFT_INVARIANT
from tests.kernels.calls import NAMES, built
from tests.tiny import block, decoder
from tests.traces import exported, sources

PICKED = {"shaw": 4, "deberta": 3, "inkling": 3, "wavlm": 3}  # outputs of the operator
ROTATIONS = ("rope", "xpos", "rope_yarn", "rope-interleaved", "rope_trained")

OWN = (  # of which the first two depend on the distance alone
    lambda head, query, key: -(query - key).abs() * 2.0 ** -(head + 1.0),
    lambda head, query, key: torch.cos(0.1 * (key - query)),
    lambda head, query, key: -0.01 * (head + 1) * (query + key),
    lambda head, query, key: -0.1 * (head + 1) * (query - key) / (query + 1),
)


def _exported(config: Any, folder: Path, **how: Any) -> onnx.GraphProto:
    export(sources(config), "ort-native", folder, **{"verify": False, **how})
    return onnx.load(folder / "model.onnx", load_external_data=False).graph


def _inputs(graph: onnx.GraphProto) -> list[dict[str, str]]:
    """Return the inputs of the nodes of the operator by their names in its documentation."""
    nodes = [node for node in graph.node if node.op_type == OPERATOR]
    assert all(node.domain == DOMAIN for node in nodes)
    return [{k: v for k, v in zip(NAMES, node.input, strict=False) if v} for node in nodes]


def _operators(graph: onnx.GraphProto) -> list[str]:
    return sorted(node.op_type for node in graph.node)


# Of an encoding: the inputs of the operator that take the place of scores, and operators that it
# makes superfluous.
FUSED: dict[str, tuple[str, str]] = {
    **dict.fromkeys(PICKED, ("query_rows row_of_distance", "GatherElements Range Slice")),
    "fox": ("key_decays", "CumSum Range Slice"),
    "cope": ("count_rows", "CumSum Range Slice Sigmoid"),
    "transformer_xl": ("distance_queries distance_keys", "Gather Range"),
    "fire": ("number_of_distance query_factors pieces", "Relu Gemm"),
}


@built
@pytest.mark.parametrize("variant", FUSED)
def test_scores_of_an_encoding_need_no_tensor(variant: str, tmp_path: Path) -> None:
    graph = _exported(block(variant), tmp_path / "artefact", verify="quick")
    (inputs,) = _inputs(graph)
    wanted, superfluous = FUSED[variant]
    assert {*wanted.split()} <= inputs.keys() and "attention_bias" not in inputs
    assert ("key_rows" in inputs) == (variant == "deberta")
    assert not {*superfluous.split()} & {*_operators(graph)}
    (node,) = [node for node in graph.node if node.op_type == OPERATOR]
    assert variant not in PICKED or len(node.output) == PICKED[variant]


@built
def test_keys_are_turned_for_each_query_by_the_operator(tmp_path: Path) -> None:
    graph = _exported(block("rope_dynamic-short"), tmp_path / "artefact", verify="quick")
    (inputs,) = _inputs(graph)
    assert {"turn_cos", "turn_sin", "cos_cache"} <= inputs.keys()
    assert not {"If", "RotaryEmbedding", "Softmax"} & {*_operators(graph)}
    # Other targets turn all keys for each query, and feed few tokens at a time.
    assert load(tmp_path / "artefact").manifest.chunk == PositionEncoding.chunk


@built
def test_caches_of_keys_and_of_values_have_sizes_of_their_own(tmp_path: Path) -> None:
    _exported(block("pope"), tmp_path / "artefact", verify="quick")
    sizes = {s.past.split(".")[-1]: s.axes[3] for s in load(tmp_path / "artefact").manifest.states}
    assert sizes == {"key": 32, "value": 16}


@built
def test_one_wrong_row_of_a_distance_is_a_failure(tmp_path: Path) -> None:
    folder = tmp_path / "artefact"
    _exported(block("shaw"), folder)
    model = load(folder, threads=1)
    assert not checks.indices(folder, model).failures
    graph = onnx.load(folder / "model.onnx")
    (rows,) = [t for t in graph.graph.initializer if t.name.endswith("row_of_distance")]
    numbers = numpy_helper.to_array(rows).copy()
    numbers[3] += 1
    rows.CopyFrom(numpy_helper.from_array(numbers, rows.name))
    onnx.save(graph, folder / "model.onnx")
    (failure,) = checks.indices(folder, model).failures.values()
    assert failure.startswith("row of distance 3: got ")


@pytest.mark.parametrize(
    ("variant", "given"),
    [
        *((variant, "distance_bias") for variant in SHIFT_INVARIANT),
        *((variant, "cos_cache") for variant in ROTATIONS),
    ],
)
def test_a_bias_by_distance_and_a_rotation_cost_no_node(
    variant: str, given: str, tmp_path: Path
) -> None:
    graph = _exported(block(variant), tmp_path / "artefact")
    (inputs,) = _inputs(graph)
    assert given in inputs and "attention_bias" not in inputs
    assert _operators(graph) == _operators(_exported(block("nope"), tmp_path / "nope"))


def test_layers_share_a_table(tmp_path: Path) -> None:
    (first, second) = _inputs(_exported(decoder("dynamic_bias"), tmp_path / "artefact"))
    assert first["distance_bias"] == second["distance_bias"]


def test_a_table_ends_where_all_larger_distances_have_the_same_bias(tmp_path: Path) -> None:
    graph = _exported(block("t5"), tmp_path / "artefact")
    shapes = {value.name: list(value.dims) for value in graph.initializer}
    heads, distances = shapes[_inputs(graph)[0]["distance_bias"]]
    assert heads == 6 and distances <= 129  # of 1100; all from 128 on share a bucket


@built
@pytest.mark.parametrize(
    "function",
    [
        pytest.param(OWN[0], id="slopes"),
        pytest.param(OWN[1], id="the same for all heads", marks=pytest.mark.exhaustive),
        pytest.param(OWN[2], id="sum of positions"),
        pytest.param(OWN[3], id="relative to the query", marks=pytest.mark.exhaustive),
    ],
)
def test_own_functions_are_tables_if_they_depend_on_the_distance_alone(
    function: Any, tmp_path: Path
) -> None:
    name = f"own_of_ort_native_{OWN.index(function)}"
    encodings.register(name, encodings.bias(function))
    own = block_config(48, 6, 1100, kv_heads=3, head_size=16, encoding={"name": name})
    graph = _exported(own, tmp_path / "artefact", verify="quick")
    by_distance = OWN.index(function) < 2
    assert all(("distance_bias" in i) == by_distance for i in _inputs(graph))


@built
def test_rows_of_several_tokens_over_a_cache_are_one_call(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    exported(tmp_path / "native", decoder("rope"), "ort-native")
    exported(tmp_path / "ort", decoder("rope"), "ort")
    random, runs, outputs = np.random.default_rng(0), [], []
    bind = OrtGraph.bind

    def noted(self: OrtGraph, feeds: Any, *rest: Any, **named: Any) -> Any:
        runs.extend([self] * (feeds["input_ids"].shape[1] > 1))
        return bind(self, feeds, *rest, **named)

    monkeypatch.setattr(OrtGraph, "bind", noted)
    parts = [[random.integers(61, size=n) for n in lengths] for lengths in ((9, 3, 6), (4, 7, 2))]
    for name in ("native", "ort"):
        session = load(tmp_path / name, provider="cpu").session()
        for part in parts:
            outputs.append(session.prefill(part, start=[0, 5, 900] if part is parts[0] else None))
        outputs.append(session.step(np.array([1, 2, 3])))
    assert [len([r for r in runs if r is graph]) for graph in dict.fromkeys(runs)] == [2, 4]
    for mine, other in zip(outputs[:3], outputs[3:], strict=True):
        assert worst_error(mine, other) <= tolerance("float32", 2, 48)


@built
def test_caches_of_8_bits_and_weights_of_4_pass_the_grid(tmp_path: Path) -> None:
    text = tmp_path / "text.txt"
    text.write_bytes(np.random.default_rng(0).integers(32, 127, size=2000).astype("u1").tobytes())
    for variant in ("deberta", "fox"):  # other scores: tests/kernels/test_operator.py
        folder = tmp_path / variant
        config = decoder_config(256, 1, 96, block(variant))
        how = {"cache": "int8", "weights": "int4", "verify": "quick"}
        made = export(sources(config), "ort-native", folder, calibrate=text, max_loss=4.0, **how)
        certificate = made.certificate
        assert certificate is not None
        assert certificate["passed"] and certificate["checks"]["operators"]["compared"]
        states = {state.past.split(".")[-1]: state.dtype for state in load(folder).manifest.states}
        others = {states.pop(name, "float32") for name in ("products", "gate")}
        assert others == {"float32"} and {*states.values()} == {"int8"}


@built
def test_caches_in_float16_pass_the_grid_within_the_bound_of_their_rounding(tmp_path: Path) -> None:
    for variant in ("rope", "fox"):
        config = decoder_config(256, 1, 96, block(variant))
        how = {"cache": "float16", "verify": "quick"}
        made = export(sources(config), "ort-native", tmp_path / variant, **how)
        certificate = made.certificate
        assert certificate is not None and certificate["passed"]
        assert certificate["checks"]["operators"]["compared"]
        assert made.reference is not None and made.reference.noise == 2.0**-11 * math.sqrt(2 / 3)
        assert 0 < exported_error(certificate) <= made.reference.tolerance
        states = {state.past.split(".")[-1]: state.dtype for state in made.states}
        assert {states.pop("gate", "float32")} == {"float32"}
        assert states == {"key": "float16", "value": "float16"}


@built
def test_caches_in_float16_take_half_the_memory(tmp_path: Path) -> None:
    memory = []
    for cache in (None, "float16"):
        folder = tmp_path / str(cache)
        exported(folder, decoder("rope"), "ort-native", cache=cache)
        memory.append(load(folder, threads=1).session().memory_of(1, 600))
    assert memory[1] == memory[0] / 2


def test_a_cache_in_float16_that_another_operator_reads_is_refused_by_name(tmp_path: Path) -> None:
    said = "read by CachedAttention alone for cache float16, got past_key_values.0.key read by"
    with pytest.raises(ValueError, match=f"{said} .* with encoding shaw.*; omit cache$"):
        _exported(block("shaw-bert"), tmp_path / "artefact", cache="float16")


@built
def test_the_manifest_names_the_operators_and_their_version(tmp_path: Path) -> None:
    manifest = export(sources(decoder("rope")), "ort-native", tmp_path / "a", verify=False)
    assert manifest.opset[DOMAIN] == 1 and manifest.operators[OPERATOR] == 2
    assert manifest.continuation_rows == 0
    with pytest.raises(ValueError, match="expected provider cpu for target ort-native, got cuda"):
        load(tmp_path / "a", provider="cuda")


def test_without_the_library_load_says_what_to_install(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    exported(tmp_path / "a", decoder("rope"), "ort-native")
    exported(tmp_path / "b", decoder("rope", causal=False), "ort-native")
    monkeypatch.setattr(kernel_library, "path", lambda: None)
    said = r"expected posenc-export-kernels for .*; pip install 'posenc-export\[native\]'$"
    with pytest.raises(ModuleNotFoundError, match=said):
        load(tmp_path / "a")
    load(tmp_path / "b")  # without a cache, whose operators every runtime has
    assert set(TARGETS) - set(runnable()) == {"ort-native"}


@built
def test_another_library_is_refused_by_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    exported(tmp_path / "a", decoder("rope"), "ort-native")
    other = tmp_path / "other.so"
    other.write_bytes(b"no library")
    monkeypatch.setenv(kernel_library.VARIABLE, str(other))
    with pytest.raises(ValueError, match="expected a posenc-export-kernels that ONNX Runtime"):
        load(tmp_path / "a")
