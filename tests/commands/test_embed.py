"""`posenc embed`: one embedding for each line of a file."""

import io
import json
import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from posenc_export.commands.cli import main
from posenc_export.runtime import load
from tests.models.sentence_folders import artefact

pytest.importorskip("tokenizers", reason="tokenizers is not installed")
LINES = ["w5 w6", "", "w7 w8 w9"]


@pytest.fixture(name="artefact")
def made() -> Path:
    return artefact()


@pytest.mark.parametrize("end", ["", "\n"])
def test_each_line_gives_one_embedding_in_json_lines_and_in_an_array(
    end: str, artefact: Path, tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    (tmp_path / "texts").write_bytes(("\r\n".join(LINES) + end).encode())
    expected = load(artefact).embed(LINES)
    assert main(["embed", str(artefact), str(tmp_path / "texts")]) == 0
    printed = np.array(
        [json.loads(line) for line in capsys.readouterr().out.splitlines()], np.float32
    )
    assert (
        main(["embed", str(artefact), str(tmp_path / "texts"), "-o", str(tmp_path / "new/out.npy")])
        == 0
    )
    assert (
        main(["embed", str(artefact), str(tmp_path / "texts"), "-o", str(tmp_path / "out.jsonl")])
        == 0
    )
    assert np.array_equal(printed, expected) and np.array_equal(
        np.load(tmp_path / "new/out.npy"), expected
    )
    assert len((tmp_path / "out.jsonl").read_text().splitlines()) == 3


def test_texts_come_from_standard_input(
    artefact: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    monkeypatch.setattr(sys, "stdin", SimpleNamespace(buffer=io.BytesIO(b"w5 w6\n")))
    assert main(["embed", str(artefact), "-"]) == 0
    assert len(capsys.readouterr().out.splitlines()) == 1


def test_an_unknown_prompt_and_a_missing_file_are_refused_in_one_line(
    artefact: Path, tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    (tmp_path / "texts").write_text("w5\n")
    assert main(["embed", str(artefact), str(tmp_path / "texts"), "--prompt", "query"]) == 2
    assert "expected prompt to be one of none, got 'query'" in capsys.readouterr().err
    assert main(["embed", str(artefact), str(tmp_path / "none")]) == 2
    assert capsys.readouterr().err.count("\n") <= 2
