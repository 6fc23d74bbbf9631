"""Archives that would run code when torch loads them, and damaged archives: both are refused
with a message of one line.
"""

import contextlib
import functools
import io
import json
import os
import pickle
import shutil
import struct
import zipfile
from pathlib import Path
from typing import Any, Callable

import pytest
import torch

from posenc_export.runtime import load
from posenc_export.runtime.artefact import archive, files, pt2_archive
from posenc_export.runtime.artefact import manifest as manifests
from posenc_export.runtime.artefact.archive import packed, read_entries
from posenc_export.shared.foreign import FOREIGN
from tests.tiny import block
from tests.traces import artefact

pytestmark = pytest.mark.xdist_group("torch files")  # one worker, which exports for them once
Entries = dict[str, bytes]
PROGRAM, WEIGHTS, CONSTANTS = pt2_archive.PROGRAM, *pt2_archive.CONFIGS


@pytest.fixture(scope="module")
def made() -> dict[str, Path]:
    return {target: artefact(block("rope"), target) for target in ("pt2", "torchscript")}


def _resealed(source: Path, folder: Path, content: bytes) -> Path:
    """Copy an artefact, replace its graph file, and update its manifest."""
    shutil.copytree(source, folder)
    manifest, name = manifests.read(source), _graph(source).name
    (folder / name).write_bytes(content)
    listed = {**manifest.files, name: files.entry(folder / name)}
    manifests.write(manifest.replace(files=listed), folder)
    return folder


def _graph(folder: Path) -> Path:
    return next(path for path in folder.iterdir() if path.name.startswith("model."))


class Marker:
    """An object that creates a file when it is unpickled."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return os.system, (f"touch {self.path}",)


def _saved(value: Any) -> bytes:
    buffer = io.BytesIO()
    torch.save(value, buffer)
    return buffer.getvalue()


def _json(entries: Entries, name: str, change: Callable[[Any], Any]) -> None:
    root = pt2_archive._root(entries)
    content = json.loads(entries[root + name])
    change(content)
    entries[root + name] = json.dumps(content).encode()


Evil = Callable[[Entries, Path], None]


def _entry(name: str, config: str = "", pickled: Any = _saved, **keys: Any) -> Evil:
    """Add a pickle that runs something, and what the config of tensors says of its first."""

    def plant(entries: Entries, marker: Path) -> None:
        entries[pt2_archive._root(entries) + name] = pickled(Marker(marker))
        if config:
            _json(entries, config, lambda c: next(iter(c["config"].values())).update(**keys))

    return plant


def _program(change: Callable[[Any, str], Any]) -> Evil:
    return lambda entries, marker: _json(
        entries,
        PROGRAM,
        lambda content: change(content, f"__import__('os').system('touch {marker}')"),
    )


def _size(text: str) -> Evil:
    """Write a text, in which CODE stands for code, in place of the first size."""

    def change(content: Any, code: str) -> None:
        first = next(iter(content["graph_module"]["graph"]["sym_int_values"].values()))
        first["as_expr"]["expr_str"] = text.replace("CODE", code)

    return _program(change)


def _node(change: Callable[[Any, str], Any]) -> Evil:
    return _program(
        lambda content, code: change(content["graph_module"]["graph"]["nodes"][0], code)
    )


def _target(name: str) -> Evil:
    return _node(lambda node, code: node.update(target=name))


CONTAINER = '[1, {"type": "os.path", "context": "null", "children_spec": []}]'
EVIL: dict[str, Evil] = {
    "sample inputs": _entry("data/sample_inputs/model.pt"),
    "legacy weights": _entry("data/weights/model.pt"),
    "legacy constants": _entry("data/constants/model.pt"),
    "pickled weight": _entry("data/weights/weight_0", WEIGHTS, use_pickle=True),
    "opaque constant": _entry(
        "data/constants/opaque_obj_0",
        CONSTANTS,
        pickle.dumps,
        path_name="opaque_obj_0",
        use_pickle=True,
    ),
    "second program": _entry("models/other.json"),
    "compiled library": _entry("data/aotinductor/model/model.so"),
    "extra file": _entry("extra/notes"),
    "guard": _program(lambda content, code: content.update(guards_code=[code])),
    "size that is evaluated": _size("CODE"),
    "size with an attribute": _size("Symbol('s0').__class__"),
    "size without end": _size("Pow(Integer(9), Pow(Integer(9), Integer(9)))"),
    "size that is called": _size("Add(CODE)"),
    "system as an operator": _target("torch.os.system"),
    "loader as an operator": _target("torch.load"),
    "file as an operator": _target("torch.ops.aten.from_file.default"),
    "function of Python as an operator": _target("_operator.attrgetter"),
    "attribute of a difference": _target("_operator.sub.__call__"),
    "operator outside ATen": _target("torch.ops.posenc.append.default"),
    "code as a name": _node(lambda node, code: node.update(name=code)),
    "code as an input": _program(
        lambda content, code: content["graph_module"]["graph"]["inputs"][0]["as_tensor"].update(
            name=f"x={code}"
        )
    ),
    "text": _node(lambda node, code: node["inputs"][0].update(arg={"as_string": "/etc/passwd"})),
    "type of a container": _program(
        lambda content, code: content["graph_module"]["module_call_graph"][0]["signature"].update(
            in_spec=CONTAINER
        )
    ),
    "depth": _program(
        lambda content, code: content.update(range_constraints=json.loads("[" * 200 + "]" * 200))
    ),
}


def _entries(made: dict[str, Path]) -> Entries:
    return read_entries((made["pt2"] / "model.pt2").read_bytes())


@pytest.mark.parametrize("name", EVIL)
def test_an_archive_that_would_run_something_is_refused_by_name(
    name: str, made: dict[str, Path], tmp_path: Path
) -> None:
    entries = _entries(made)
    EVIL[name](entries, tmp_path / "marker")
    with pytest.raises(ValueError, match="runtime: model.pt2: .*; export again") as refusal:
        load(_resealed(made["pt2"], tmp_path / "evil", packed(entries)), provider="cpu")
    assert "\n" not in str(refusal.value) and not (tmp_path / "marker").exists()


@pytest.mark.parametrize(
    "name", ["pickled weight", "opaque constant", "sample inputs", "size that is evaluated"]
)
def test_torch_alone_runs_what_those_archives_hold(
    name: str, made: dict[str, Path], tmp_path: Path
) -> None:
    """Shows that the refusals above are needed."""
    entries = _entries(made)
    EVIL[name](entries, tmp_path / "marker")
    # torch may fail after it has run the code.
    with contextlib.suppress(*FOREIGN, torch._export.verifier.SpecViolationError):
        torch.export.load(io.BytesIO(packed(entries))).module()
    assert (tmp_path / "marker").exists()


def test_an_archive_with_two_entries_of_a_name_is_refused(
    made: dict[str, Path], tmp_path: Path
) -> None:
    content = io.BytesIO((made["pt2"] / "model.pt2").read_bytes())
    with zipfile.ZipFile(content, "a") as twice, pytest.warns(UserWarning, match="Duplicate name"):
        twice.writestr(twice.namelist()[0], b"other")
    with pytest.raises(ValueError, match="expected unique names of entries"):
        load(_resealed(made["pt2"], tmp_path / "twice", content.getvalue()), provider="cpu")


DAMAGES = [
    lambda c: b"",
    lambda c: b"PK",
    lambda c: c[:1000],
    lambda c: c[:-30],
    lambda c: c[:200] + bytes(200) + c[400:],
    lambda c: bytes(len(c)),
]


@pytest.mark.parametrize("target", ["pt2", "torchscript"])
@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_file_is_refused_in_one_line(
    damage: Callable[[bytes], bytes], target: str, made: dict[str, Path], tmp_path: Path
) -> None:
    graph = _graph(made[target])
    damaged = _resealed(made[target], tmp_path / "damaged", damage(graph.read_bytes()))
    try:
        load(damaged, provider="cpu")
    except ValueError as refusal:
        assert f"runtime: {graph.name}" in str(refusal) and "\n" not in str(refusal)


def _deflated(content: bytes) -> bytes:
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", zipfile.ZIP_DEFLATED) as written:
        for name, stored in read_entries(content).items():
            written.writestr(name, bytes(1 << 24) if len(stored) > 4096 else stored)
    return buffer.getvalue()


def _directory(content: bytes, change: Callable[[bytearray, int], None]) -> bytes:
    """Apply `change` to the record of each entry in the directory, given the archive and the
    first byte of the record.
    """
    changed, at = bytearray(content), content.find(b"PK\1\2")
    while changed[at : at + 4] == b"PK\1\2":
        change(changed, at)
        at += 46 + sum(struct.unpack_from("<HHH", changed, at + 28))
    return bytes(changed)


def _overlapping(content: bytes) -> bytes:
    largest = max(zipfile.ZipFile(io.BytesIO(content)).infolist(), key=lambda info: info.file_size)

    def point(archive: bytearray, at: int) -> None:
        struct.pack_into("<II", archive, at + 20, largest.file_size, largest.file_size)
        struct.pack_into("<I", archive, at + 42, largest.header_offset)

    return _directory(content, point)


@functools.cache
def _many(name: str, count: int) -> bytes:
    """Return an archive of empty entries."""
    return packed({f"a/{number}{name}": b"" for number in range(count)})


HOSTILE: dict[str, Callable[[bytes], bytes]] = {
    "entries that are stored without compression": _deflated,
    "entries inside the file": lambda content: _directory(
        content, lambda archive, at: struct.pack_into("<II", archive, at + 20, 1 << 30, 1 << 30)
    ),
    "entries that are together at most as large": _overlapping,
    "at most 65536 entries": lambda content: content + _many("", 65537),
    "a zip archive with a directory of at most": lambda content: content + _many("x" * 60000, 300),
}


@pytest.mark.parametrize("target", ["pt2", "torchscript"])
@pytest.mark.parametrize("rule", HOSTILE)
def test_an_archive_that_would_be_larger_in_memory_than_on_disk_is_refused(
    rule: str, target: str, made: dict[str, Path], tmp_path: Path
) -> None:
    graph = _graph(made[target])
    hostile = _resealed(made[target], tmp_path / "hostile", HOSTILE[rule](graph.read_bytes()))
    said = f"runtime: {graph.name}: expected {rule}.*, got .*; export again"
    with pytest.raises(ValueError, match=said):
        load(hostile, provider="cpu")


def test_an_empty_entry_of_a_tensor_that_torch_would_fill_with_zeros_is_refused(
    made: dict[str, Path], tmp_path: Path
) -> None:
    entries = _entries(made)
    entries[pt2_archive._root(entries) + "data/weights/weight_0"] = b""
    said = "expected the bytes of each tensor in .*, got an empty entry for"
    with pytest.raises(ValueError, match=said):
        load(_resealed(made["pt2"], tmp_path / "empty", packed(entries)), provider="cpu")


def test_an_entry_outside_the_folder_of_the_archive_is_refused(
    made: dict[str, Path], tmp_path: Path
) -> None:
    entries = _entries(made)
    entries[PROGRAM] = entries.pop(pt2_archive._root(entries) + PROGRAM)
    said = "expected only entries for a program and its tensors, got 'models/model.json'"
    with pytest.raises(ValueError, match=said):
        load(_resealed(made["pt2"], tmp_path / "outside", packed(entries)), provider="cpu")


def test_json_that_is_too_long_to_be_parsed_is_refused(
    made: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(archive, "LONGEST", 1000)
    with pytest.raises(ValueError, match="expected 'archive/.*json' with at most 1000 bytes, got"):
        load(made["pt2"], provider="cpu")


def test_a_written_archive_holds_no_pickle(made: dict[str, Path]) -> None:
    entries = _entries(made)
    pt2_archive.check(entries)
    assert not any(content.startswith((b"\x80\x02", b"PK")) for content in entries.values())


def test_bytes_of_a_damaged_archive_do_not_fill_the_message() -> None:
    name = "archive/" + "x" * 3000
    content = packed({name: b""}).replace(name.encode(), b"archive/\n" + b"y" * 2999, 1)
    with pytest.raises(ValueError, match="a zip archive, got an error .File name") as damage:
        archive.read_checked(io.BytesIO(content), lambda name: False)
    assert "\n" not in str(damage.value) and len(str(damage.value)) < 400
