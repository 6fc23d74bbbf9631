"""What a session on CUDA feeds for the first tokens of rows of different lengths."""

from typing import Any

import numpy as np
import pytest

from posenc_export.export.expected import expected_outputs
from posenc_export.runtime import Session, load
from posenc_export.runtime.graphs.ort_graph import OrtGraph
from tests.certified import certify
from tests.tiny import decoder
from tests.traces import artefact, sources

pytestmark = pytest.mark.xdist_group("alibi")


@pytest.fixture
def fed_as_on_cuda() -> Session:
    """A session of the CPU that feeds what a session on CUDA feeds."""
    graph = load(artefact(decoder("alibi"), "ort"), provider="cpu", threads=1).graph
    graph.provider = "cuda"
    return Session(graph)


def test_rows_that_begin_together_have_the_padded_length(
    fed_as_on_cuda: Session, monkeypatch: pytest.MonkeyPatch
) -> None:
    fed: list[dict[str, np.ndarray]] = []
    bind = OrtGraph.bind

    def noted(self: OrtGraph, feeds: Any, *rest: Any, **named: Any) -> Any:
        fed.append(feeds)
        return bind(self, feeds, *rest, **named)

    monkeypatch.setattr(OrtGraph, "bind", noted)
    rows: list[Any] = [np.zeros(count, np.int64) for count in (5, 8, 1)]
    fed_as_on_cuda.prefill(rows)
    fed_as_on_cuda.prefill([row[:2] for row in rows])
    assert [feeds["seqlens_k"].tolist() for feeds in fed] == [[7, 7, 7], [6], [9], [1]]


def test_the_padded_length_changes_no_output(fed_as_on_cuda: Session) -> None:
    result = sources(decoder("alibi")).model
    assert certify(fed_as_on_cuda, result, expected_outputs(result, fed_as_on_cuda.manifest))[
        "passed"
    ]
