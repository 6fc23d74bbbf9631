"""The command as typed: one line for each error, and nothing written."""

import json
import subprocess
import sys
from pathlib import Path
from typing import List

import pytest

from posenc_export.cli import main

BLOCK = ["export", "block", "--width", "64", "--heads", "4", "--max-positions", "64"]
BAD = {
    "unknown encoding": [*BLOCK, "--encoding", "ropes", "--target", "ort"],
    "unknown parameter": [*BLOCK, "--encoding", "rope:thata=1", "--target", "ort"],
    "odd rotary size": [*BLOCK, "--encoding", "rope:rotary=7", "--target", "ort"],
    "heads not divisible": [*BLOCK, "--kv-heads", "3", "--target", "ort"],
    "head size the kernel refuses": [*BLOCK, "--head-size", "12", "--target", "ort"],
    "unknown target": [*BLOCK, "--target", "onx"],
    "unknown preset": ["export", "tiny-rop", "--target", "ort"],
    "unknown signature": [*BLOCK, "--target", "ort", "--signature", "masks"],
    "not a number": [*BLOCK, "--encoding", "fox:remember=nan", "--target", "ort"],
    "an infinite number": [*BLOCK, "--encoding", "sinusoidal:scale=inf", "--target", "ort"],
    "a fraction of rows": [*BLOCK, "--encoding", "learned:offset=1e15", "--target", "ort"],
    "rows that no memory holds": [*BLOCK, "--encoding", "learned:offset=1000000000000000", "--target", "ort"],
    "rows beyond 64 bits": [*BLOCK, "--encoding", f"learned:offset={10**30}", "--target", "ort"],
    "tables of numbers that overflow": [*BLOCK, "--encoding", "floater:step=1e38", "--target", "ort"],
    "a width that no memory holds": [*BLOCK, "--width", "1000000000", "--encoding", "alibi", "--target", "ort"],
    "a width beyond 64 bits": [*BLOCK, "--width", str(4 * 10**30), "--target", "ort"],
    "a range that no memory holds": [*BLOCK, "--max-positions", "1000000000000000", "--target", "ort"],
    "a range beyond 64 bits": [*BLOCK, "--encoding", "alibi", "--max-positions", str(10**30), "--target", "ort"],
    "a seed beyond 64 bits": [*BLOCK, "--seed", str(10**30), "--target", "ort"],
}


@pytest.mark.parametrize("case", BAD)
def test_bad_input_is_one_line_status_2_and_nothing_written(case: str, tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    assert main([*BAD[case], "-o", str(tmp_path / "artefact")]) == 2
    errors = [line for line in capsys.readouterr().err.splitlines() if line.startswith("posenc: ")]
    assert len(errors) == 1 and "got" in errors[0]
    assert not list(tmp_path.iterdir())


def test_a_range_written_as_a_fraction_is_one_line_and_status_2(capsys: pytest.CaptureFixture) -> None:
    with pytest.raises(SystemExit) as stopped:
        main([*BLOCK, "--max-positions", "1e12", "--target", "ort", "-o", "nowhere"])
    assert stopped.value.code == 2 and len(capsys.readouterr().err.splitlines()) == 1


@pytest.mark.parametrize("content", ["[" * 100000, '{"schema": ' + 100000 * "[", '{"schema": ' + 5000 * "9" + "}"])
def test_a_manifest_that_no_program_wrote_is_one_line_and_status_2(content: str, tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    (tmp_path / "posenc.json").write_text(content)
    assert main(["inspect", str(tmp_path)]) == 2
    assert len(capsys.readouterr().err.splitlines()) == 1


LIST = f"{sys.executable} -m posenc_export.cli list"


LEFT = f"{LIST} | head -c 1 >/dev/null; exit ${{PIPESTATUS[0]}}"


@pytest.mark.parametrize(("command", "status", "lines"), [(f"{LIST} >&-", 2, 1), (f"{LIST} >/dev/full", 2, 1), (LEFT, 0, 0)])
def test_an_output_that_takes_nothing_is_said_in_a_line_and_a_reader_that_left_is_not(command: str, status: int, lines: int) -> None:
    done = subprocess.run(["bash", "-c", command], stderr=subprocess.PIPE, text=True, check=False)
    assert done.returncode == status and len(done.stderr.splitlines()) == lines, done.stderr


@pytest.mark.parametrize("command", ["verify", "inspect"])
def test_a_folder_that_is_no_artefact_is_refused(command: str, tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    assert main([command, str(tmp_path)]) == 2
    assert "posenc.json" in capsys.readouterr().err


def test_a_command_that_does_not_exist_is_one_line_and_status_2(capsys: pytest.CaptureFixture) -> None:
    with pytest.raises(SystemExit) as stopped:
        main(["exprot"])
    assert stopped.value.code == 2 and len(capsys.readouterr().err.splitlines()) == 1


def test_list_names_every_encoding_with_its_hook(capsys: pytest.CaptureFixture) -> None:
    assert main(["list", "--json"]) == 0
    rows = {row["name"]: row for row in json.loads(capsys.readouterr().out)["encodings"]}
    assert rows["rope"]["hook"] == "rotate" and rows["alibi"]["hook"] == "bias" and rows["learned"]["hook"] == "embed"


def _answer(arguments: List[str], capsys: pytest.CaptureFixture) -> object:
    assert main([*arguments, "--json"]) == 0
    return json.loads(capsys.readouterr().out)


def test_a_preset_goes_from_export_to_text(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    folder = str(tmp_path / "artefact")
    (row,) = _answer(["export", "tiny-rope", "--target", "ort", "-o", folder], capsys)  # type: ignore[misc]
    assert row["passed"]
    assert _answer(["inspect", folder], capsys)["operators"]["GroupQueryAttention"] == 5  # type: ignore[index]
    text = _answer(["generate", folder, "--prompt", "import os\n\nclass Reader:\n    def __init__(self", "--max-tokens", "24"], capsys)
    assert bytes(text["tokens"]).decode() == text["text"] and len(text["tokens"]) == 24  # type: ignore[index]
    assert main(["generate", folder, "--prompt", "x" * 5000, "--max-tokens", "1"]) == 2
    assert "positions are 0 .. 4095" in capsys.readouterr().err
    assert main(["generate", folder, "--prompt", "x", "--provider", "cuda"]) == 2
    assert "provider cuda" in capsys.readouterr().err


HIDDEN = """
import sys
for name in ("torch", "onnx", "onnx_ir", "onnxscript"):
    sys.modules[name] = None
from posenc_export.cli import main
assert main(["generate", sys.argv[1], "--prompt", "def f(x):", "--max-tokens", "5"]) == 0
"""


def test_a_decoder_generates_where_neither_torch_nor_onnx_can_be_imported(tmp_path: Path) -> None:
    folder = str(tmp_path / "artefact")
    assert main(["export", "tiny-alibi", "--target", "ort", "--no-verify", "-o", folder]) == 0
    subprocess.run([sys.executable, "-c", HIDDEN, folder], check=True)


def test_importing_the_package_imports_no_framework() -> None:
    program = "import sys, posenc_export, posenc_export.runtime; assert not {'torch', 'onnx', 'onnxruntime'} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", program], check=True)
