"""What users write is refused in one line that says what is wrong."""

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest

from posenc_export import audit
from posenc_export.auditing import graph, page, repeat
from posenc_export.commands.cli import main
from tests.auditing.odd_graphs import CASES, flat
from tests.auditing.odd_graphs import graph as odd_graph
from tests.cases import choice

REFERENCE = ["--reference", "tests.auditing.odd_graphs:flat", "--quick"]


def refusal(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> str:
    """Run the command, and return the line of its refusal."""
    assert main(["audit", *arguments]) == 2
    return line_of(capsys)


def line_of(capsys: pytest.CaptureFixture[str]) -> str:
    lines = [line for line in capsys.readouterr().err.splitlines() if not line.startswith("[")]
    assert len(lines) == 1 and lines[0].startswith("posenc: audit: expected "), lines
    return lines[0]


REFERENCES = ["", "  ", ":", ":x", "a:", "a:b:c", "..:x", ".a:b", "nosuch:x", "os:sep", "os:getcwd",
              "builtins:int", "torch.nn:Linear", "json:loads", "\u00e4:\u00df", "nowhere", "a\0b",
              "http://x/y", "file:///tmp"]  # fmt: skip


@pytest.mark.parametrize("text", REFERENCES)
def test_a_text_that_is_no_reference_is_refused_in_one_line(
    text: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    onnx.save(odd_graph(*CASES["nothing"]), tmp_path / "model.onnx")
    refusal([str(tmp_path / "model.onnx"), "--reference", text], capsys)


@pytest.mark.parametrize("name", choice(CASES, [*CASES][::8]))
def test_an_odd_graph_is_audited_or_refused_in_one_line(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    onnx.save(odd_graph(*CASES[name]), tmp_path / "model.onnx")
    if main(["audit", str(tmp_path / "model.onnx"), *REFERENCE]) == 2:
        line_of(capsys)
    else:
        last = capsys.readouterr().out.splitlines()[-1]
        assert last.startswith(("right in ", "wrong ", "could not be compared"))


@pytest.mark.parametrize("axes", [["b", "t"], ["b", 1, "s", "t"]])
def test_a_mask_in_bfloat16_is_fed_as_torch_has_it(axes: list[Any], tmp_path: Path) -> None:
    ports = {**CASES["nothing"][0], "attention_mask": (onnx.TensorProto.BFLOAT16, axes)}
    model = odd_graph(ports, CASES["nothing"][1])
    out = onnx.helper.make_tensor_value_info("seen", onnx.TensorProto.BFLOAT16, axes)
    model.graph.output.append(out)
    model.graph.node.append(onnx.helper.make_node("Identity", ["attention_mask"], ["seen"]))
    onnx.save(model, tmp_path / "model.onnx")
    assert audit(tmp_path / "model.onnx", flat, quick=True).right
    lowest = -(2.0 - 2.0**-7) * 2.0**127  # torch.finfo(torch.bfloat16).min
    mask = np.array([1, 0, 0, 1] if len(axes) == 2 else [0, lowest, lowest, 0], np.float32)
    feeds = {"input_ids": np.ones((1, 2), np.int64), "position_ids": np.ones((1, 2), np.int64)}
    feeds["past_key_values.0.key"] = np.zeros((1, 2, 0, 8), np.float32)
    shape = (1, 4) if len(axes) == 2 else (1, 1, 2, 2)
    opened = graph.Graph(tmp_path / "model.onnx")
    finest = np.where(mask < 0, np.finfo(np.float32).min, mask).astype(np.float32)
    seen = opened.run({**feeds, "attention_mask": finest.reshape(shape)})["seen"]
    np.testing.assert_array_equal(seen, mask.reshape(shape))


NAMES = ["'''", '"""', "\\", "\\'", "a\nb", "a\rb", "\u2028", "{x}", "%s", "#", "\u00e9"]


@pytest.mark.parametrize("name", NAMES, ids=ascii)
def test_a_program_and_a_page_quote_the_names_of_others(name: str, tmp_path: Path) -> None:
    inputs, outputs = CASES["nothing"]
    past = name if name.isprintable() else "past"
    inputs = {**inputs, past: inputs[PAST]}
    outputs = {**outputs, f"present_{past}": outputs["present.0.key"]}
    file = tmp_path / f"{name}.onnx"
    onnx.save(odd_graph(inputs, outputs), file)
    result = audit(file, lambda ids: flat(ids) + 1, quick=True)
    assert result.verdict == "wrong" and repr(past) in result.program
    compile(result.program.encode("utf-8"), "repeat.py", "exec")
    if name == "'''":
        (tmp_path / "repeat.py").write_text(result.program, "utf-8")
        command = [sys.executable, tmp_path / "repeat.py"]
        ran = subprocess.run(command, capture_output=True, text=True)
        assert ran.returncode == 1 and "tolerance" in ran.stdout, ran.stderr
    assert repeat.in_line("\udc80").encode("utf-8") == b"'\\udc80'"  # a byte that is no UTF-8
    pytest.importorskip("matplotlib")
    assert "<b>" not in page.render(replace(result, sentence="<b>"), "<b>")


PAST = "past_key_values.0.key"
GIVEN = [
    {"padding": "up"}, {"padding": 1}, {"output": "nothing"}, {"output": 3}, {"output": PAST},
    {"other": 1}, {"inputs": []}, {"inputs": {"input_ids": "tokens"}}, {"inputs": {"x": "unread"}},
    {"inputs": {"input_ids": "attention_mask 2"}}, {"inputs": {PAST: "input_ids"}},
    {"inputs": {"input_ids": "input_ids", "attention_mask": "input_ids"}},
    {"caches": {"past": {}}}, {"caches": {"input_ids": {"slots": 1}}},
    {"caches": {PAST: {"slots": 4}}}, {"caches": {PAST: {"slots": 0}}},
    {"caches": {PAST: {"slots": -2}}}, {"caches": {PAST: {"slots": "2"}}},
    {"caches": {PAST: {"rows": -1}}}, {"caches": {PAST: {"present": "logits"}}},
    {"caches": {PAST: {"axis": 2}}},
]  # fmt: skip


@pytest.mark.parametrize("said", GIVEN, ids=json.dumps)
def test_a_file_of_inputs_is_checked_against_the_graph(
    said: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    onnx.save(odd_graph(*CASES["nothing"]), tmp_path / "model.onnx")
    (tmp_path / "inputs.json").write_text(json.dumps(said))
    arguments = [str(tmp_path / "model.onnx"), "--inputs", str(tmp_path / "inputs.json")]
    refusal([*arguments, *REFERENCE], capsys)


def test_a_graph_without_a_mask_has_no_padding_in_a_file_of_inputs(tmp_path: Path) -> None:
    onnx.save(odd_graph(*CASES["without attention_mask"]), tmp_path / "model.onnx")
    with pytest.raises(ValueError, match="expected no padding in --inputs, got left"):
        audit(tmp_path / "model.onnx", flat, {"padding": "left"})
