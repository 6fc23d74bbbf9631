"""`posenc study`: what small decoders predict beyond the length in training, by encoding."""

import json
from pathlib import Path

import pytest

from posenc_export.commands.cli import main

pytest.importorskip("matplotlib", reason="matplotlib is not installed")
SHORT = ["--steps", "60", "--length", "16"]


def test_biases_by_distance_extrapolate_and_rotations_do_not(
    tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    picture = tmp_path / "lengths.svg"
    assert main(["study", "rope", *SHORT, "-o", str(picture), "--json"]) == 0
    bits = {
        row["encoding"]: list(row["bits"].values())
        for row in json.loads(capsys.readouterr().out)["rows"]
    }
    assert list(bits) == ["rope", "alibi"]
    assert all(of[0] < 5 for of in bits.values())  # of 8 without training
    assert max(bits["alibi"]) < min(bits["alibi"]) + 0.05
    assert max(bits["rope"]) > bits["rope"][0] + 0.2
    assert "posenc study" in picture.read_text()


def test_a_study_of_an_own_text_is_repeated_by_its_seed(
    tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    text = tmp_path / "text.txt"
    text.write_bytes(b"abcdefgh" * 1000)
    printed = []
    for _ in range(2):
        chosen = ["--steps", "2", "--length", "8", "--text", str(text)]
        assert main(["study", "alibi", *chosen, "-o", str(tmp_path / "a.png")]) == 0
        printed.append(capsys.readouterr().out)
    assert printed[0] == printed[1] and "64 bytes" in printed[0]


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        (["rope", "boxes"], "expected bidirectional attention for Boxes, got causal"),
        (["ropee"], "got 'ropee'; did you mean rope?"),
        (["rope", "-o", "a.txt"], "expected a file ending in .png or .svg, got 'a.txt'"),
        (["rope", "--text", "short"], "expected a text of at least 21440 bytes, got 5"),
    ],
)
def test_wrong_options_are_refused(
    arguments: list,
    line: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture,
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("short").write_text("short")
    assert main(["study", *arguments]) == 2
    error = capsys.readouterr().err
    assert line in error and "Traceback" not in error
    assert not list(tmp_path.glob("study.*"))
