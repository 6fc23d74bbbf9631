"""Saved sessions that were changed, cut or never written by Session.save are refused in one line;
and what a command reads of others.
"""

import copy
import hashlib
import json
import os
import random
import struct
from pathlib import Path
from typing import Any

import pytest

from posenc_export import load
from posenc_export.commands.cli import main
from posenc_export.runtime.artefact import files
from posenc_export.runtime.session import saved
from posenc_export.runtime.session.session import Session
from tests.serve.models import artefact, opened
from tests.tiny import decoder
from tests.traces import artefact as shared_artefact

pytestmark = pytest.mark.xdist_group("serve")  # one worker, which traces the model once


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """A model, the header of a session of it with three tokens, and the bytes of its arrays."""
    path = tmp_path_factory.mktemp("written") / "saved"
    model = opened(artefact("ort"))
    session = model.session()
    session.prefill([[1, 2, 3]])
    session.save(path, [[1, 2, 3]])
    header, _, content = path.read_bytes().partition(b"\n")
    return model, json.loads(header), content


def _sealed(header: Any, content: bytes) -> bytes:
    """Return a file with the digest of its header and content."""
    others = {name: value for name, value in header.items() if name != "sha256"}
    digest = hashlib.sha256(json.dumps(others, sort_keys=True).encode() + content).hexdigest()
    return json.dumps({**others, "sha256": digest}).encode() + b"\n" + content


LENGTHS, STARTS = slice(0, 8), slice(8, 16)
# What is changed in the arrays of a header, and what the message says. The bytes stay the same.
FORMS = {
    "another dtype of the same size":
        (lambda arrays: arrays["state.past_key_values.0.key"].__setitem__(1, "<i4"),
        r"expected state.past_key_values.0.key float32 .*, got int32"),
    "a shape of the same size": (lambda arrays: arrays["state.past_key_values.0.key"][2].reverse(),
        r"expected state.past_key_values.0.key float32 \[1, .*\], got float32 "),
    "rows in place of a number": (lambda arrays: arrays["length"].__setitem__(2, []),
        r"expected length int64 \[0\], got int64 \[\]"),
    "starts of another shape": (lambda arrays: arrays["start"].__setitem__(2, [1, 1]),
        r"expected start int64 \[1\], got int64 \[1, 1\]"),
    "an unknown array": (lambda arrays: arrays["tokens"].__setitem__(0, "words"),
        "expected the arrays .*, got words"),
    "no state": (lambda arrays: arrays["state.past_key_values.0.key"].__setitem__(0, "encoder.x"),
        "expected the arrays .*, got encoder.x"),
    "a fourth entry": (lambda arrays: arrays["start"].append(0),
        "expected a file of Session.save of version 1"),
    "a dtype that no session has": (lambda arrays: arrays["start"].__setitem__(1, "<f8"),
        "expected a file of Session.save of version 1"),
    "a size below 0": (lambda arrays: arrays["start"].__setitem__(2, [-1]),
        "expected a file of Session.save of version 1"),
    "a name twice": (lambda arrays: arrays["start"].__setitem__(0, "length"),
        "expected unique names of arrays, got a name twice"),
}  # fmt: skip


@pytest.mark.parametrize("case", FORMS)
def test_arrays_of_another_form_are_refused_though_their_digest_is_right(
    case: str, written: Any, tmp_path: Path
) -> None:
    model, header, content = written
    header, (change, said) = copy.deepcopy(header), FORMS[case]
    change({array[0]: array for array in header["arrays"]})
    (tmp_path / "other").write_bytes(_sealed(header, content))
    with pytest.raises(ValueError, match=rf"^restore .*other: {said}[^\n]*; delete the file"):
        model.restore(tmp_path / "other")


NUMBERS = {
    "a longer row than its cache": (LENGTHS, 4, r"expected tokens int64 \[4\], got int64 \[3\]"),
    "a length below 0": (LENGTHS, -3, "expected rows within positions 0 .. .*, got -3 tokens"),
    "a start below 0": (STARTS, -1, "expected rows within positions 0 .. .*, got 3 tokens from -1"),
    "a start beyond the range": (STARTS, 2**62, "expected rows within positions 0 .. "),
}


@pytest.mark.parametrize("case", NUMBERS)
def test_rows_that_no_session_has_are_refused_though_their_digest_is_right(
    case: str, written: Any, tmp_path: Path
) -> None:
    model, header, content = written
    place, number, said = NUMBERS[case]
    changed = bytearray(content)
    changed[place] = struct.pack("<q", number)
    (tmp_path / "other").write_bytes(_sealed(header, bytes(changed)))
    with pytest.raises(ValueError, match=rf"^restore .*other: {said}[^\n]*; delete the file"):
        model.restore(tmp_path / "other")


def test_a_header_with_an_unknown_key_is_refused(written: Any, tmp_path: Path) -> None:
    model, header, content = written
    (tmp_path / "other").write_bytes(_sealed({**header, "rows": 1}, content))
    with pytest.raises(ValueError, match="other: expected a file of Session.save of version 1"):
        model.restore(tmp_path / "other")


LIMITS = {
    "a long name": lambda header: header["arrays"][0].__setitem__(0, "a" * 257),
    "nine axes": lambda header: header["arrays"][0][2].extend([1] * 8),
    "too many arrays": lambda header: header["arrays"].extend(
        [["a", "|b1", [0]]] * (2 * saved.MOST + 9)
    ),
    "an artefact that is no digest": lambda header: header.update(artefact="A" * 64),
    "a long digest": lambda header: header.update(sha256="0" * 65),
}


@pytest.mark.parametrize("case", LIMITS)
def test_a_header_beyond_its_limits_is_refused(case: str, written: Any, tmp_path: Path) -> None:
    model, header, content = written
    header = copy.deepcopy(header)
    LIMITS[case](header)
    (tmp_path / "other").write_bytes(json.dumps(header).encode() + b"\n" + content)
    with pytest.raises(ValueError, match="other: expected a file of Session.save of version 1"):
        model.restore(tmp_path / "other")


def test_a_row_that_ends_beyond_the_range_is_refused(written: Any, tmp_path: Path) -> None:
    model, header, content = written
    changed = bytearray(content)
    changed[STARTS] = struct.pack("<q", model.manifest.max_positions - 2)
    (tmp_path / "other").write_bytes(_sealed(header, bytes(changed)))
    with pytest.raises(ValueError, match="other: expected rows within .*, got 3 tokens from"):
        model.restore(tmp_path / "other")


@pytest.mark.parametrize(
    ("tokens", "said"),
    [
        ([[1.0, 2.0, 3.0]], r"expected tokens to be \[3\] ids"),
        ([[1, 2]], r"expected tokens to be \[3\] ids, got \[2\]"),
        ([[1, 2, 1 << 20]], "expected token ids 0 .. "),
    ],
)
def test_tokens_that_no_row_has_are_not_saved(
    tokens: Any, said: str, written: Any, tmp_path: Path
) -> None:
    session = written[0].session()
    session.prefill([[1, 2, 3]])
    with pytest.raises(ValueError, match=said):
        session.save(tmp_path / "saved", tokens)


@pytest.mark.parametrize(
    ("byte", "said"),
    [
        (2, "expected slots to be bytes of 0 and 1"),
        (0, r"slots for rows of \[3\] tokens, got \[2\]"),
    ],
)
def test_slots_that_no_session_has_are_refused_though_their_digest_is_right(
    byte: int, said: str, tmp_path: Path
) -> None:
    model = load(shared_artefact(decoder("alibi"), "onnx", signature="mask"), "cpu", 1)
    session = model.session()
    session.prefill([[1, 2, 3]])
    session.save(tmp_path / "saved")
    header, _, content = (tmp_path / "saved").read_bytes().partition(b"\n")
    changed = content[:16] + bytes([byte]) + content[17:]  # behind lengths and starts of a row
    (tmp_path / "other").write_bytes(_sealed(json.loads(header), changed))
    with pytest.raises(ValueError, match=f"other: .*{said}"):
        model.restore(tmp_path / "other")


def test_ids_beyond_the_vocabulary_are_refused_though_their_digest_is_right(
    written: Any, tmp_path: Path
) -> None:
    model, header, content = written
    changed = content.replace(struct.pack("<3q", 1, 2, 3), struct.pack("<3q", 1, 2, 256))
    (tmp_path / "other").write_bytes(_sealed(header, changed))
    with pytest.raises(ValueError, match=r"other: expected token ids 0 .. 255, got"):
        saved.tokens(tmp_path / "other", model.manifest)


@pytest.mark.parametrize(
    "line",
    [
        b"[" * 100_000 + b"]" * 100_000,
        b'{"posenc_session": 1, "arrays": ' + b"[" * 100_000,
        b'{"posenc_session": 1' + b"0" * 5000 + b"}",
        b"\xff\xfe",
        b"null",
    ],
    ids=["nested", "nested value", "large number", "not Unicode", "null"],
)
def test_a_header_that_is_no_header_is_refused_in_one_line(
    line: bytes, written: Any, tmp_path: Path
) -> None:
    (tmp_path / "other").write_bytes(line + b"\n")
    with pytest.raises(ValueError, match=r"^restore .*: expected a file of Session.save[^\n]*$"):
        written[0].restore(tmp_path / "other")


@pytest.mark.parametrize(
    "count", [800, pytest.param(None, marks=pytest.mark.exhaustive)], ids=["sample", "all"]
)
def test_a_file_with_one_bit_changed_is_refused_in_one_line(
    count: Any, written: Any, tmp_path: Path
) -> None:
    model, header, content = written
    path, whole = tmp_path / "other", _sealed(header, content)
    bits = range(8 * (whole.index(b"\n") + 1)) if count else range(8 * len(whole))
    for bit in random.Random(0).sample(bits, min(count or len(bits), len(bits))):
        changed = bytearray(whole)
        changed[bit // 8] ^= 1 << bit % 8
        path.write_bytes(changed)
        with pytest.raises(ValueError, match=r"^restore [^\n]*: expected [^\n]*$"):
            model.restore(path)


@pytest.fixture
def folders() -> "list[Path]":
    """Two artefacts that differ in their graphs."""
    return [artefact("ort"), artefact("onnx-static")]


def test_a_file_that_was_changed_or_cut_or_is_of_another_artefact_is_refused_in_one_line(
    folders: "list[Path]", tmp_path: Path
) -> None:
    model, other = (load(folder, provider="cpu", threads=1) for folder in folders)
    session = model.session()
    session.prefill([[1, 2, 3]])
    session.save(tmp_path / "saved")
    whole, path = (tmp_path / "saved").read_bytes(), tmp_path / "other"
    at = whole.index(b"\n")
    changed = whole[: at + 9] + bytes([whole[at + 9] ^ 1]) + whole[at + 10 :]
    contents = {
        b"": "another one",
        whole[:-5]: "not whole",
        whole + b"0": "not whole",
        changed: "changed",
        b"{}\n": "another one",
        whole[: at - 9]: "another one",
    }
    header = json.loads(whole[:at])
    header["arrays"][0][0] = "lengths"
    contents[json.dumps(header).encode() + whole[at:]] = "changed"
    contents |= {
        whole[:place] + bytes([whole[place] ^ 255]) + whole[place + 1 :]: "changed"
        for place in range(at + 1, at + 41)
    }  # lengths, positions and slots
    for content, said in contents.items():
        path.write_bytes(content)
        with pytest.raises(
            ValueError,
            match=rf"^restore .*other: expected .*{said}[^\n]*; delete the file and read the "
            r"tokens again$",
        ):
            model.restore(path)
    with pytest.raises(
        ValueError,
        match=f"expected a session of the artefact {other.manifest.digest}, got one of "
        f"{model.manifest.digest}",
    ):
        other.restore(tmp_path / "saved")
    with pytest.raises(ValueError, match="expected rows of at most 2 tokens, got"):
        model.restore(tmp_path / "saved", capacity=2)


def test_an_interrupted_save_leaves_the_old_file(
    folders: "list[Path]", tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    session = load(folders[0], provider="cpu", threads=1).session()
    session.save(tmp_path / "saved")
    before = (tmp_path / "saved").read_bytes()
    session.prefill([[1, 2, 3]])
    monkeypatch.setattr(files.Hashed, "write", lambda self, content: os.fstat(-1))
    with pytest.raises(OSError):
        session.save(tmp_path / "saved")
    assert (tmp_path / "saved").read_bytes() == before and len(list(tmp_path.iterdir())) == 1


def test_the_command_reads_only_what_its_cache_does_not_hold(
    folders: "list[Path]",
    tmp_path: Path,
    capsys: pytest.CaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    cache, answers, read = ["--cache", str(tmp_path / "saved")], [], []
    prefill = Session.prefill
    monkeypatch.setattr(
        Session,
        "prefill",
        lambda self, inputs, **named: read.append(len(inputs[0])) or prefill(self, inputs, **named),
    )
    for prompt in ("a test", "a test of caches", "another"):
        for more in ([], cache):
            command = ["generate", str(folders[0]), "--prompt", prompt, "--max-tokens", "9"]
            assert main([*command, "--json", *more]) == 0
            answers.append(json.loads(capsys.readouterr().out))
        assert answers[-1] == answers[-2]
    # "a test" and the first id of its continuation, which differs from " ", are kept; then the "a"
    # of "another".
    assert [count for count in read if count > 1] == [6, 6, 16, 10, 7, 6]  # load reads 1 token
    assert main(["generate", str(folders[1]), "--prompt", "a test", *cache]) == 2
    assert "expected a session of the artefact" in capsys.readouterr().err
