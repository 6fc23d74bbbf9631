"""The loss of artefacts of few bits: what it is measured on, its figures, and its limit."""

import hashlib
import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tokenizers import Tokenizer
from tokenizers.models import BPE
from tokenizers.pre_tokenizers import ByteLevel
from tokenizers.processors import TemplateProcessing

from posenc_export.export import export, quality, verify
from posenc_export.export.describe import describe
from posenc_export.export.expected import eager_session
from posenc_export.export.quantization import grid, samples
from posenc_export.models.presets import load_preset, seeded
from posenc_export.models.short_forms import block_config, decoder_config
from posenc_export.models.stack import Text
from posenc_export.runtime.artefact.records import Quality, Weights
from posenc_export.runtime.artefact.summary import summary
from tests.traces import sources

BLOCK = block_config(32, 4, 48, encoding={"name": "rope"})
BYTES = decoder_config(256, 1, 56, BLOCK)
IDS = decoder_config(61, 1, 56, BLOCK)
OF_PACKAGE = hashlib.sha256(samples.CALIBRATION.read_bytes()).hexdigest()
GROUP = pytest.mark.xdist_group("quality")


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Quality:
    """Figures of an artefact of a decoder of bytes."""
    folder = tmp_path_factory.mktemp("quality") / "made"
    result = export(sources(BYTES), "ort", folder, weights="int4").quality
    assert result is not None
    return result


@GROUP
def test_a_decoder_of_bytes_is_measured_on_the_text_of_the_package(made: Quality) -> None:
    sample = samples.of_text(samples.TEXT.read_bytes(), seeded(BYTES))
    assert made.inputs == "text of the package" and made.sha256 == sample.sha256
    assert 0.9 * samples.TOKENS < made.tokens <= samples.TOKENS and 0 < made.agreement < 1


@GROUP
def test_the_perplexity_of_float32_is_that_of_the_module_on_the_text(made: Quality) -> None:
    model = seeded(BYTES)
    chosen = samples.with_text(None, None, model)[1]
    assert chosen is not None
    nats = []
    for window in chosen.windows:
        logits = eager_session(model).prefill(window[None])[0].astype(np.float64)[:-1]
        chosen_logits = logits[np.arange(len(logits)), window[1:]]
        nats += [*(np.log(np.exp(logits).sum(1)) - chosen_logits)]
    assert made.float32_perplexity == pytest.approx(math.exp(np.mean(nats)), rel=1e-4)
    assert made.float32_bits_per_byte == pytest.approx(np.mean(nats) / math.log(2), rel=1e-4)
    assert made.perplexity != made.float32_perplexity and made.ratio == pytest.approx(1, abs=0.02)


@GROUP
def test_a_model_that_reads_no_text_is_measured_on_random_tokens_and_never_refused(
    tmp_path: Path,
) -> None:
    result = export(sources(IDS), "ort", tmp_path / "made", weights="int4", max_loss=1.0).quality
    assert result is not None and result.inputs == "random tokens" and result.error > 0
    written = json.loads((tmp_path / "made/posenc.json").read_bytes())["quality"]
    assert result.ratio is None and "perplexity" not in written and not result.sha256


def test_windows_of_calibration_data_are_held_out_to_measure_the_loss(tmp_path: Path) -> None:
    model, path = seeded(BYTES), tmp_path / "text"
    path.write_bytes(bytes(range(256)) * 10)
    sample = samples.read(path, model)
    kept, measured = samples.with_text(sample, None, model)
    assert kept is not None and measured is not None
    assert measured.name == "held-out calibration text" and len(measured.windows) == 6
    assert len(kept.windows) + 6 == len(sample.windows)
    np.testing.assert_array_equal(kept.windows, sample.kept(kept.described.tokens).windows)


def test_a_given_text_is_measured_and_all_calibration_data_is_used(tmp_path: Path) -> None:
    model, path = seeded(BYTES), tmp_path / "text"
    path.write_bytes(bytes(range(256)) * 100)
    sample = samples.read(path, model)
    kept, measured = samples.with_text(sample, path, model)
    assert kept is sample and measured is not None and measured.name == "text"
    assert len(measured.windows) == samples.MOST


def test_a_text_for_a_model_that_reads_none_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="expected a decoder with a tokenizer or of bytes"):
        samples.with_text(None, tmp_path / "text", seeded(IDS))


def _loss() -> tuple[quality.Loss, Any]:
    """Return that of an artefact whose logits are all 0, on text, and its manifest."""
    result, following = quality.Loss(1.0), np.arange(40)[None]
    expected = np.eye(256, dtype=np.float32)[following]
    result.add(0 * expected, expected, following)
    return result, describe(seeded(BYTES), "ort", "positions").replace(weights=Weights("int4"))


def test_the_first_tokens_that_are_those_of_float32_are_counted() -> None:
    result, manifest = _loss()
    made = Quality("text", exact=0.0, exact_tolerance=0.0, **result.figures(manifest))
    said = summary(manifest.replace(quality=made))["quality"]
    assert "agrees with float32 in 1 of 40 first tokens of continuations on text;" in said


def test_a_loss_above_the_limit_is_refused_with_its_number_and_choices() -> None:
    model = seeded(BYTES)
    chosen = samples.with_text(None, None, model)[1]
    assert chosen is not None
    result, manifest = _loss()
    with pytest.raises(ValueError) as refused:
        quality._check_loss(result, manifest, quality.Inputs(model, None, chosen, 1.1), chosen)
    for said in (
        "expected weights int4 to raise the perplexity at most 1.1 times, got 2.70 times ",
        "(256 instead of 94.8 on 40 tokens, text of the package)",
        "; choose a larger one of int4-128, int4, int8, int8-32, float32, calibrate 4 bits with ",
        "your text, or accept it with max_loss 2.71",
    ):
        assert said in str(refused.value)


@pytest.mark.exhaustive
def test_an_artefact_that_loses_too_much_is_not_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    nearest = grid.Grid._nearest

    def coarse(grid: Any, *given: np.ndarray) -> np.ndarray:
        codes = nearest(grid, *given)
        return codes if grid.bits == 8 else np.trunc(codes / 4) * 4

    monkeypatch.setattr(grid.Grid, "_nearest", coarse)
    said = "raise the perplexity at most 1.1 times, got .* choose a larger one of "
    with pytest.raises(ValueError, match=f"expected weights int4 to {said}"):
        export(load_preset("small-alibi"), "ort", tmp_path / "made", weights="int4")
    assert not list(tmp_path.iterdir())


def _with_tokenizer() -> Any:
    """Return a decoder with a tokenizer of bytes that puts token 256 in front of a text."""
    symbols = [*sorted(ByteLevel.alphabet()), "<s>"]
    tokenizer = Tokenizer(BPE({symbol: index for index, symbol in enumerate(symbols)}, []))
    tokenizer.pre_tokenizer = ByteLevel(add_prefix_space=False)
    tokenizer.post_processor = TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 256)])
    model = seeded(decoder_config(257, 1, 56, BLOCK))
    model.text = Text(tokenizer=tokenizer.to_str().encode())
    return model


def test_windows_begin_with_tokens_of_the_tokenizer_that_are_not_measured() -> None:
    model = _with_tokenizer()
    chosen = samples.with_text(None, None, model)[1]
    assert chosen is not None and chosen.first == 1 and chosen.bytes_of_token == 1.0
    windows = chosen.windows
    assert (windows[:, 0] == 256).all() and (windows[:, 1:] < 256).all() and windows.shape[1] == 48
    result = quality._of_text(*(eager_session(model) for _ in range(2)), chosen)
    assert result.tokens == result.same == windows[:, 1:].size and result.ratio == 1


def test_models_with_a_tokenizer_are_calibrated_with_a_text_of_the_package() -> None:
    sample = samples.default_sample(_with_tokenizer())
    assert sample is not None and sample.sha256 == OF_PACKAGE
    assert samples.default_sample(seeded(BYTES)) is None


@pytest.mark.exhaustive
def test_an_artefact_that_is_calibrated_by_default_is_verified_again(tmp_path: Path) -> None:
    model = _with_tokenizer()
    manifest = export(model, "ort", tmp_path / "made", weights="int4")
    assert manifest.calibration and manifest.calibration.sha256 == OF_PACKAGE
    assert verify(tmp_path / "made", model)["passed"]
