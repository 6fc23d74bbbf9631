"""The traces of tests (tests/quick_traces.py) have the operators of those of users."""

import pytest
import torch
from torch.onnx._internal.exporter import _fx_passes
from torch.onnx._internal.exporter._registration import ONNXRegistry

from posenc_export.export import TARGETS
from posenc_export.export.describe import describe
from posenc_export.export.trace import Source
from tests import quick_traces as quick
from tests.export.graph_digests import outputs_of
from tests.export.test_parity import FUSED, in_turn
from tests.tiny import decoder
from tests.traces import sources


@pytest.mark.parametrize(
    "tokens", [pytest.param(name, marks=pytest.mark.xdist_group(name)) for name in FUSED]
)
def test_a_trace_has_the_operators_of_one_that_was_decomposed(
    tokens: str, quick_traces: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = sources(in_turn(decoder(tokens), FUSED[tokens])).of("float32")
    manifest = describe(source.model, "onnx", "positions", TARGETS["onnx"])
    traced = source.semantic(manifest)
    monkeypatch.setattr(_fx_passes, "decompose_with_registry", quick.as_exporter)
    whole = Source(source.model).semantic(manifest)
    assert outputs_of(traced.graph) == outputs_of(whole.graph)


class Summed(torch.nn.Module):
    def __init__(self, decomposed: bool) -> None:
        super().__init__()
        self.decomposed = decomposed

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.rsub(x, 1) if self.decomposed else x.clone().add_(x)


@pytest.mark.filterwarnings("ignore:.isinstance.treespec:FutureWarning")  # of torch itself
@pytest.mark.parametrize(("decomposed", "operator"), [(True, "rsub"), (False, "add_")])
def test_a_program_with_other_operators_is_decomposed(decomposed: bool, operator: str) -> None:
    program = torch.export.export(Summed(decomposed), (torch.ones(3),))
    registry = ONNXRegistry.from_torchlib()
    assert operator in (quick.unfinished(program, registry) or "")
    assert operator not in str(quick.decomposed(program, registry).graph)
