"""Caches in few bits: how scales are chosen, and how artefacts are verified."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from posenc_export.benchmark.machine import cache_bytes
from posenc_export.export import export
from posenc_export.export.expected import eager_session
from posenc_export.export.quantization import calibration, samples
from posenc_export.models.presets import seeded
from posenc_export.models.short_forms import block_config, decoder_config
from posenc_export.runtime import load, verify
from posenc_export.runtime.artefact import rules
from posenc_export.shared.numerics import (
    HEADROOM,
    cache_noise,
    rounding_tolerance,
    tolerance,
    worst_error,
)
from tests.tiny import block

BLOCK = block_config(64, 4, 128, kv_heads=2, head_size=16, encoding={"name": "rope"})
BYTES = decoder_config(
    256, 2, 96, block_config(64, 4, 128, kv_heads=2, head_size=16, encoding={"name": "rope"})
)


def test_the_scale_of_a_channel_maps_its_largest_value_with_headroom_to_the_last_code(
    tmp_path: Path,
) -> None:
    model = seeded(block_config(24, 2, 64, encoding={"name": "nope"}))
    sample = samples.read(_hidden(tmp_path, 24), model)
    projected = (
        sample.windows.reshape(-1, 24).astype(np.float64)
        @ model.attention.projection.qkv.weight.detach().double().numpy().T
    )  # type: ignore[union-attr,operator]
    result = calibration.cache_scales(model, sample)
    for part, name in ((1, "key"), (2, "value")):
        wanted = (
            HEADROOM / 127 * np.abs(projected[:, part * 24 : (part + 1) * 24]).max(0).reshape(2, 12)
        )
        assert worst_error(result[f"past_key_values.0.{name}"], wanted) <= tolerance(
            "float32", 1, 24
        )


def test_windows_are_placed_over_the_whole_range_of_positions(tmp_path: Path) -> None:
    model = seeded(block_config(16, 1, 4096, head_size=16, encoding={"name": "rope"}))
    x = np.zeros((4096, 16), np.float32)
    x[:, 0] = 1.0
    np.save(tmp_path / "x.npy", x)
    result = calibration.cache_scales(model, samples.read(tmp_path / "x.npy", model))[
        "past_key_values.0.key"
    ][0]
    key = model.attention.projection.qkv.weight.detach().numpy()[16:32, 0]  # type: ignore[union-attr,operator]
    pairs = np.hypot(key[:8], key[8:])
    # Pairs that rotate by at least half a turn within the range, so that both channels reach the
    # length of the pair.
    turning = slice(0, 5)
    np.testing.assert_allclose(
        result.reshape(2, 8)[:, turning], np.tile(HEADROOM / 127 * pairs[turning], (2, 1)), rtol=0.1
    )


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the artefact of a block with an 8-bit cache."""
    folder = tmp_path_factory.mktemp("block")
    export(
        seeded(BLOCK),
        "ort",
        folder / "made",
        verify=False,
        calibrate=_hidden(folder, 64),
        cache="int8",
    )
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
    assert (
        0
        < worst_error(np.concatenate(steps, 1)[0], wanted[0])
        <= rounding_tolerance(cache_noise(0, manifest.calibration.tokens))
    )


@pytest.mark.exhaustive
@pytest.mark.parametrize("signature", ["positions", "mask"])
@pytest.mark.parametrize("weights", [None, "int8", "int4"])
def test_a_decoder_is_verified_with_float32_and_with_8_bit_caches(
    weights: str, signature: str, tmp_path: Path
) -> None:
    manifest = export(
        seeded(BYTES),
        "ort",
        tmp_path / "made",
        signature,
        weights=weights,
        calibrate=_text(tmp_path),
        cache="int8",
    )
    assert manifest.certificate is not None and manifest.certificate["passed"]
    result = manifest.quality
    assert result is not None and 0 < result.error and result.exact <= result.exact_tolerance


@pytest.mark.exhaustive
@pytest.mark.parametrize("signature", ["positions", "mask"])
@pytest.mark.parametrize("name", ["alibi", "t5", "rope-partial", "xpos", "learned", "fire"])
def test_blocks_are_verified(name: str, signature: str, tmp_path: Path) -> None:
    config = block(name)
    manifest = export(
        seeded(config),
        "ort",
        tmp_path / "made",
        signature,
        calibrate=_hidden(tmp_path, config.width),
        cache="int8",
    )
    assert manifest.certificate is not None and manifest.certificate["passed"]


def _hidden(folder: Path, width: int) -> Path:
    np.save(
        folder / "x.npy", np.random.default_rng(0).standard_normal((2048, width)).astype(np.float32)
    )
    return folder / "x.npy"


def _text(folder: Path) -> Path:
    (folder / "text").write_bytes(
        np.random.default_rng(0).integers(0, 256, 4096).astype(np.uint8).tobytes()
    )
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
    config: Any = block("cope")
    with pytest.raises(
        ValueError,
        match=r"expected every cache to be read by GroupQueryAttention or CachedAttention alone "
        r"for cache int8, got past_key_values.0.key .* cope",
    ):
        export(
            seeded(config),
            "ort",
            tmp_path / "made",
            verify=False,
            calibrate=_hidden(tmp_path, config.width),
            cache="int8",
        )


def test_a_manifest_with_8_bit_states_must_name_the_cache_format(made: Path) -> None:
    with pytest.raises(
        ValueError, match="int8 states exactly with cache int8, for target ort or ort-native"
    ):
        rules.check(load(made, provider="cpu").manifest.replace(cache=""))


def test_the_benchmark_counts_one_byte_per_number_of_an_8_bit_cache(made: Path) -> None:
    manifest = load(made, provider="cpu").manifest
    assert cache_bytes(manifest, 10) == 10 * 2 * 2 * 16  # keys and values of two heads


@pytest.mark.parametrize("encoding", ["rope", "alibi"])
def test_an_artefact_with_8_bit_caches_passes_every_check(encoding: str, tmp_path: Path) -> None:
    sample = tmp_path / "sample.txt"
    content = np.random.default_rng(0).integers(0, 256, 2048).astype(np.uint8)
    sample.write_bytes(content.tobytes())
    block = block_config(32, 2, 64, encoding={"name": encoding})
    model = seeded(decoder_config(256, 1, 32, block))
    folder = tmp_path / "made"
    export(model, "ort", folder, cache="int8", calibrate=sample, verify="quick")
    certificate = verify(folder, "cpu", quick=True)
    assert certificate["passed"] and {"indices", "operators"} <= certificate["checks"].keys()
