"""Graphs of others are right where they are right, and wrong where they are wrong."""

from pathlib import Path

import pytest

from posenc_export import audit
from tests.auditing.faults import FAULTS, Faulty
from tests.auditing.graphs import MODELS, exported, model_of


@pytest.mark.parametrize("cached", [False, True])
@pytest.mark.parametrize("name", MODELS)
def test_a_right_graph_is_right(name: str, cached: bool, tmp_path: Path) -> None:
    model = model_of(name)
    model.save_pretrained(tmp_path / "checkpoint")
    result = audit(exported(model, tmp_path / "model.onnx", cached), tmp_path / "checkpoint")
    assert result.right and not result.cause, result.sentence
    ran = {cell.status for cell in result.cells}
    assert ran <= {"right", "not possible"} and "right" in ran


@pytest.mark.parametrize("name", FAULTS)
def test_a_fault_is_found_and_named(name: str, tmp_path: Path) -> None:
    fault = FAULTS[name]
    model = model_of(fault.model)
    model.save_pretrained(tmp_path / "checkpoint")
    graph = exported(model, tmp_path / "model.onnx", wrapped=Faulty(model, fault).eval())
    result = audit(graph, tmp_path / "checkpoint")
    assert not result.right and result.cause in fault.causes, result.sentence
