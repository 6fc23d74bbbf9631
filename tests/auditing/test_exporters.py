"""Faults are named in what torch.onnx and transformers' exporter read and write."""

import functools
import warnings
from pathlib import Path
from typing import Any, Callable, Iterator

import pytest

from bench.audit import audited, table
from bench.audit_exporters import EXPORTERS
from posenc_export import audit
from tests.auditing import families
from tests.auditing.exporter_faults import OF_CHECKPOINTS, OF_GRAPHS, OTHERS
from tests.cases import choice

# TorchScript cannot export the experts of gpt_oss, nor the choice of factors of phi3.
TRACED = [name for name, fault in OF_CHECKPOINTS.items() if fault.family in ("llama", "mistral")]
Export = Callable[[str, Path], Path]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("exporters")


@pytest.fixture(scope="module")
def checkpoint(folder: Path) -> Iterator[Callable[[str], Path]]:
    @functools.cache
    def saved(family: str) -> Path:
        families.save(family, folder / family)
        return folder / family

    yield saved


@pytest.fixture(scope="module")
def traced(folder: Path, checkpoint: Callable[[str], Path]) -> Iterator[Callable[[str], Path]]:
    @functools.cache
    def graph(family: str) -> Path:
        return exported("torchscript", checkpoint(family), folder / f"{family} traced")

    yield graph


def exported(name: str, checkpoint: Path, output: Path) -> Path:
    output.mkdir()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return EXPORTERS[name][0](checkpoint, output)


FAULTS = [*OF_GRAPHS, *OTHERS]
# Slow, and the same node, or the same cause, as another fault in another family.
SLOW = {"no ALiBi for padded rows", "bias from slots of the call", "rotary positions are slots"}


@pytest.mark.parametrize("name", choice(FAULTS, {*FAULTS} - SLOW))
def test_a_fault_in_a_graph_is_named(
    name: str, checkpoint: Any, traced: Any, tmp_path: Path
) -> None:
    fault = {**OF_GRAPHS, **OTHERS}[name]
    assert fault.plant(traced(fault.family), tmp_path / "model.onnx") > 0
    result = audit(tmp_path / "model.onnx", checkpoint(fault.family))
    assert result.cause in fault.causes, result.sentence


FAMILIES = sorted({fault.family for fault in OF_GRAPHS.values()})


@pytest.mark.parametrize("family", choice(FAMILIES, {*FAMILIES} - {"bloom"}))
def test_the_graph_without_a_fault_is_right(family: str, checkpoint: Any, traced: Any) -> None:
    assert audit(traced(family), checkpoint(family)).right


@pytest.mark.parametrize("name", TRACED)
def test_a_fault_in_what_an_exporter_reads_is_named(
    name: str, checkpoint: Any, tmp_path: Path
) -> None:
    fault = OF_CHECKPOINTS[name]
    fault.plant(checkpoint(fault.family), tmp_path / "faulty")
    graph = exported("torchscript", tmp_path / "faulty", tmp_path / "graph")
    result = audit(graph, checkpoint(fault.family))
    assert result.cause in fault.causes, result.sentence


@pytest.mark.exhaustive  # tracing takes ten seconds
def test_transformers_exporter_keeps_the_window_of_mistral(checkpoint: Any, tmp_path: Path) -> None:
    graph = exported("transformers", checkpoint("mistral"), tmp_path / "right")
    assert audit(graph, checkpoint("mistral")).right
    OF_GRAPHS["cache shifted"].plant(graph, tmp_path / "model.onnx")
    assert audit(tmp_path / "model.onnx", checkpoint("mistral")).cause == "cache"


def test_the_page_tells_a_refusal_from_a_wrong_graph(checkpoint: Any, traced: Any) -> None:
    made = {"exporter": "torchscript", "versions": {"torch": "2"}, "family": "llama"}
    file, refused = str(traced("llama")), "ValueError: no\nmore"
    rows = [
        audited({**made, "file": file}, checkpoint("llama")),
        audited({**made, "family": "qwen2", "refused": refused}, checkpoint("llama")),
        audited({**made, "family": "mistral", "file": file}, checkpoint("qwen3")),
    ]
    assert [row["verdict"] for row in rows] == ["right", "not exported", "wrong"]
    page = table(rows)
    assert "| qwen2 | - |" in page
    assert "- torchscript, mistral: wrong" in page
