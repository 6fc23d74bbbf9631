"""Validation of posenc.json: every invalid content is refused with a message of one line that
names the field.
"""

import hashlib
import json
import os
import shutil
from pathlib import Path
from typing import Any, Callable

import pytest

from posenc_export.commands.cli import main
from posenc_export.runtime import load
from posenc_export.runtime.artefact import files
from posenc_export.runtime.artefact import manifest as manifests
from posenc_export.runtime.artefact.schema import INTERFACE
from tests.tiny import block, decoder
from tests.traces import artefact

pytestmark = pytest.mark.xdist_group("manifest")  # one worker, which exports for them once
Content = dict[str, Any]


@pytest.fixture(scope="module")
def made() -> dict[str, Path]:
    """A few artefacts. Tests must not change them."""
    folders = {name: artefact(block("rope"), name) for name in ("onnx", "ort", "torchscript")}
    return {**folders, "decoder": artefact(decoder("alibi"), "ort")}


def _changed(source: Path, folder: Path, change: Callable[[Content], Any]) -> Path:
    """Copy an artefact, apply `change` to its manifest, and update the seal."""
    folder.mkdir()
    for path in source.iterdir():
        (folder / path.name).write_bytes(path.read_bytes())
    content = json.loads((folder / manifests.FILE_NAME).read_text())
    del content["seal"]
    change(content)
    reseal(folder, content)
    return folder


def reseal(folder: Path, content: Content) -> None:
    """Write a manifest with a valid seal."""
    seal = hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()
    (folder / manifests.FILE_NAME).write_text(json.dumps({**content, "seal": seal}))


def _set(*path: Any) -> Callable[[Content], None]:
    """Return a function that sets an item of nested JSON: its keys and indices, then its value."""
    *keys, last = (int(part) if str(part).isdecimal() else part for part in path[:-1])

    def change(content: Any) -> None:
        for part in keys:
            content = content[part]
        content[last] = path[-1]

    return change


def test_a_graph_with_a_later_interface_is_refused(made: dict[str, Path], tmp_path: Path) -> None:
    later = _changed(made["ort"], tmp_path / "later", _set("interface", INTERFACE + 1))
    got = f"got interface {INTERFACE + 1}; install the version of posenc-export that wrote it"
    with pytest.raises(ValueError, match=f"graph interface {INTERFACE} or below, {got}"):
        load(later)


def test_an_artefact_that_states_no_interface_is_read(
    made: dict[str, Path], tmp_path: Path
) -> None:
    place = _changed(made["ort"], tmp_path / "earlier", lambda content: content.pop("interface"))
    earlier = manifests.read(place)
    assert earlier.interface == 0 and "interface" not in earlier.to_json()


@pytest.mark.parametrize("name", ["model.onnx", "model.onnx.data", "reference.bin"])
def test_no_file_is_hashed_before_all_sizes_agree(
    name: str, made: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shutil.copytree(made["ort"], tmp_path / "large")
    os.truncate(tmp_path / "large" / name, 1 << 40)
    monkeypatch.setattr(files, "entry", lambda path: pytest.fail(f"{path.name} is hashed"))
    said = f"expected {name} with .* bytes and sha256 .*, got {1 << 40} bytes; export again"
    for read in (load, manifests.read):
        with pytest.raises(ValueError, match=said):
            read(tmp_path / "large")


# By artefact: the path of an item of the manifest, its new value, and what the refusal says.
CHANGES: dict[str, list[tuple[str, Any, str]]] = {
    "ort": [("extra", 1, "unknown field `extra`"), ("states/0/extra", 1,
        r"unknown field `extra` - at `\$.states\[0\]`"), ("kind", "blocks", r"\$.kind"), ("kind",
        "block\n", r"\$.kind"), ("target", "eager", r"\$.target"), ("dtype", "float64",
        r"\$.dtype"), ("states/1/dtype", "object", r"\$.states\[1\].dtype"), ("chunk", "512",
        r"Expected `int`, got `str` - at `\$.chunk`"), ("contiguous", 1,
        r"Expected `bool`, got `int` - at `\$.contiguous`"), ("states", 0,
        r"Expected `array`, got `int` - at `\$.states`"), ("files", None, r"\$.files"), ("chunk", 0,
        r">= 1 - at `\$.chunk`"), ("states/0/axes/1", -3, r"\$.states\[0\].axes\[1\]"),
        ("states/0/axes/1", 2**40, r"\$.states\[0\].axes\[1\]"), ("states/0/axes",
        ["batch_size"] * 9, r"\$.states\[0\].axes"), ("states/0/past", "x" * 1000,
        r"\$.states\[0\].past"), ("files/model.onnx/sha256", "0", r"\$.files\[...\].sha256"),
        ("states/0/update", "append",
        "states.0..update to be in_place or replace, got append"), ("states/0/axis",
        1, "names of axes of states.0. by index to be .0: 'batch_size', 1: 'capacity'."),
        ("states/0/axis", 7, "names of axes of states.0. by index to be"), ("states/0/axes/1",
        "capacity", "names of axes of states.0. by index to be"), ("states/0/axes/0", 4,
        "names of axes of states.0. by index to be"), ("states/0/present", "present.1.key",
        "states.0..present to be present.0.key"), ("states/0/fill", -1,
        "fill to be 0, got -1"), ("weights", {"format": "int2"},
        r"\$.weights.format"), ("cache", "int8",
        "int8 states exactly with cache int8, for target ort or ort-native in float32, got 0"),
        ("cache", "float16",
        "float16 states exactly with cache float16, for target ort-native in float32, got 0"),
        ("inputs/1/name", "weights", "inputs.1. to be .*, got weights"), ("inputs/1/dtype",
        "int64", r"inputs.1. to be seqlens_k int32 .*, got seqlens_k int64"), ("inputs/2/axes",
        ["batch_size"], r"inputs.2. to be total_sequence_length int32 \[\]"), ("inputs/0/axes/2",
        47, "inputs.0. to be hidden_states float32"), ("outputs/0/name", "logits",
        "outputs.0. to be output float32"), ("inputs/1/name", "logits_index",
        "inputs.1. to be .*, got logits_index"), ("max_positions", 4096,
        "config.max_positions to be 4096, got 1100"), ("files", {},
        "among files for target ort to be .'model.onnx'., got .."), ("target", "torchscript",
        "inputs.1:. for target torchscript to be .'position_ids'."), ("certificate",
        {"passed": "yes"}, r"\$.passed"),
        ("certificate", {"passed": True, "tolerance": 1.0, "provider": "cpu", "cells": {}},
        r"\$.cells"), ("schema", 2, "expected schema 4, got 2; export again")],
    "onnx": [("signature", "mask", "inputs.1. to be .*, got position_ids"),
        ("layout", "rows", "layout for target onnx to be columns, got rows"),
        ("states/0/reads_hidden", False, "reads_hidden to be false only for in-place states"),
        ("capacity_bucket", 256, "capacity_bucket of at most 0 for target onnx, got 256"),
        ("axes", 2, "inputs.1. to be position_ids int64 .3, ")],
    "torchscript":
        [("weights", {"format": "int4"}, "expected model.onnx in float32 for weights of few bits")],
    "decoder": [("inputs/1/axes/1", "sequence_length",
        r"inputs.1. to be logits_index int64 .*'logits_count'"), ("outputs/0/axes/1",
        "sequence_length", "outputs.0. to be logits float32 .*'logits_count'"),
        ("config/tokens/vocabulary", 60, "outputs.0. to be logits float32"),
        ("config/tokens/vocabulary", "61",
        "config.tokens.vocabulary to be a whole number of at least 1, got '61'"), ("config", {},
        "config.kind to be decoder, got None"), ("config/tokens", [],
        "config.tokens to be an object")],
}  # fmt: skip


def _add(name: str) -> Callable[[Content], None]:
    """Return a function that adds a file, with the entry of model.onnx."""
    return lambda content: content["files"].update({name: content["files"]["model.onnx"]})


MORE = {"name": "cache_position", "dtype": "int64", "axes": ["batch_size", "sequence_length"]}
CASES: dict[str, tuple[str, Callable[[Content], Any], str]] = {
    **{f"{target}: {path} {value!r:.20}": (target, _set(*path.split("/"), value), said) for target,
        rows in CHANGES.items() for path, value, said in rows},
    "missing field": ("ort", lambda content: content.pop("states"), "required field `states`"),
    "name twice": ("ort", lambda content: content["states"].append(content["states"][0]),
        "expected unique names of inputs"),
    "three outputs": ("ort", lambda content: content["outputs"].extend(content["outputs"] * 2),
        r"\$.outputs"),
    "two outputs": ("ort",
        lambda content: content["outputs"].append({**content["outputs"][0], "name": "more"}),
        "a second output exactly for a model without caches"),
    "two graphs": ("ort", _add("model.pt"), "got .'model.onnx', 'model.pt'."),
    "file elsewhere": ("ort", _add("../model.onnx"), r"at `key` in `\$.files`"),
    "file of a line break": ("ort", _add("a\nb"), r"at `key` in `\$.files`"),
    "manifest in itself": ("ort", _add("posenc.json"), "got .'model.onnx', 'posenc.json'."),
    "inputs by position": ("torchscript", lambda content: content["inputs"].append(MORE),
        "for target torchscript to be .'position_ids'."),
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_a_manifest_that_contradicts_itself_is_refused_with_the_field(
    name: str, made: dict[str, Path], tmp_path: Path
) -> None:
    target, change, said = CASES[name]
    with pytest.raises(ValueError, match=said) as refusal:
        load(_changed(made[target], tmp_path / "changed", change), provider="cpu")
    assert "\n" not in str(refusal.value) and str(tmp_path / "changed") in str(refusal.value)


TEXTS: dict[str, tuple[bytes, str]] = {
    "nothing": (b"", "Input data was truncated"),
    "an empty object": (b"{}", "expected schema 4, got none; export again"),
    "no object": (b"[]", "expected a JSON object in posenc.json, got list"),
    "no JSON": (b"{", "Input data was truncated"),
    "no UTF-8": (b'{"kind": "\xff"}', "codec can't decode byte 0xff"),
    "a number too large": (b'{"kind": 1e999}', "Number out of range"),
    "not a number": (b'{"kind": NaN}', "JSON is malformed: invalid character"),
    "a number of many digits": (b'{"kind": ' + b"9" * 10_000 + b"}", "Integer value out of range"),
    "half a character": (b'{"kind": "\\ud800 and more"}', "surrogate"),
    "depth": (b'{"a":' * 100_000, "deeper nesting than can be read"),
    "closed depth": (b"[" * 50_000 + b"]" * 50_000, "deeper nesting than can be read"),
    "depth that can be read": (
        b'{"schema": 4, "a": ' + b"[" * 900 + b"]" * 900 + b"}",
        "content of another digest",
    ),
}


@pytest.mark.parametrize("name", TEXTS)
def test_a_manifest_that_is_no_plain_json_is_refused_in_one_line_for_that_reason(
    name: str, tmp_path: Path
) -> None:
    content, said = TEXTS[name]
    (tmp_path / manifests.FILE_NAME).write_bytes(content)
    with pytest.raises(ValueError, match=said) as refusal:
        manifests.read(tmp_path)
    assert "\n" not in str(refusal.value) and len(str(refusal.value)) < 1000


def test_a_digest_that_came_another_way_is_compared(made: dict[str, Path], tmp_path: Path) -> None:
    digest = manifests.read(made["ort"]).digest
    assert manifests.read(made["ort"], digest) == manifests.read(made["ort"])
    changed = _changed(made["ort"], tmp_path / "changed", _set("chunk", 511))
    got = "got [0-9a-f]{64}; take the artefact from where the digest came from"
    with pytest.raises(ValueError, match=f"expected digest {digest}, {got}"):
        manifests.read(changed, digest)


def test_inspect_prints_the_digest(made: dict[str, Path], capsys: pytest.CaptureFixture) -> None:
    digest = manifests.read(made["ort"]).digest
    assert main(["inspect", str(made["ort"])]) == 0
    assert f"digest       {digest}\n" in capsys.readouterr().out
    assert main(["inspect", str(made["ort"]), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["digest"] == digest


def test_the_digest_covers_file_hashes_and_not_the_certificate(
    made: dict[str, Path], tmp_path: Path
) -> None:
    manifest = manifests.read(made["ort"])
    certificate = {"passed": True, "tolerance": 1e-5, "provider": "cpu", "cells": {"a": 1e-7}}
    assert manifest.replace(certificate=certificate).digest == manifest.digest
    other = {"model.onnx": manifests.File("0" * 64, 1)}
    assert manifest.replace(files=other).digest != manifest.digest


def test_a_manifest_comes_back_as_it_was_written(made: dict[str, Path], tmp_path: Path) -> None:
    for name, path in made.items():
        shutil.copytree(path, tmp_path / name)
        manifest, written = manifests.read(path), tmp_path / name / manifests.FILE_NAME
        written.unlink()
        manifests.write(manifest, tmp_path / name)
        assert written.read_bytes() == (path / manifests.FILE_NAME).read_bytes()
        assert manifests.read(tmp_path / name) == manifest


def test_slots_behind_a_row_are_hidden_only_where_nothing_reads_them() -> None:
    def read_hidden(name: str, target: str, signature: Any = "positions") -> list[bool]:
        states = manifests.read(artefact(block(name), target, signature=signature)).states
        return [state.reads_hidden for state in states]

    assert read_hidden("rope", "ort") == [False, False]
    assert read_hidden("rope", "ort", "mask") == [True, True]
    assert all(read_hidden("rope", "onnx-static"))
    assert read_hidden("cope", "ort") == [True, False]
