"""Sessions on disk: what is restored continues as the session that was saved, and other files
are refused in one line.
"""

import json
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from posenc_export import load
from posenc_export.commands.cli import main
from posenc_export.export import export
from posenc_export.models.presets import seeded
from posenc_export.models.short_forms import decoder_config
from posenc_export.runtime.artefact import files
from posenc_export.runtime.session import saved
from posenc_export.runtime.session.session import Session
from tests.tiny import block, decoder
from tests.traces import sources

pytestmark = pytest.mark.xdist_group("alibi")  # one worker, which traces the model once

PROMPTS = [list(range(3, 12)), [40, 41], [7] * 5]
KINDS = [("alibi", "ort"), ("alibi", "onnx"), ("input_rnn", "ort")]
MORE = [("alibi", "onnx-static"), ("alibi", "torchscript"), ("input_rnn", "onnx")]


@pytest.fixture(
    scope="module",
    params=[*KINDS, *(pytest.param(which, marks=pytest.mark.exhaustive) for which in MORE)],
    ids="-".join,
)
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Any:
    encoding, target = request.param
    folder = tmp_path_factory.mktemp("saved") / "a"
    export(sources(decoder(encoding)), target, folder, verify=False)
    return load(folder, provider="cpu", threads=1)


def _continued(session: Any) -> np.ndarray:
    tokens = np.arange(session.batch)
    return np.stack(
        [
            session.step(tokens),
            session.step(tokens + 3),
            session.prefill([[5, 6]] * session.batch)[:, -1],
        ]
    )


def test_a_restored_session_continues_as_the_one_that_was_saved(model: Any, tmp_path: Path) -> None:
    session = model.session()
    session.prefill(PROMPTS, start=None if model.manifest.signature == "mask" else [0, 7, 30])
    session.step(np.array([1, 2, 3]))
    held = [[*row, token] for row, token in zip(PROMPTS, (1, 2, 3), strict=True)]
    session.save(tmp_path / "saved", held)
    restored = model.restore(tmp_path / "saved")
    assert (
        restored.length.tolist() == session.length.tolist()
        and restored.position.tolist() == session.position.tolist()
    )
    assert [row.tolist() for row in saved.tokens(tmp_path / "saved", model.manifest)] == held
    assert np.array_equal(_continued(restored), _continued(session))
    for one in (restored, session):
        one.rewind([1, 0, 2])
    assert np.array_equal(_continued(restored), _continued(session))


def test_a_session_without_rows_is_restored_without_rows(model: Any, tmp_path: Path) -> None:
    model.session().save(tmp_path / "empty")
    restored = model.restore(tmp_path / "empty")
    assert restored.batch == 0 and saved.tokens(tmp_path / "empty", model.manifest) is None
    assert np.array_equal(restored.prefill(PROMPTS), model.session().prefill(PROMPTS))


def test_ids_that_the_cache_does_not_hold_are_refused(model: Any, tmp_path: Path) -> None:
    session = model.session()
    session.prefill(PROMPTS)
    with pytest.raises(
        ValueError,
        match=r"expected tokens to be \[9, 2, 5\] ids, got \[9, 2\]; give those in the cache",
    ):
        session.save(tmp_path / "saved", PROMPTS[:2])
    assert not list(tmp_path.iterdir())


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> "list[Path]":
    """Two artefacts that differ in their weights."""
    root = tmp_path_factory.mktemp("folders")
    for seed in (0, 1):
        export(
            seeded(decoder_config(vocabulary=256, layers=1, hidden=40, block=block("rope")), seed),
            "ort",
            root / str(seed),
            verify=False,
        )
    return [root / "0", root / "1"]


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
            assert (
                main(
                    [
                        "generate",
                        str(folders[0]),
                        "--prompt",
                        prompt,
                        "--max-tokens",
                        "9",
                        "--json",
                        *more,
                    ]
                )
                == 0
            )
            answers.append(json.loads(capsys.readouterr().out))
        assert answers[-1] == answers[-2]
    # "a test" and the first id of its continuation, which differs from " ", are kept; then the "a"
    # of "another".
    assert read == [6, 6, 16, 10, 7, 6]
    assert main(["generate", str(folders[1]), "--prompt", "a test", *cache]) == 2
    assert "expected a session of the artefact" in capsys.readouterr().err
