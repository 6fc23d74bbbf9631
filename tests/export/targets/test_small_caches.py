"""Caches in few bits: how scales are chosen, and how artefacts are verified."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from posenc_export.benchmark.machine import step_bytes
from posenc_export.export import export
from posenc_export.export.expected import eager_session
from posenc_export.export.quantization import calibration, samples
from posenc_export.models.presets import seeded
from posenc_export.models.short_forms import block_config, decoder_config
from posenc_export.runtime import load, verify
from posenc_export.runtime.artefact import rules
from posenc_export.shared import numerics
from posenc_export.shared.numerics import HEADROOM, tolerance, worst_error
from tests.tiny import block

BLOCK = block_config(64, 4, 128, kv_heads=2, head_size=16, encoding={"name": "rope"})
BYTES = decoder_config(256, 2, 96, BLOCK)


def test_the_scale_of_a_channel_maps_its_largest_value_with_headroom_to_the_last_code(
    tmp_path: Path,
) -> None:
    model = seeded(block_config(24, 2, 64, encoding={"name": "nope"}))
    sample = samples.read(_hidden(tmp_path, 24), model)
    weight: Any = model.attention.projection.qkv.weight  # type: ignore[union-attr]
    projected = sample.windows.reshape(-1, 24) @ weight.detach().double().numpy().T
    result = calibration.cache_scales(model, sample)
    largest = np.abs(projected).max(0).reshape(3, 2, 12)  # of queries, keys and values
    for part, name in ((1, "key"), (2, "value")):
        error = worst_error(result[f"past_key_values.0.{name}"], HEADROOM / 127 * largest[part])
        assert error <= tolerance("float32", 1, 24)


def test_windows_are_placed_over_the_whole_range_of_positions(tmp_path: Path) -> None:
    model = seeded(block_config(16, 1, 4096, head_size=16, encoding={"name": "rope"}))
    x = np.zeros((4096, 16), np.float32)
    x[:, 0] = 1.0
    np.save(tmp_path / "x.npy", x)
    scales = calibration.cache_scales(model, samples.read(tmp_path / "x.npy", model))
    key = model.attention.projection.qkv.weight.detach().numpy()[16:32, 0]  # type: ignore[union-attr,operator]
    wanted = HEADROOM / 127 * np.hypot(key[:8], key[8:])
    # Pairs that rotate by at least half a turn within the range, so that both channels reach the
    # length of the pair.
    for channels in scales["past_key_values.0.key"][0].reshape(2, 8):
        np.testing.assert_allclose(channels[:5], wanted[:5], rtol=0.1)


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the artefact of a block with an 8-bit cache."""
    folder = tmp_path_factory.mktemp("block")
    how: Any = {"calibrate": _hidden(folder, 64), "cache": "int8"}
    export(seeded(BLOCK), "ort", folder / "made", verify=False, **how)
    return folder / "made"


def test_outputs_with_an_8_bit_cache_are_within_the_tolerance_of_the_module(made: Path) -> None:
    model, loaded = seeded(BLOCK), load(made, provider="cpu")
    manifest, session = loaded.manifest, loaded.session(batch=2)
    assert {state.dtype for state in manifest.states} == {"int8"}
    assert manifest.calibration is not None
    x = np.random.default_rng(1).standard_normal((2, 40, 64)).astype(np.float32)
    steps = [
        session.prefill(x[:, :30], attention_mask=np.arange(30) >= np.array([[0], [9]])),
        *(session.step(x[:, index])[:, None] for index in range(30, 40)),
    ]
    wanted = eager_session(model).prefill(x[:1])
    noise = numerics.cache_noise(0, manifest.calibration.tokens)
    error = worst_error(np.concatenate(steps, 1)[0], wanted[0])
    assert 0 < error <= numerics.rounding_tolerance(noise)


@pytest.mark.exhaustive
@pytest.mark.parametrize("signature", ["positions", "mask"])
@pytest.mark.parametrize("weights", [None, "int8", "int4"])
def test_a_decoder_is_verified_with_float32_and_with_8_bit_caches(
    weights: str, signature: str, tmp_path: Path
) -> None:
    how: Any = {"weights": weights, "calibrate": _text(tmp_path), "cache": "int8"}
    manifest = export(seeded(BYTES), "ort", tmp_path / "made", signature, **how)
    assert manifest.certificate is not None and manifest.certificate["passed"]
    result = manifest.quality
    assert result is not None and result.error > 0 and result.exact <= result.exact_tolerance


@pytest.mark.exhaustive
@pytest.mark.parametrize("signature", ["positions", "mask"])
@pytest.mark.parametrize("name", ["alibi", "t5", "rope-partial", "xpos", "learned", "fire"])
def test_blocks_are_verified(name: str, signature: str, tmp_path: Path) -> None:
    how: Any = {"calibrate": _hidden(tmp_path, 48), "cache": "int8"}
    manifest = export(seeded(block(name)), "ort", tmp_path / "made", signature, **how)
    assert manifest.certificate is not None and manifest.certificate["passed"]


def _hidden(folder: Path, width: int) -> Path:
    numbers = np.random.default_rng(0).standard_normal((2048, width))
    np.save(folder / "x.npy", numbers.astype(np.float32))
    return folder / "x.npy"


def _text(folder: Path) -> Path:
    (folder / "text").write_bytes(np.random.default_rng(0).bytes(4096))
    return folder / "text"


REFUSALS: dict = {
    "an unknown format": ({"cache": "int4"}, "cache to be one of float16, int8, got 'int4'"),
    "no calibration data": (
        {"cache": "int8"},
        "expected calibration data for the scales of cache int8, got none",
    ),
    "a growing cache": (
        {"cache": "int8", "target": "onnx"},
        "expected target ort or ort-native in float32 for cache int8, got onnx",
    ),
    "float16": ({"cache": "int8", "dtype": "float16"}, "got ort in float16"),
    "another target": (
        {"cache": "float16"},
        "expected target ort-native in float32 for cache float16, got ort; change the target or",
    ),
    "a cache without scales": (
        {"cache": "float16", "target": "ort-native", "calibrate": "sample.txt"},
        "expected calibration data only for weights int8 or of 4 bits, or cache int8, got it",
    ),
}


@pytest.mark.parametrize(("given", "message"), REFUSALS.values(), ids=REFUSALS)
def test_an_unsupported_combination_is_refused(given: dict, message: str, tmp_path: Path) -> None:
    more: dict = {"target": "ort", **given}
    with pytest.raises(ValueError, match=message):
        export(seeded(BLOCK), folder=tmp_path / "made", **more)


@pytest.mark.exhaustive
def test_a_cache_that_content_scores_read_is_refused(tmp_path: Path) -> None:
    said = "read by GroupQueryAttention or CachedAttention alone for cache int8, got .* cope"
    how: Any = {"calibrate": _hidden(tmp_path, 48), "cache": "int8"}
    with pytest.raises(ValueError, match=said):
        export(seeded(block("cope")), "ort", tmp_path / "made", verify=False, **how)


def test_a_manifest_with_8_bit_states_must_name_the_cache_format(made: Path) -> None:
    said = "int8 states exactly with cache int8, for target ort or ort-native"
    with pytest.raises(ValueError, match=said):
        rules.check(load(made, provider="cpu").manifest.replace(cache=""))


def test_the_benchmark_counts_one_byte_per_number_of_an_8_bit_cache(made: Path) -> None:
    manifest = load(made, provider="cpu").manifest
    # keys and values of two heads
    assert step_bytes(manifest, 10) - step_bytes(manifest, 0) == 10 * 2 * 2 * 16


@pytest.mark.parametrize("encoding", ["rope", "alibi"])
def test_an_artefact_with_8_bit_caches_passes_every_check(encoding: str, tmp_path: Path) -> None:
    attention = block_config(32, 2, 64, encoding={"name": encoding})
    model, folder = seeded(decoder_config(256, 1, 32, attention)), tmp_path / "made"
    export(model, "ort", folder, cache="int8", calibrate=_text(tmp_path), verify="quick")
    certificate = verify(folder, "cpu", quick=True)
    assert certificate["passed"] and {"indices", "operators"} <= certificate["checks"].keys()
