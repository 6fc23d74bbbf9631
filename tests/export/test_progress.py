"""What an export says while it runs: on a terminal, the steps of every long phase."""

from pathlib import Path

import pytest

from posenc_export.export import export
from posenc_export.models.presets import seeded
from posenc_export.models.short_forms import block_config, decoder_config
from posenc_export.shared import progress
from posenc_export.shared.progress import Step

PHASES = (
    "measuring inputs of weights: 1 of ",
    "rounding to int4: 1 of ",
    "ort: tracing",
    "ort: lowering",
    "ort: writing weights: 1 of ",
    "ort: computing the outputs of the module: ",
    "ort: comparing the module with its formula: 1 of ",
    "ort: verifying: 1 of ",
    "measuring the loss against float32: 1 of ",
)


def test_every_long_phase_of_an_export_counts_its_steps(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(progress, "EVERY", 0.0)
    (tmp_path / "text").write_text("A text of bytes that this decoder reads. " * 100, "utf-8")
    model = seeded(
        decoder_config(
            256, 1, 64, block_config(width=32, heads=2, max_positions=64, encoding={"name": "rope"})
        )
    )
    said: list[str] = []
    export(
        model,
        "ort",
        tmp_path / "made",
        weights="int4",
        calibrate=tmp_path / "text",
        verify="quick",
        max_loss=10.0,
        progress=said.append,
    )
    for phase in PHASES:
        assert any(isinstance(line, Step) and line.startswith(phase) for line in said), phase
