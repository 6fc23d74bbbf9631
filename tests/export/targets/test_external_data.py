"""External data: the layout of model.onnx.data, and that modified files are refused."""

import re
from pathlib import Path
from typing import Any, Callable

import numpy as np
import onnx
import onnxruntime
import pytest

from posenc_export.export import TARGETS, export
from posenc_export.export.targets import onnx_file
from posenc_export.models.presets import seeded
from posenc_export.runtime import load
from posenc_export.runtime.artefact import files
from posenc_export.runtime.artefact import manifest as manifests
from tests.tiny import block, decoder
from tests.traces import artefact, exported

ONNX_TARGETS = [name for name in TARGETS if name not in ("torchscript", "pt2")]
DATA = onnx_file.WEIGHTS
# One process exports the artefacts.
pytestmark = pytest.mark.xdist_group("weights beside the graph")


@pytest.fixture(scope="module")
def made() -> dict[str, Path]:
    """An artefact for each target; tests must not modify it."""
    return {target: artefact(decoder("rope"), target) for target in ONNX_TARGETS}


def _initialisers(folder: Path) -> list[Any]:
    return list(onnx.load(folder / "model.onnx", load_external_data=False).graph.initializer)


def _places(folder: Path) -> dict[str, dict[str, str]]:
    """Location, offset and length of each initialiser outside the graph."""
    external = onnx.TensorProto.EXTERNAL
    outside = [tensor for tensor in _initialisers(folder) if tensor.data_location == external]
    return {one.name: {entry.key: entry.value for entry in one.external_data} for one in outside}


@pytest.mark.parametrize("target", ONNX_TARGETS)
def test_every_large_tensor_is_external_and_page_aligned(
    target: str, made: dict[str, Path]
) -> None:
    places, end = _places(made[target]), 0
    sizes = {tensor.name: len(tensor.raw_data) for tensor in _initialisers(made[target])}
    assert places and all(size < onnx_file.SMALL for size in sizes.values())
    for place in places.values():
        offset, length = int(place["offset"]), int(place["length"])
        assert place["location"] == DATA and length >= onnx_file.SMALL
        assert offset % onnx_file.PAGE == 0 and end <= offset < end + onnx_file.PAGE
        end = offset + length
    assert (made[target] / DATA).stat().st_size == end


@pytest.mark.parametrize("target", ONNX_TARGETS)
def test_the_manifest_lists_size_and_hash_of_graph_and_weights(
    target: str, made: dict[str, Path]
) -> None:
    listed = manifests.read(made[target]).files
    for name in ("model.onnx", DATA):
        assert files.entry(made[target] / name) == listed[name]


def test_the_weights_in_the_file_are_those_of_the_module(tmp_path: Path) -> None:
    model = seeded(block("rope", width=64))
    export(model, "onnx", tmp_path / "artefact", verify=False)
    tensors = onnx.load(tmp_path / "artefact" / "model.onnx").graph.initializer
    stored = [onnx.numpy_helper.to_array(tensor) for tensor in tensors]
    matrices = [one.detach().numpy() for one in model.parameters() if one.ndim == 2]
    assert matrices
    for matrix in matrices:  # a projection is stored transposed, as MatMul reads it
        assert any(np.array_equal(array, matrix.T) for array in stored)


@pytest.mark.parametrize("target", ["onnx", "onnx-static", "ort"])
def test_plain_onnx_runtime_loads_the_two_files_from_one_folder(
    target: str, made: dict[str, Path], tmp_path: Path
) -> None:
    folder = tmp_path / "elsewhere"
    folder.mkdir()
    for name in ("model.onnx", DATA):
        (folder / name).write_bytes((made[target] / name).read_bytes())
    path, providers = str(folder / "model.onnx"), ["CPUExecutionProvider"]
    session = onnxruntime.InferenceSession(path, providers=providers)
    assert session.get_inputs()[0].name == "input_ids"


def test_a_graph_without_large_tensors_has_no_external_data(tmp_path: Path) -> None:
    config = block("nope", width=8, heads=1, kv_heads=1, head_size=8)
    assert DATA not in export(seeded(config), "onnx", tmp_path / "artefact", verify=False).files
    assert not (tmp_path / "artefact" / DATA).exists()
    load(tmp_path / "artefact", provider="cpu")


def _flipped(content: bytes) -> bytes:
    return content[:100] + bytes([content[100] ^ 1]) + content[101:]


CHANGES: dict[str, Callable[[bytes], bytes]] = {
    "one bit": _flipped,
    "truncated": lambda content: content[:-1],
    "longer": lambda content: content + b"\0",
}


@pytest.mark.parametrize(("name", "change"), [("model.onnx", "one bit"), (DATA, "truncated")])
def test_a_changed_graph_or_size_is_refused_before_onnx_runtime_reads_it(
    name: str, change: str, made: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = exported(tmp_path / "artefact", decoder("rope"), "ort")
    (folder / name).write_bytes(CHANGES[change]((folder / name).read_bytes()))
    read = lambda *_, **__: pytest.fail("it was read")  # noqa: E731
    monkeypatch.setattr(onnxruntime, "InferenceSession", read)
    with pytest.raises(ValueError, match=f"expected {name} with"):
        load(folder, provider="cpu")


def test_changed_weights_are_refused_also_where_onnx_runtime_fails_on_them(
    made: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = exported(tmp_path / "artefact", decoder("rope"), "ort")
    (folder / DATA).write_bytes(_flipped((folder / DATA).read_bytes()))

    def refuse(*_: Any, **__: Any) -> None:
        raise RuntimeError("no session")

    monkeypatch.setattr(onnxruntime, "InferenceSession", refuse)
    with pytest.raises(ValueError, match=f"expected {DATA} with"):
        load(folder, provider="cpu")


@pytest.mark.parametrize("change", CHANGES)
def test_weights_that_are_not_those_of_the_manifest_are_refused(
    change: str, made: dict[str, Path], tmp_path: Path
) -> None:
    path = exported(tmp_path / "artefact", decoder("rope"), "ort") / DATA
    path.write_bytes(CHANGES[change](path.read_bytes()))
    said = rf"{re.escape(DATA)} with \d+ bytes and sha256 .*, got .*; export again"
    with pytest.raises(ValueError, match=said):
        load(path.parent, provider="cpu")


def test_missing_weights_are_refused(made: dict[str, Path], tmp_path: Path) -> None:
    path = exported(tmp_path / "artefact", decoder("rope"), "ort") / DATA
    path.unlink()
    said = f"expected the file {re.escape(DATA)}, got none; export again"
    with pytest.raises(ValueError, match=said):
        load(path.parent, provider="cpu")


def test_a_listed_weights_file_that_is_too_short_for_the_graph_is_refused(
    made: dict[str, Path], tmp_path: Path
) -> None:
    folder = exported(tmp_path / "artefact", decoder("rope"), "ort")
    (folder / DATA).write_bytes((folder / DATA).read_bytes()[:-1])
    _resealed(folder, made["ort"])
    said = "runtime: expected model.onnx to be a graph that ONNX Runtime loads, got"
    with pytest.raises(ValueError, match=said):
        load(folder, provider="cpu")


def _resealed(folder: Path, source: Path) -> None:
    """Write the manifest of the source with the current digests of the files."""
    manifest = manifests.read(source)
    listed = {name: files.entry(folder / name) for name in manifest.files}
    manifests.write(manifest.replace(files=listed), folder)


@pytest.mark.parametrize("shape", [(3, 5), (5, 3, 2), (7,), ()])
@pytest.mark.parametrize("dtype", ["float32", "float16", ">f4"])
def test_blocks_are_the_bytes_of_an_array_in_row_major_little_endian_order(
    shape: Any, dtype: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(onnx_file, "BLOCK", 24)
    array = np.arange(np.prod(shape, dtype=int)).reshape(shape).astype(dtype)
    wanted = array.T.astype(array.dtype.newbyteorder("<")).tobytes()
    with files.writing(tmp_path / "some") as stream:
        onnx_file.write_array(stream, array.T)
    assert (tmp_path / "some").read_bytes() == wanted


def test_a_file_that_is_written_in_parts_is_hashed_while_it_is_written(tmp_path: Path) -> None:
    with files.writing(tmp_path / "some") as stream:
        stream.write(b"abc")
        stream.align(16)
        stream.write(memoryview(b"d"))
    assert (tmp_path / "some").read_bytes() == b"abc" + bytes(13) + b"d"
    assert stream.entry() == files.entry(tmp_path / "some")
