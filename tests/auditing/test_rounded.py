"""Structure and rounding of a graph are two verdicts."""

import json
import shutil
from pathlib import Path
from typing import Sequence

import numpy as np
import onnx
import onnxruntime
import pytest
from onnx import numpy_helper

from posenc_export import audit
from posenc_export.auditing import confined
from posenc_export.auditing.confined import Confined
from posenc_export.auditing.unrounded import unrounded
from posenc_export.commands.cli import main
from posenc_export.shared.numerics import worst_error
from tests.auditing.exporter_faults import OF_GRAPHS, OTHERS
from tests.auditing.graphs import exported, model_of, right
from tests.auditing.rounded import FORMATS
from tests.cases import combinations

# Faults that a comparison within the tolerance of 8 bits finds, and some that it does not.
PLANTED = (
    "positions one too large", "offset not applied to padded rows", "new tokens one position late",
    "mask one short", "second row copied", "cache capped",
)  # fmt: skip
THETA = {"rope_type": "default", "rope_theta": 500000.0}
OTHERWISE = {
    "window off by one": ("mistral", {"sliding_window": 9}),
    "theta": ("llama", {"rope_parameters": THETA}),
    "scale": ("llama", {}),
}


def wrong_graph(name: str, output: Path) -> tuple[str, Sequence[str]]:
    """Write a graph with a fault. Return the name of the right model, and the causes."""
    if name in OTHERWISE:
        kind, values = OTHERWISE[name]
        model = model_of(kind, **values)
        for layer in model.model.layers if name == "scale" else ():
            layer.self_attn.scaling = 8**-1.0
        exported(model, output)
        return kind, [name]
    fault = {**OF_GRAPHS, **OTHERS}[name]
    kind = "gpt2" if fault.family == "gpt2" else "llama"
    fault.plant(right(kind) / "right.onnx", output)
    return kind, fault.causes


@pytest.mark.parametrize(("name", "kind"), combinations(["llama", "gpt2"], FORMATS))
def test_a_rounded_graph_is_right_and_its_loss_is_told(
    name: str, kind: str, tmp_path: Path
) -> None:
    FORMATS[kind](right(name) / "right.onnx", tmp_path / "model.onnx")
    result = audit(tmp_path / "model.onnx", right(name) / "checkpoint", quick=True)
    assert result.right and result.sentence.startswith("structure right"), result.sentence
    assert {claim.status for claim in result.claims} == {"proved"}, result.claims
    assert result.loss is not None and result.loss.divergence is not None
    assert f"weights in {result.loss.format}" in result.sentence
    # The float32 form has the graph's own numbers, so it is as near to them as any float32 graph.
    structure = [cell for cell in result.cells if not cell.name.startswith("in ")]
    if kind != "float16":
        assert max(cell.tolerance for cell in structure) < 1e-3 < result.loss.error
    if kind == "blocks of 4 bits":  # ONNX Runtime computes with their numbers in float32, too
        assert result.loss.activations < 1e-4


@pytest.mark.parametrize(
    ("name", "kind"), combinations([*PLANTED, *OTHERWISE], ["dynamic 8 bits", "blocks of 4 bits"])
)
def test_a_fault_in_a_rounded_graph_is_found_and_named(
    name: str, kind: str, tmp_path: Path
) -> None:
    model, causes = wrong_graph(name, tmp_path / "wrong.onnx")
    FORMATS[kind](tmp_path / "wrong.onnx", tmp_path / "model.onnx")
    result = audit(tmp_path / "model.onnx", right(model) / "checkpoint")
    assert not result.right and result.cause in causes, result.sentence


@pytest.fixture(scope="module")
def rounded(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a checkpoint and model.onnx, which rounds to 8 bits."""
    folder = shutil.copytree(right("llama"), tmp_path_factory.mktemp("rounded") / "llama")
    FORMATS["dynamic 8 bits"](folder / "right.onnx", folder / "model.onnx")
    return folder


def test_a_weight_that_is_none_of_the_reference_is_named(rounded: Path, tmp_path: Path) -> None:
    model = onnx.load(rounded / "model.onnx")
    scales = [t for t in model.graph.initializer if t.name.endswith("_scale") and t.dims]
    chosen = scales[0]
    numbers = numpy_helper.to_array(chosen) * np.float32(1.5)
    chosen.CopyFrom(numpy_helper.from_array(numbers, chosen.name))
    onnx.save(model, tmp_path / "model.onnx")
    result = audit(tmp_path / "model.onnx", rounded / "checkpoint", quick=True)
    name = chosen.name.removesuffix("_scale")
    assert result.cause == "weights" and f"the weight {name}" in result.sentence, result.sentence
    assert "by 50.0%, and rounding to 8 bits explains" in result.sentence


def test_the_command_accepts_a_tolerance_and_tells_the_loss(
    rounded: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(rounded)
    arguments = ["audit", "model.onnx", "--reference", "checkpoint", "--quick"]
    assert main([*arguments, "--tolerance", "0.5", "--html", "page.html"]) == 0
    assert "weights in 8 bits: perplexity times" in capsys.readouterr().out
    assert "Kullback-Leibler divergence" in Path("page.html").read_text("utf-8")
    assert main([*arguments, "--tolerance", "0.001", "--json"]) == 1
    content = json.loads(capsys.readouterr().out)
    assert content["sentence"].startswith("structure right; in its own precision wrong")
    assert content["loss"]["format"] == "8 bits" and content["loss"]["divergence"] > 0
    assert main([*arguments, "--tolerance", "2"]) == 2
    assert "expected tolerance to be above 0 and below 1" in capsys.readouterr().err
    monkeypatch.setattr(confined, "Confined", Confined)
    assert main([*arguments]) == 0


@pytest.mark.parametrize("kind", ["8 bits", "blocks of 4 bits"])
def test_the_float32_form_is_what_onnx_runtime_computes_without_rounding(
    kind: str, tmp_path: Path
) -> None:
    FORMATS[kind](right("gpt2", False) / "right.onnx", tmp_path / "m.onnx")
    (_, content, _), ids = unrounded(tmp_path / "m.onnx"), np.arange(3, 15)[None]
    positions = np.arange(12)[None]
    feeds = {"input_ids": ids, "attention_mask": np.ones_like(ids), "position_ids": positions}
    options = onnxruntime.SessionOptions()  # optimized, it rounds the activations of products
    options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
    own, wide = (
        onnxruntime.InferenceSession(graph, options).run(None, feeds)[0]
        for graph in (str(tmp_path / "m.onnx"), content)
    )
    assert worst_error(wide, own) < 1e-5
