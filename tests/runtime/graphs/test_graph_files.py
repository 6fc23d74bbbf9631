"""The graph of an artefact must agree with its manifest: names, dtypes and shapes, and external
data in files that the manifest lists.
"""

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Callable

import numpy as np
import onnx
import onnxruntime
import pytest
from onnx import TensorProto, helper

from posenc_export.export import export
from posenc_export.runtime import load
from posenc_export.runtime.artefact import manifest as manifests
from posenc_export.runtime.artefact.manifest import Manifest
from posenc_export.runtime.artefact.rules import check_graph
from posenc_export.runtime.graphs import onnx_files
from tests.cases import choice
from tests.tiny import block, decoder, encoder
from tests.traces import artefact, sources

# The worker of tests/runtime/artefact/test_manifest.py, which has traced the same model.
pytestmark = pytest.mark.xdist_group("manifest")


@pytest.fixture(scope="module")
def manifest() -> Manifest:
    """Return the manifest of a block."""
    return manifests.read(artefact(block("rope"), "ort"))


TYPED = {
    "encoder": (encoder("learned"), "positions"),
    "fox": (decoder("fox"), "positions"),
    "recurrent": (block("recurrent"), "positions"),
    "mask": (block("alibi"), "mask"),
}


@pytest.mark.parametrize("target", choice(["onnx", "onnx-static"], ["onnx"]))
@pytest.mark.parametrize(("config", "signature"), TYPED.values(), ids=list(TYPED))
def test_every_output_is_typed_and_the_checker_infers_the_same(
    config: Any, signature: str, target: str, tmp_path: Path
) -> None:
    manifest = export(sources(config), target, tmp_path / "a", signature=signature, verify=False)
    model = onnx.load(tmp_path / "a" / "model.onnx")
    onnx.checker.check_model(model, full_check=True)
    names = [manifest.outputs[0].name, *(state.present for state in manifest.states)]
    assert [value.name for value in model.graph.output] == names
    types = [value.type.tensor_type for value in model.graph.output]
    assert all(one.elem_type and len(one.shape.dim) for one in types)


@dataclass
class Declared:
    """An input or output as ONNX Runtime declares it."""

    name: str
    type: str
    shape: list[Any]


GRAPHS: dict[str, tuple[Callable[[dict[str, Declared]], Any], str]] = {
    "dtype": (lambda values: setattr(values["seqlens_k"], "type", "tensor(int64)"),
        "input seqlens_k to be int32 as in the manifest, got int64"),
    "text": (lambda values: setattr(values["seqlens_k"], "type", "tensor(string)"),
        "input seqlens_k to be int32 as in the manifest, got tensor.string."),
    "rank": (lambda values: setattr(values["seqlens_k"], "shape", ["batch_size", 1]),
        "input seqlens_k to be .'batch_size'. as in"),
    "size": (lambda values: setattr(values["present.0.key"], "shape", ["b", 4, "c", 16]),
        "output present.0.key to be"),
    "free size": (lambda values: setattr(values["output"], "shape", ["b", "s", None]),
        "output output to be"),
    "missing": (lambda values: values.pop("past_key_values.0.value"),
        "every input of the manifest in the graph, got no past_key_values.0.value"),
    "more": (lambda values: values.update(zpresent=Declared("zpresent", "tensor(float)", [])),
        "every output of the graph in the manifest, got no zpresent"),
}  # fmt: skip


@pytest.mark.parametrize("name", GRAPHS)
def test_a_graph_with_other_inputs_or_outputs_than_the_manifest_is_refused(
    name: str, manifest: Manifest
) -> None:
    change, said = GRAPHS[name]
    numpy_to_ort = {"float32": "tensor(float)", "int32": "tensor(int32)"}
    described = [(v.name, v.dtype, v.axes) for v in (*manifest.inputs, *manifest.outputs)]
    described += [(name, s.dtype, s.axes) for s in manifest.states for name in (s.past, s.present)]
    values = {name: Declared(name, numpy_to_ort[kind], [*axes]) for name, kind, axes in described}

    def check() -> None:
        parts: tuple[list[Declared], list[Declared]] = [], []
        for value in values.values():
            parts[value.name.startswith(("present", "zpresent", "output"))].append(value)
        check_graph(manifest, *parts)

    check()
    change(values)
    with pytest.raises(ValueError, match=f"model.onnx: .*{said}"):
        check()


def _external(location: str) -> bytes:
    """Return a serialised model with a nested graph whose constant is in an external file."""
    tensor = TensorProto(name="w", data_type=1, dims=[2], data_location=TensorProto.EXTERNAL)
    tensor.external_data.add(key="offset", value="0")
    tensor.external_data.add(key="location", value=location)
    y, z = (helper.make_tensor_value_info(name, 1, [2]) for name in "yz")
    read = helper.make_node("Identity", ["w"], ["y"])
    inner = helper.make_graph([read], "inner", [], [y], [tensor])
    node = helper.make_node("If", ["c"], ["z"], then_branch=inner, else_branch=inner)
    c = helper.make_tensor_value_info("c", 9, [])
    return _model([node], [c], [z], 23).SerializeToString()


def _model(nodes: Any, inputs: Any, outputs: Any, opset: int) -> onnx.ModelProto:
    graph, opsets = helper.make_graph(nodes, "g", inputs, outputs), [helper.make_opsetid("", opset)]
    return helper.make_model(graph, ir_version=10, opset_imports=opsets)


@pytest.mark.parametrize(
    "location", ["model.onnx.data", "../secret", "/etc/passwd", "*/_ORT_MEM_ADDR_/*"]
)
def test_files_of_external_data_are_found_in_nested_graphs(location: str) -> None:
    assert onnx_files.locations(_external(location)) == {location}


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (b"\x3a", "an integer that extends past"),
        (b"\x3a" + 11 * b"\xff", "of more than ten bytes"),
        (b"\x3b", "wire type 3"),
        (b"\x3a\x7f\x00", "a field that extends past"),
    ],
)
def test_bytes_that_are_not_a_protocol_buffer_are_refused_for_that_reason(
    content: bytes, reason: str
) -> None:
    with pytest.raises(ValueError, match=reason):
        onnx_files.locations(content)


@pytest.mark.parametrize("location", ["weights.bin", "../weights.bin"])
def test_a_graph_that_reads_a_file_the_manifest_does_not_list_is_refused(
    location: str, manifest: Manifest, tmp_path: Path
) -> None:
    folder = tmp_path / "inside"
    for path in (tmp_path, folder):
        path.mkdir(exist_ok=True)
        np.zeros(2, np.float32).tofile(path / "weights.bin")
    (folder / "model.onnx").write_bytes(_external(location))
    listed = {"model.onnx": manifests.files.entry(folder / "model.onnx")}
    manifests.write(manifest.replace(files=listed), folder)
    said = f"expected model.onnx to read files that the manifest lists, got '{location}'"
    with pytest.raises(ValueError, match=re.escape(said)):
        load(folder, provider="cpu")


def test_onnx_runtime_refuses_files_outside_the_folder_too(tmp_path: Path) -> None:
    (tmp_path / "inside").mkdir()
    np.zeros(2, np.float32).tofile(tmp_path / "weights.bin")
    path = tmp_path / "inside" / "model.onnx"
    path.write_bytes(_external("../weights.bin"))
    said = "expected model.onnx to be a graph that ONNX Runtime loads, got .*(escapes|file inside)"
    with pytest.raises(ValueError, match=said), onnx_files.refused(path):
        onnxruntime.InferenceSession(str(path), providers=["CPUExecutionProvider"])


@pytest.mark.parametrize(
    ("version", "message"),
    [
        ("1.22.0", "expected ONNX Runtime 1.28 or newer, got 1.22.0; pip install -U 'posenc-exp"),
        ("9.0.0", "pset 99 .*; it needs an ONNX Runtime newer than 9.0.0: pip install -U 'posenc"),
    ],
)
def test_a_graph_with_an_opset_that_the_runtime_lacks_names_the_version_that_it_needs(
    version: str, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    value = helper.make_tensor_value_info("x", TensorProto.FLOAT, [1])
    other = helper.make_tensor_value_info("y", TensorProto.FLOAT, [1])
    model = _model([helper.make_node("Neg", ["x"], ["y"])], [value], [other], 99)
    monkeypatch.setattr(onnxruntime, "__version__", version)
    with (
        pytest.raises(ValueError, match=re.escape(message).replace(r"\.\*", ".*")),
        onnx_files.refused(tmp_path / "model.onnx"),
    ):
        onnxruntime.InferenceSession(model.SerializeToString())


def test_the_oldest_version_of_onnx_runtime_is_that_of_the_distribution() -> None:
    text = (Path(__file__).parents[3] / "pyproject.toml").read_text()
    assert f'cpu = ["onnxruntime>={onnx_files.OLDEST},' in text
