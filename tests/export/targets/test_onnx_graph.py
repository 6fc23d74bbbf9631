"""model.onnx in other programs: checkers, optimisers and viewers."""

from pathlib import Path

import numpy as np
import onnx
import onnxruntime
import pytest

from posenc_export import __version__
from posenc_export.export import TARGETS
from posenc_export.runtime import load
from posenc_export.runtime.graphs import kernel_library
from posenc_export.shared.numerics import worst_error
from tests.cases import choice
from tests.tiny import block, decoder, encoder
from tests.traces import artefact

# One worker, so that these models are traced once.
pytestmark = pytest.mark.xdist_group("plain runtimes")
ONNX_TARGETS = [name for name in TARGETS if name not in ("torchscript", "pt2")]
KINDS = {
    "rope": decoder("rope"),
    "alibi": decoder("alibi"),
    "recurrent": block("recurrent"),
    "cope": block("cope"),
    "encoder": encoder("learned"),
}
EACH = pytest.mark.parametrize("kind", choice(KINDS, ["rope"]))


def made(kind: str, target: str) -> Path:
    return artefact(KINDS[kind], target)


def _options(target: str) -> onnxruntime.SessionOptions:
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 3
    if target == "ort-native":
        kernel_library.register(options)
    return options


def _run(folder: Path, graph: Path) -> np.ndarray:
    """Return the outputs of a prompt in two chunks and a step, by the session of an artefact
    with the given graph.
    """
    model = load(folder, provider="cpu", threads=1)
    model.graph.ort_session = _opened(graph, _options(model.manifest.target))
    session, manifest = model.session(), model.manifest
    if manifest.kind == "block":
        tokens = np.random.default_rng(0).standard_normal((1, 9, 48)).astype(manifest.dtype)
    else:
        tokens = np.random.default_rng(0).integers(0, 61, (1, 9))
    if not manifest.states:
        return session.prefill(tokens)
    first = session.prefill(tokens[:, :8], chunk=5)
    return np.concatenate((first, session.step(tokens[:, 8])[:, None]), axis=1)


def _opened(graph: Path, options: onnxruntime.SessionOptions) -> onnxruntime.InferenceSession:
    return onnxruntime.InferenceSession(str(graph), options, providers=["CPUExecutionProvider"])


def _agrees(folder: Path, graph: Path) -> bool:
    """Whether another graph gives the outputs of that of an artefact."""
    reference = load(folder, provider="cpu").manifest.reference
    assert reference is not None
    return (
        worst_error(_run(folder, graph), _run(folder, folder / "model.onnx")) <= reference.tolerance
    )


@EACH
@pytest.mark.parametrize("target", ONNX_TARGETS)
def test_every_graph_passes_strict_shape_inference(target: str, kind: str) -> None:
    model = onnx.load(made(kind, target) / "model.onnx")
    onnx.checker.check_model(model, full_check=True)
    how = {"check_type": True, "strict_mode": True, "data_prop": True}
    inferred = onnx.shape_inference.infer_shapes(model, **how)
    assert list(inferred.graph.output) == list(model.graph.output)


@EACH
@pytest.mark.parametrize("target", ONNX_TARGETS)
def test_a_graph_that_onnx_runtime_optimised_and_saved_gives_the_same_answers(
    target: str, kind: str, tmp_path: Path
) -> None:
    folder, options = made(kind, target), _options(target)
    options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_ENABLE_ALL
    # It refers to the external data of the original graph.
    options.optimized_model_filepath = str(tmp_path / "optimised.onnx")
    (tmp_path / "model.onnx.data").write_bytes((folder / "model.onnx.data").read_bytes())
    _opened(folder / "model.onnx", options)
    assert _agrees(folder, tmp_path / "optimised.onnx")


@EACH
@pytest.mark.parametrize("target", ONNX_TARGETS)
def test_a_graph_that_onnxslim_simplified_gives_the_same_answers(
    target: str, kind: str, tmp_path: Path
) -> None:
    onnxslim, folder = pytest.importorskip("onnxslim"), made(kind, target)
    onnx.save(onnxslim.slim(str(folder / "model.onnx")), tmp_path / "slim.onnx")
    assert _agrees(folder, tmp_path / "slim.onnx")


def test_a_bias_is_made_once_and_read_by_the_attention_of_every_layer() -> None:
    graph = onnx.load(made("alibi", "ort") / "model.onnx", load_external_data=False).graph
    biases = {node.input[10] for node in graph.node if node.op_type == "GroupQueryAttention"}
    # Slopes times distances, without mask or copy.
    assert [node.op_type for node in graph.node if set(node.output) & biases] == ["Mul"]


def test_the_tokens_with_logits_are_selected_before_the_last_norm() -> None:
    graph = onnx.load(made("rope", "onnx") / "model.onnx", load_external_data=False).graph
    (chosen,) = [node for node in graph.node if node.op_type == "GatherND"]
    readers = [node.op_type for node in graph.node if chosen.output[0] in node.input]
    assert readers == ["RMSNormalization"]


OPSETS = [
    ("rope", "onnx", 23),
    ("rope", "ort", 23),
    ("rope", "onnx-static", 24),
    ("cope", "ort", 24),
    ("encoder", "onnx-static", 23),
]


@pytest.mark.parametrize(("kind", "target", "opset"), OPSETS)
def test_the_opset_is_24_only_with_tensorscatter(kind: str, target: str, opset: int) -> None:
    graph = onnx.load(made(kind, target) / "model.onnx", load_external_data=False)
    assert [one.version for one in graph.opset_import if not one.domain] == [opset]
    assert (opset == 24) == any(node.op_type == "TensorScatter" for node in graph.graph.node)


@pytest.mark.parametrize("target", ONNX_TARGETS)
def test_every_input_and_output_has_a_doc_string(target: str) -> None:
    graph = onnx.load(made("rope", target) / "model.onnx", load_external_data=False).graph
    assert [value.name for value in (*graph.input, *graph.output) if not value.doc_string] == []


def test_a_viewer_sees_encoding_positions_and_tolerance() -> None:
    folder = made("rope", "ort")
    model = onnx.load(folder / "model.onnx", load_external_data=False)
    properties = {entry.key: entry.value for entry in model.metadata_props}
    assert properties["posenc.encoding"] == "rope in 2 of 2 layers"
    assert properties["posenc.positions"] == "0 .. 1099"
    assert "posenc.json" in properties["posenc.certificate"]
    assert (model.producer_name, model.producer_version) == ("posenc_export", __version__)


@pytest.mark.parametrize("target", ONNX_TARGETS)
def test_matrices_are_named_after_their_parameters(target: str) -> None:
    graph = onnx.load(made("rope", target) / "model.onnx", load_external_data=False).graph
    matrices = {each.name for each in graph.initializer if len(each.dims) == 2}
    parts = "attention.projection.qkv attention.projection.output mlp.gate mlp.up mlp.down".split()
    for layer in range(2):
        assert {f"model.layers.{layer}.{part}.weight.T" for part in parts} <= matrices
