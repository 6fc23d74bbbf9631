"""Models whose activations have large outliers are accepted, and faults in them are still found."""

import functools
from pathlib import Path
from typing import Any

import pytest
import torch

from bench.ruins import RUINS, exporting
from posenc_export.export import Sources, VerificationError, export
from posenc_export.models.presets import seeded
from posenc_export.models.short_forms import block_config, decoder_config
from posenc_export.models.stack import Stack
from posenc_export.runtime import verify

FORMATS = [
    ("ort", {}),
    ("torchscript", {}),
    ("ort", {"weights": "int4"}),
    ("ort-cuda", {}),
    pytest.param("onnx", {}, marks=pytest.mark.exhaustive),
    pytest.param("ort", {"weights": "int8"}, marks=pytest.mark.exhaustive),
    pytest.param("ort", {"weights": "int8-32"}, marks=pytest.mark.exhaustive),
    pytest.param("ort", {"weights": "int4-128"}, marks=pytest.mark.exhaustive),
]


def with_outliers() -> Stack:
    """A decoder in which three channels behind each norm are 100 times as large as the others."""
    block = block_config(64, 4, 96, kv_heads=2)
    model = seeded(decoder_config(256, 2, 128, block, tied=False))
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" in name:
                parameter[:3] *= 100
    assert isinstance(model, Stack)
    return model


@functools.cache
def traced() -> Sources:
    """Return the decoder with outliers, which is traced once for each format."""
    return Sources(with_outliers())


@pytest.mark.parametrize(("target", "arguments"), FORMATS)
def test_a_model_with_outliers_of_100_times_the_mean_is_certified(
    target: str, arguments: Any, tmp_path: Path
) -> None:
    export(traced(), target, tmp_path / "made", max_loss=1e6, verify="quick", **arguments)
    assert verify(tmp_path / "made", "cpu", quick=True)["passed"]


def test_a_tolerance_that_is_given_does_not_grow(tmp_path: Path) -> None:
    with pytest.raises(VerificationError, match="expected errors within 1.2e-05"):
        export(traced(), "ort", tmp_path / "made", tolerance=1.2e-5, verify="quick")


def test_scores_1_percent_off_are_found_in_a_model_with_outliers(tmp_path: Path) -> None:
    ruin = next(ruin for ruin in RUINS if ruin.name == "softmax scale 1 % off")
    with exporting("ort", ruin.plant), pytest.raises(VerificationError):
        export(with_outliers(), "ort", tmp_path / "made", verify="quick")
