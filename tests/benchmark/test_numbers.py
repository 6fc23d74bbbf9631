"""Statistics and limits."""

import subprocess
import sys
import time
from pathlib import Path

import msgspec
import pytest
import torch

from posenc_export.benchmark.contestants import Contestant
from posenc_export.benchmark.machine import step_bytes, watched
from posenc_export.benchmark.ratios import spread
from posenc_export.export.describe import eager
from posenc_export.models.presets import seeded
from posenc_export.models.short_forms import block_config, decoder_config
from posenc_export.runtime.artefact.records import Quality, Weights
from tests.benchmark import rows

BLOCK = block_config(32, 4, 64, kv_heads=2, qkv_bias=True, output_bias=True)
MODELS = {
    "block": BLOCK,
    "swiglu": decoder_config(50, 3, 24, BLOCK),
    "gelu": decoder_config(50, 2, 24, BLOCK, norm="layer", mlp="gelu", mlp_bias=True),
}


def test_a_spread_has_median_and_outer_deciles_with_linear_interpolation():
    result = spread([5.0, 1.0, 4.0, 2.0, 3.0])
    assert (result.median, result.low, result.high) == (3.0, pytest.approx(1.4), pytest.approx(4.6))


@pytest.mark.parametrize("name", MODELS)
def test_weights_read_per_step_are_the_models_parameters(name):
    config = MODELS[name]
    model = seeded(config)
    parameters = sum(p.numel() for p in model.parameters())
    assert eager(model)[1].step_weights == parameters + (0 if name == "block" else config.width)


def test_cache_bytes_are_proportional_to_context_and_item_size():
    model = seeded(MODELS["swiglu"])
    token = 2 * 3 * 2 * 8  # keys and values, layers, kv heads, head size; 8: its position
    for size, dtype in ((4, torch.float32), (2, torch.float16)):
        manifest = eager(model.to(dtype))[1]
        assert step_bytes(manifest, 11) - step_bytes(manifest, 10) == size * token + 8


def test_weights_are_read_once_for_all_rows_of_a_batch():
    manifest = eager(seeded(MODELS["swiglu"]))[1]
    token = 4 * 2 * 3 * 2 * 8 + 8
    assert step_bytes(manifest, 10, batch=3) - step_bytes(manifest, 10) == 2 * 10 * token


def test_weights_of_several_formats_take_at_least_the_bytes_of_the_smallest():
    plain = eager(seeded(MODELS["swiglu"]))[1]
    of_one, of_several = (
        plain.replace(weights=Weights("int4")),
        plain.replace(weights=Weights("mixed", 2), formats={"a": "int8-32", "b": "int4"}),
    )
    assert step_bytes(of_several, 0) == step_bytes(of_one, 0) == round(0.625 * plain.step_weights)


@pytest.mark.parametrize(
    ("runtime", "cache", "known"),
    [
        ("eager", "", True),
        ("eager", "int8", False),
        ("artefact", "int8", True),
        ("llama.cpp-q4_0", "", False),
    ],
)
def test_the_bytes_of_a_step_are_known_if_the_runtime_keeps_the_formats_of_the_manifest(
    runtime, cache, known
):
    manifest = eager(seeded(BLOCK))[1].replace(cache=cache)
    assert Contestant("a", "b", runtime, Path(), "c", manifest).reads_known_bytes is known


def test_a_report_shows_the_perplexity_of_an_artefact_of_few_bits_beside_its_times() -> None:
    quality = Quality("text", 0.01, 0.9, 2048, 0.0, 1e-3, perplexity=13.0, float32_perplexity=12.5)
    manifest = eager(seeded(BLOCK))[1].replace(quality=quality)
    few_bits, built = (
        Contestant("a", "b", runtime, Path(), "c", manifest).perplexity
        for runtime in ("artefact", "llama.cpp-q4_0")
    )
    assert few_bits == 1.04 and built is None
    report = rows.report([rows.row("few bits", [1e-4] * 5)])
    shown = msgspec.structs.replace(
        report, contestants=[msgspec.structs.replace(report.contestants[0], perplexity=few_bits)]
    ).table()
    assert "x 1.040" in shown and "x 1" not in report.table()


def test_a_sample_counts_the_cores_that_other_processes_use():
    with subprocess.Popen([sys.executable, "-c", "while True: pass"]) as other:
        time.sleep(0.2)  # the start of the process
        reply = watched(lambda: time.sleep(0.3) or 7.0)
        other.kill()
    assert reply["seconds"] == 7.0 and reply["other_cores"] > 0.3
