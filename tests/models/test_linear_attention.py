"""Linear attention of queries and keys far below 0, where elu(x) + 1 cancels."""

import functools
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from posenc_export.export import TARGETS, Sources, export
from posenc_export.export.describe import eager
from posenc_export.models.attention import _phi
from posenc_export.models.presets import seeded
from posenc_export.models.whole_pass import exact_pass
from posenc_export.runtime import Model, load
from posenc_export.runtime.graphs.torch_graph import TorchGraph
from posenc_export.shared.numerics import tolerance, worst_error
from tests.tiny import block

pytestmark = pytest.mark.xdist_group("linear attention")

TOKENS, HEADS, SIZE = 12, 6, 16
EXHAUSTIVE = ("onnx-static", "ort-cuda", "pt2")


def _model(lowest: int, causal: bool = True) -> Any:
    """A block whose queries and keys are exact numbers of lowest .. lowest / 2 for `_inputs`."""
    config = block("rope", mechanism="linear", kv_heads=6, causal=causal, max_positions=64)
    model = seeded(config, 0).eval()
    column = np.random.default_rng(0).integers(lowest, lowest // 2, 2 * HEADS * SIZE)
    with torch.no_grad():
        weight = model.attention.projection.qkv.weight[: len(column)]
        weight.zero_()
        weight[:, 0] = torch.from_numpy(column)
    return model


@functools.cache
def _sources(lowest: int) -> Sources:
    """Return a model that is exported to several targets, traced once."""
    return Sources(_model(lowest))


def _inputs() -> np.ndarray:
    """Hidden states [S,E]; the first is the factor of queries and keys, 1 or 1/2."""
    x = np.random.default_rng(1).standard_normal((TOKENS, 48)).astype(np.float32)
    x[:, 0] = np.tile([1.0, 0.5], TOKENS // 2)
    return x


def test_phi_keeps_its_relative_precision_down_to_minus_80() -> None:
    x = np.linspace(-80, 4, 4001).astype(np.float32)
    exact = np.where(x > 0, x.astype(np.float64) + 1, np.exp(np.minimum(x.astype(np.float64), 0)))
    relative = np.abs(_phi(torch.from_numpy(x)).double().numpy() / exact - 1)
    assert relative.max() < 4 * np.finfo(np.float32).eps


@pytest.mark.parametrize("lowest", [-14, -40, -80])
@pytest.mark.parametrize("causal", [True, False])
def test_outputs_match_float64_for_queries_and_keys_far_below_0(lowest: int, causal: bool) -> None:
    model, x = _model(lowest, causal), _inputs()
    expected = exact_pass(model, x, 0)
    module, manifest = eager(model)
    outputs = Model(TorchGraph(module, manifest)).session().prefill(x[None])[0]
    assert worst_error(outputs, expected) <= tolerance("float32", 1, 48)


@pytest.mark.parametrize(
    "target",
    [
        pytest.param(name, marks=[pytest.mark.exhaustive] if name in EXHAUSTIVE else [])
        for name in TARGETS
    ],
)
def test_a_model_with_keys_of_minus_80_is_exported(target: str, tmp_path: Path) -> None:
    traced, x = _sources(-80), _inputs()
    export(traced, target, tmp_path / "a")
    if target == "ort-cuda":  # its artefact runs on CUDA
        return
    session = load(tmp_path / "a", provider="cpu").session()
    outputs = np.concatenate([session.prefill(x[None, :7])[0], session.prefill(x[None, 7:])[0]])
    assert worst_error(outputs, exact_pass(traced.model, x, 0)) <= tolerance("float32", 1, 48)
