"""A size for graph and weights: which format each weight gets, and sizes that are refused."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from posenc_export.export import export, verify
from posenc_export.export.quantization import mixed, samples
from posenc_export.export.quantization.calibration import Use
from posenc_export.export.quantization.mixed import Choice
from posenc_export.export.quantization.samples import Sample
from posenc_export.models.presets import seeded
from posenc_export.models.short_forms import block_config, decoder_config
from posenc_export.models.whole_pass import whole_pass
from posenc_export.runtime.artefact import rules

BYTES = decoder_config(256, 2, 384, block_config(128, 4, 32, kv_heads=2, encoding={"name": "rope"}))
MODEL = seeded(BYTES)
TEXT = bytes(range(32, 127)) * 6


@pytest.fixture(scope="module")
def sample() -> Sample:
    return samples.of_text(TEXT, MODEL)


def _bits(formats: dict[str, str]) -> int:
    return sum({"int4-128": 4, "int4": 5, "int8-32": 8}[name] for name in formats.values())


def test_a_larger_size_gives_weights_more_bits_until_all_have_8(sample: Sample) -> None:
    chosen = [mixed.formats_within(MODEL, sample, size) for size in (0.4, 0.46, 10.0)]
    assert _bits(chosen[0]) < _bits(chosen[1]) < _bits(chosen[2])
    assert set(chosen[2].values()) == {"int8-32"}


def test_rows_that_no_block_of_128_fills_get_shorter_blocks() -> None:
    model = seeded(decoder_config(256, 1, 96, block_config(80, 4, 32)))
    formats = mixed.formats_within(model, samples.of_text(TEXT, model), 10.0)
    assert set(formats.values()) == {"int8-32"}


def test_the_weight_that_loses_most_for_its_bytes_gets_the_larger_format() -> None:
    small_large_cheap = [
        [Choice("int4", 100, loss), Choice("int8-32", 100 + more, 0.0)]
        for loss, more in ((1.0, 100), (2.0, 100), (1.5, 50))
    ]
    result = mixed._within(small_large_cheap, 300 + 150)
    assert [choice.format for choice in result] == ["int4", "int8-32", "int8-32"]


def _loss(model: Any, tokens: torch.Tensor) -> torch.Tensor:
    logits = whole_pass(model, tokens)[0, :-1]
    return torch.nn.functional.cross_entropy(logits, tokens[0, 1:], reduction="sum")


def test_the_estimated_loss_of_small_errors_is_that_of_gaussian_noise_on_the_outputs(
    sample: Sample,
) -> None:
    head = MODEL.head.linear
    uses = {"head": [Use(head.weight, True)]}
    [(_, sensitivity), *_] = mixed._measured(MODEL, sample, uses)["head"]
    rows = torch.arange(head.out_features)
    errors = 0.01 * torch.randn(head.weight.shape, generator=torch.Generator().manual_seed(0))
    window = torch.from_numpy(sample.windows[:8])
    with torch.no_grad():
        plain = sum(_loss(MODEL, row[None]) for row in window)
        noisy = seeded(BYTES)
        changes = []
        for sign in (1, -1):  # the mean over both signs has no term of first order
            noisy.head.linear.weight = torch.nn.Parameter(head.weight + sign * errors)
            more = sum(_loss(noisy, row[None]) for row in window) - plain
            changes.append(float(more) / window.numel())
    assert sensitivity.loss(errors, rows) == pytest.approx(np.mean(changes), rel=0.5)


def test_an_artefact_of_a_size_is_at_most_that_large_and_verified_with_the_formats_of_its_manifest(
    tmp_path: Path,
) -> None:
    text, place = tmp_path / "text", tmp_path / "made"
    text.write_bytes(TEXT)
    manifest = export(MODEL, "ort", place, calibrate=text, size=0.45, max_loss=10.0)
    size = sum(manifest.files[name].bytes for name in ("model.onnx", "model.onnx.data"))
    assert 0.38e6 < size <= 0.45e6 and len(set(manifest.formats.values())) > 1
    assert len(manifest.formats) == manifest.weights.matrices
    assert verify(place, MODEL, calibrate=text)["passed"]
    manifest.formats.popitem()
    with pytest.raises(ValueError, match="expected formats of 11 weights, got 10"):
        rules.check(manifest)


def test_a_size_that_is_too_small_is_refused_with_the_smallest_one(sample: Sample) -> None:
    said = r"expected a size of at least (0\.\d+) MB for this model, got 0.1; give \1"
    with pytest.raises(ValueError, match=said) as refused:
        mixed.formats_within(MODEL, sample, 0.1)
    smallest = float(str(refused.value).split(" MB")[0].rpartition(" ")[2])
    assert len(mixed.formats_within(MODEL, sample, smallest)) == 11
    with pytest.raises(ValueError, match=f"at least {smallest} MB"):
        mixed.formats_within(MODEL, sample, smallest - 0.01)


@pytest.mark.parametrize(
    ("options", "found"),
    [
        ({"size": 0.7, "weights": "int4"}, "got 0.7 MB and weights int4; give one of them"),
        ({"size": 0.0}, "expected a size above 0"),
        ({"size": 0.7}, "with calibration data, got none; give a text"),
    ],
)
def test_sizes_that_cannot_be_met_are_refused(
    tmp_path: Path, options: dict[str, Any], found: str
) -> None:
    with pytest.raises(ValueError, match=found):
        export(MODEL, "ort", tmp_path / "made", **options)


def test_a_size_for_a_block_or_another_target_is_refused(tmp_path: Path) -> None:
    one = seeded(block_config(24, 2, 64, encoding={"name": "rope"}))
    with pytest.raises(ValueError, match="expected a decoder that reads text"):
        export(one, "ort", tmp_path / "made", size=1.0)
    with pytest.raises(ValueError, match="expected target ort or ort-native in float32 for size 1"):
        export(MODEL, "onnx", tmp_path / "made", size=1.0)
