"""Graphs of others are right where they are right, and wrong where they are wrong."""

import json
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from posenc_export import audit, block_config, decoder_config, export_model, seeded
from posenc_export.commands.cli import main
from tests.auditing.exporter_faults import OF_GRAPHS, OTHERS, plant
from tests.auditing.graphs import model_of, right


def test_a_description_is_a_reference(tmp_path: Path) -> None:
    rope = {"name": "rope"}
    wrong, right = (
        decoder_config(61, 2, 48, block_config(32, 4, 64, encoding=rope | {"theta": theta}))
        for theta in (500000.0, 10000.0)
    )
    export_model(seeded(wrong), "onnx", tmp_path, verify=False)
    result = audit(tmp_path / "model.onnx", seeded(right), quick=True)
    assert result.cause == "attention", result.sentence


def test_a_graph_that_fails_for_other_numbers_of_rows_is_refused(tmp_path: Path) -> None:
    folder, two_rows = right("llama"), "<int64[2] rows = {2, 1}>"
    nodes = "Y = Expand (X, rows)"
    plant(folder / "right.onnx", "input_ids", nodes, tmp_path / "model.onnx", two_rows)
    result = audit(tmp_path / "model.onnx", folder / "checkpoint", quick=True)
    assert result.verdict == "refused" and not result.right, result.sentence
    assert "Status" not in result.sentence


def test_an_audit_says_that_a_right_graph_ignores_positions(tmp_path: Path) -> None:
    folder, other = right("llama", cached=False), tmp_path / "model.onnx"
    counted = "zeros = Sub (X, X)\n ones = Add (zeros, one)\n Y = CumSum (ones, one)"
    plant(folder / "right.onnx", "position_ids", counted, other)
    for graph, ignores in ((other, True), (folder / "right.onnx", False)):
        result = audit(graph, folder / "checkpoint", quick=True)
        said = (
            "position_ids change nothing: right for consecutive positions only" in result.sentence
        )
        assert result.right and said == ignores, result.sentence


@pytest.fixture(scope="module")
def wrong(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a checkpoint and model.onnx, whose caches are shifted by a slot."""
    folder = shutil.copytree(right("llama"), tmp_path_factory.mktemp("wrong") / "llama")
    OF_GRAPHS["cache shifted"].plant(folder / "right.onnx", folder / "model.onnx")
    return folder


# In the second, the first wrong token is behind a cache without its padding.
@pytest.mark.parametrize("fault", ["cache shifted", "rotary positions are slots"])
def test_a_program_repeats_the_first_wrong_token_and_passes_on_a_right_graph(
    fault: str, tmp_path: Path
) -> None:
    graph, wrong = right("llama") / "right.onnx", tmp_path / "model.onnx"
    {**OF_GRAPHS, **OTHERS}[fault].plant(graph, wrong)
    result = audit(wrong, right("llama") / "checkpoint", quick=True)
    (tmp_path / "repeat.py").write_text(result.program, "utf-8")
    imports = set(re.findall(r"^ *import (\w+)", result.program, re.MULTILINE))
    assert imports == {"base64", "ctypes", "math", "sys", "zlib", "numpy", "onnxruntime"}
    command = [sys.executable, tmp_path / "repeat.py"]
    ran = subprocess.run([*command, wrong], capture_output=True, text=True)
    assert ran.returncode == 1 and "tolerance" in ran.stdout, ran.stderr
    assert subprocess.run([*command, graph]).returncode == 0


def test_the_command_says_what_is_wrong_and_ends_with_1(
    wrong: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(wrong)
    arguments = ["audit", "model.onnx", "--reference", "checkpoint", "--quick"]
    assert main([*arguments, "--html", "page.html"]) == 1
    printed = capsys.readouterr()
    assert "past_key_values.0.key ->" in printed.out and "present.0.key" in printed.out
    assert printed.out.splitlines()[-1].startswith("wrong from ")
    assert "model-repeat.py" in printed.err and Path("model-repeat.py").is_file()
    page = Path("page.html").read_text("utf-8")
    assert "data:image/svg+xml" in page and "calls that read a cache" in page
    assert main([*arguments, "--json"]) == 1
    content = json.loads(capsys.readouterr().out)
    assert content["verdict"] == "wrong" and content["cause"] == "cache"


def test_the_command_refuses_what_is_no_graph_or_no_reference(
    wrong: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    graph, checkpoint = str(wrong / "model.onnx"), str(wrong / "checkpoint")
    assert main(["audit", f"{checkpoint}/config.json", "--reference", checkpoint]) == 2
    assert "expected a graph that ONNX Runtime loads" in capsys.readouterr().err
    assert main(["audit", graph, "--reference", "nowhere"]) == 2
    said = capsys.readouterr().err
    assert "a reference that exists, got 'nowhere'" in said and "package.module:name" in said
    assert main(["audit", graph, "--reference", "tests.auditing.graphs:nothing"]) == 2
    assert "got no name nothing" in capsys.readouterr().err
    model_of("llama", vocab_size=50).save_pretrained(wrong / "smaller")
    assert main(["audit", graph, "--reference", str(wrong / "smaller")]) == 2
    assert "expected a graph with 50 numbers for a token" in capsys.readouterr().err
    assert main(["audit", str(wrong / "checkpoint"), "--reference", checkpoint]) == 2
    assert "expected a folder with model.onnx" in capsys.readouterr().err
    others = {"model.pte": (b"\0\0\0\0ET12", "a program of ExecuTorch")}
    others["model.xml"] = (b"<?xml version='1.0'?><net/>", "XML, as in OpenVINO IR")
    for name, (content, kind) in others.items():
        (wrong / name).write_bytes(content)
        assert main(["audit", str(wrong / name), "--reference", checkpoint]) == 2
        said = capsys.readouterr().err
        assert f"expected a graph in ONNX or of torch, got {wrong / name}: {kind}; export" in said
