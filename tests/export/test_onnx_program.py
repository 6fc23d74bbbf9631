"""A shortened torch.onnx.export gives the graphs of the whole one."""

import gc
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime as ort
import pytest
import torch
from torch.export import Dim
from torch.nn import functional
from torch.onnx._internal.exporter._registration import ONNXRegistry

from posenc_export.export import onnx_program
from posenc_export.export.describe import describe
from posenc_export.export.trace import OPSET, Source
from posenc_export.models.presets import seeded
from tests.export.graph_digests import outputs_of
from tests.tiny import block

# With Operators, these have every operator of tiny models whose programs are left as they are.
MODELS = {
    "fox": block("fox"),
    "decomposed_2d": block("decomposed_2d-wide"),
    "transformer_xl": block("transformer_xl-clamped"),
}


class Operators(torch.nn.Module):
    """Operators that MODELS do not have."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:  # [B,S,8]
        x = functional.rms_norm(functional.layer_norm(x, [8]), [8])
        first, second = (x - functional.embedding(x[..., 0].to(torch.int64), x[0])).split(4, dim=-1)
        first = torch.cat((first.sin(), first.cos()), dim=-1).permute(0, 2, 1)[:, 1:].tanh()
        second = functional.gelu(second.floor().relu().log1p().sigmoid(), approximate="tanh")
        second = functional.softplus(functional.silu(second)).view(x.size(0), x.size(1), 4)
        second = torch.maximum(second, second[0]).pow(second.amax(dim=2, keepdim=True))
        chosen = second.topk(2).indices
        kept = torch.zeros_like(second).scatter(2, chosen, torch.ones_like(second)).ne(0)
        weights = 1 - second.masked_fill(~kept, -1.0).softmax(-1) * chosen.amax(2, keepdim=True)
        weights = (
            weights.unflatten(2, [2, -1]).flatten(-2).reshape(x.size(0), x.size(1), 2, 2).flatten(2)
        )
        return (first.transpose(1, 2).select(2, 0).unsqueeze(2) * weights).to(torch.float32)


def traced(name: str) -> list[str]:
    if name not in MODELS:
        module, shapes = Operators().eval(), ({0: Dim.DYNAMIC, 1: Dim.DYNAMIC},)
        program = onnx_program.onnx_program(module, (torch.ones(2, 5, 8),), shapes, OPSET)
        return [*outputs_of(program.model.graph).values()]
    model = seeded(MODELS[name])
    manifest = describe(model, "onnx", "positions")
    return [*outputs_of(Source(model).semantic(manifest).graph).values()]


@pytest.mark.parametrize(
    "name",
    [
        *(pytest.param(name, marks=pytest.mark.exhaustive) for name in MODELS if name != "fox"),
        "fox",
        "operators",
    ],
)
def test_a_program_that_is_left_as_it_is_has_the_operators_of_one_that_was_decomposed(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    reasons: list[Any] = []
    unfinished = onnx_program.unfinished
    monkeypatch.setattr(onnx_program, "unfinished", lambda *call: reasons.append(unfinished(*call)))
    outputs = traced(name)
    # A version of torch that builds its table elsewhere is used as it is.
    monkeypatch.setattr(onnx_program, "import_module", lambda name: None)
    assert outputs == traced(name)
    assert reasons == [None]


class Flattened(torch.nn.Module):
    """Axes of which one, two and all have dynamic sizes."""

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:  # [B,S,8]
        images = x.unflatten(2, [-1, 4])  # [B,S,2,4]
        return images.flatten(1, 2), images.flatten(0, 1), images.flatten(), 2 - x.long() * 0.5


def test_flattened_axes_stay_dynamic(tmp_path: Path) -> None:
    module, shapes = Flattened().eval(), ({0: Dim.DYNAMIC, 1: Dim.DYNAMIC},)
    program = onnx_program.onnx_program(module, (torch.ones(2, 5, 8),), shapes, OPSET)
    program.save(tmp_path / "model.onnx")
    x = torch.randn(3, 7, 8)
    found = ort.InferenceSession(tmp_path / "model.onnx").run(None, {"x": x.numpy()})
    for output, expected in zip(found, module(x), strict=True):
        np.testing.assert_array_equal(output, expected.numpy())


class Summed(torch.nn.Module):
    def __init__(self, decomposed: bool) -> None:
        super().__init__()
        self.decomposed = decomposed

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.rsub(x, 1, alpha=2) if self.decomposed else x.clone().add_(x)


@pytest.mark.filterwarnings("ignore:.isinstance.treespec:FutureWarning")  # of torch itself
@pytest.mark.parametrize(("decomposed", "operator"), [(True, "rsub"), (False, "add_")])
def test_a_program_with_other_operators_is_decomposed(decomposed: bool, operator: str) -> None:
    program = torch.export.export(Summed(decomposed), (torch.ones(3),))
    registry = ONNXRegistry.from_torchlib()
    assert operator in (onnx_program.unfinished(program, registry) or "")
    whole = onnx_program.decomposed(program, registry, program.run_decompositions)
    assert operator not in str(whole.graph)


def _trace(fails: bool = False) -> Any:
    module = Summed(decomposed=not fails)
    if fails:
        del module.decomposed
    return onnx_program.onnx_program(module.eval(), (torch.ones(3),), None, OPSET).model.graph


def test_torch_is_left_as_it_was_by_a_trace_that_fails() -> None:
    before = vars(ONNXRegistry)["from_torchlib"]
    with pytest.raises(AttributeError):
        _trace(fails=True)
    assert vars(ONNXRegistry)["from_torchlib"] is before
    assert gc.isenabled()
