"""What a graph does at every length is proved, or refuted by the smallest call."""

import subprocess
import sys
from pathlib import Path
from typing import Sequence

import pytest

from posenc_export import audit
from posenc_export.auditing import Audit, auditor
from tests.auditing.exporter_faults import OF_GRAPHS, OTHERS, plant
from tests.auditing.graphs import MODELS, exported, model_of, right
from tests.cases import combinations

LONG = "<int64 zero = {0}, int64 one = {1}, int64 late = {%d}>"

# A mask that hides the first key of calls with many keys, and positions that are one too large
# behind many.
LATE = {
    "attention_mask": """
        of_mask = Shape (attention_mask)
        T = Gather (of_mask, one)
        slots = Range (zero, T, one)
        short = Less (T, late)
        behind = Greater (slots, zero)
        kept = Or (short, behind)
        seen = Cast <to = 7> (kept)
        Y = Mul (X, seen)""",
    "position_ids": """
        far = GreaterOrEqual (X, late)
        more = Cast <to = 7> (far)
        Y = Add (X, more)""",
}


def status(result: Audit) -> dict[str, str]:
    return {claim.name: claim.status for claim in result.claims}


@pytest.mark.parametrize(("name", "cached"), combinations(MODELS, [False, True]))
def test_a_right_graph_is_right_and_its_masks_and_positions_are_proved(
    name: str, cached: bool
) -> None:
    result = audit(right(name, cached) / "right.onnx", right(name, cached) / "checkpoint")
    assert result.right and not result.cause and result.loss is None, result.sentence
    ran = {cell.status for cell in result.cells}
    assert ran <= {"right", "not possible"} and "right" in ran
    if name == "bloom":  # whose code adds its mask to the biases: what it sees has no rule
        assert {*status(result).values()} == {"not proved"}, result.claims
        return
    assert {*status(result).values()} == {"proved"}, result.claims
    assert len(result.claims) == 3  # of two layers, and positions
    assert "claims on masks and positions proved for all calls of up to" in result.sentence


@pytest.mark.parametrize("value", LATE)
def test_a_fault_that_begins_late_is_found_by_the_smallest_call(
    value: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    late = 600
    model = model_of("llama", tmp_path, max_position_embeddings=late + 1000)
    graph = exported(model, tmp_path / "right.onnx")
    plant(graph, value, LATE[value], tmp_path / "model.onnx", LONG % late)
    result = audit(tmp_path / "model.onnx", tmp_path / "checkpoint", quick=True)
    assert not result.right and "although right in" in result.sentence, result.sentence
    refuted = [claim for claim in result.claims if claim.status == "refuted"]
    call = refuted[0].call
    if value == "attention_mask":
        assert result.cause == "visibility" and len(refuted) == 2
        assert (call["S"], call["P"], call["position of the key"]) == (1, late - 1, 0)
        said = f"the token at position {late - 1} does not see the key at position 0"
    else:
        assert result.cause == "positions" and call["position"] == late
        said = f"the token at position {late} has the angles of position {late + 1}"
    assert said in result.sentence
    (tmp_path / "repeat.py").write_text(result.program, "utf-8")
    command = [sys.executable, tmp_path / "repeat.py", tmp_path / "model.onnx"]
    assert subprocess.run(command).returncode == 1
    # No cell of the plan shows it.
    monkeypatch.setattr(auditor, "find_spec", lambda name: None)
    without = audit(tmp_path / "model.onnx", tmp_path / "checkpoint", quick=True)
    assert without.right and "pip install 'posenc-export[prove]'" in without.sentence


# By fault, the model, and numbers of new tokens and of slots of the smallest call that refutes a
# claim.
REFUTED = {
    "offset not applied to padded rows": ("gpt2", 1, 0),
    "new tokens one position late": ("llama", 1, 1),
    "mask one short": ("llama", 2, 0),
    "cache capped": ("llama", 1, 13),
}


@pytest.mark.parametrize("name", REFUTED)
def test_a_fault_in_masks_or_positions_is_refuted_by_the_smallest_call(
    name: str, tmp_path: Path
) -> None:
    fault, (model, *call) = {**OF_GRAPHS, **OTHERS}[name], REFUTED[name]
    fault.plant(right(model) / "right.onnx", tmp_path / "model.onnx")
    _check_refuted(tmp_path, model, fault.causes, call)


@pytest.mark.parametrize(("size", "cause"), [(4096, "ignored"), (9, "off by one")])
def test_another_window_is_refuted_by_the_smallest_call(
    size: int, cause: str, tmp_path: Path
) -> None:
    exported(model_of("mistral", sliding_window=size), tmp_path / "model.onnx")
    _check_refuted(tmp_path, "mistral", [f"window {cause}"], [1, 8])


def _check_refuted(folder: Path, model: str, causes: Sequence[str], call: list[int]) -> None:
    result = audit(folder / "model.onnx", right(model) / "checkpoint", quick=True)
    refuted = [claim.call for claim in result.claims if claim.status == "refuted"]
    assert refuted and [refuted[0]["S"], refuted[0]["P"]] == call, result.claims
    assert result.cause in causes and "the smallest wrong call: " in result.sentence


def test_what_is_not_translated_is_named(tmp_path: Path) -> None:
    graph = right("llama") / "right.onnx"
    plant(graph, "attention_mask", "Y = Sign (X)", tmp_path / "model.onnx")
    result = audit(tmp_path / "model.onnx", right("llama") / "checkpoint", quick=True)
    assert result.right and [*status(result).values()] == ["not proved", "not proved", "proved"]
    assert "1 of 3 claims on masks and positions proved" in result.sentence
    assert "keys that layer 0 sees: operator Sign is not translated" in result.sentence
