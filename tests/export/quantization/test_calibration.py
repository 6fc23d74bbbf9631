"""4-bit weights that are rounded with calibration data, and calibration data that is refused."""

import collections
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from posenc_export.export import export, verify
from posenc_export.export.quantization import calibration, grid, samples
from posenc_export.export.quantization.formats import FORMATS
from posenc_export.export.quantization.grid import DAMPING, Grid
from posenc_export.export.quantization.rounding import rounded
from posenc_export.models.presets import seeded
from posenc_export.models.short_forms import block_config, decoder_config
from posenc_export.shared.numerics import tolerance, worst_error

BLOCK = block_config(24, 2, 64, encoding={"name": "rope"})
GROUPED = block_config(40, 4, 48, kv_heads=2, head_size=16, encoding={"name": "rope"})
BYTES = decoder_config(256, 1, 56, GROUPED)


def _weight_and_inputs(outputs: int = 24, inputs: int = 70) -> tuple[np.ndarray, np.ndarray]:
    """Return a weight [N,K] and inputs [400,K] with few independent directions, like those of
    trained layers.
    """
    random = np.random.default_rng(0)
    directions = random.standard_normal((inputs // 4, inputs))
    x = random.standard_normal((400, len(directions))) @ directions
    x += 0.1 * random.standard_normal((400, inputs))
    return random.standard_normal((outputs, inputs)).astype(np.float32), x


def _moments(x: np.ndarray) -> torch.Tensor:
    return torch.from_numpy(x.T @ x / len(x))


@pytest.mark.parametrize("grid", [Grid(4, 32), Grid(4, 128, zeros=True)], ids=str)
def test_outputs_of_compensated_weights_have_less_error_than_those_of_the_nearest_weights(
    grid: Grid,
) -> None:
    weight, x = _weight_and_inputs()
    results = grid.compensated(weight, _moments(x)), grid.rounded(weight)
    compensated, nearest = (np.square(x @ (one.weight - weight).T).mean() for one in results)
    assert compensated < 0.5 * nearest


@pytest.mark.parametrize("size", [1.0, 0.0])
def test_for_uncorrelated_inputs_of_one_size_compensated_weights_are_the_nearest(
    size: float,
) -> None:
    weight, _ = _weight_and_inputs()
    compensated = Grid(4, 32).compensated(weight, size * torch.eye(weight.shape[1]).double())
    np.testing.assert_array_equal(compensated.weight, Grid(4, 32).rounded(weight).weight)


def test_errors_of_weights_count_as_much_as_the_mean_squares_of_their_inputs() -> None:
    weight, _ = _weight_and_inputs()
    sizes = torch.tensor([100.0, 1.0] * (weight.shape[1] // 2), dtype=torch.float64)
    results = Grid(4, 32).compensated(weight, torch.diag(sizes)), Grid(4, 32).rounded(weight)
    errors = [(np.square(one.weight - weight) @ sizes.numpy()).sum() for one in results]
    assert errors[0] < 0.95 * errors[1]


def test_the_second_of_two_columns_compensates_the_rounding_error_of_the_first() -> None:
    grid, weight = Grid(4, 2), np.random.default_rng(0).standard_normal((50, 2)).astype(np.float32)
    first, both, second = 2.0, 1.2, 1.0
    moments = torch.tensor([[first, both], [both, second]], dtype=torch.float64)
    result = grid.compensated(weight, moments)
    made = result.weight
    damped = second + DAMPING * (first + second) / 2
    # The second weight with the smallest squared error.
    best = weight[:, 1] + both / damped * (weight[:, 0].astype(np.float64) - made[:, 0])
    # Otherwise the weight is clipped to the last code.
    inside = np.abs(best / result.scales[:, 0] + 0.5) <= 8
    step = np.abs(result.scales[:, 0])
    assert inside.sum() > 25
    assert (np.abs(made[:, 1] - best)[inside] <= step[inside] * (0.5 + 1e-6)).all()


def test_compensated_weights_do_not_depend_on_how_many_columns_are_updated_at_a_time(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    weight, x = _weight_and_inputs()
    at_once = Grid(4, 32).compensated(weight, _moments(x)).codes
    monkeypatch.setattr(grid, "COLUMNS", 16)
    differs = Grid(4, 32).compensated(weight, _moments(x)).codes != at_once
    # Sums in another order may round a few weights to the other code.
    assert differs.mean() < 0.01


def test_moments_of_the_first_layer_are_those_of_the_sample(tmp_path: Path) -> None:
    model, x = seeded(BLOCK), np.random.default_rng(0).standard_normal((200, 24)).astype(np.float32)
    np.save(tmp_path / "x.npy", x)
    sample = samples.read(tmp_path / "x.npy", model)
    (result,) = calibration.moments(model, sample)
    assert sample.windows.shape == (3, 64, 24)
    assert set(result) == {f"attention.projection.{name}" for name in ("qkv", "output")}
    wide = x[:192].astype(np.float64)  # an incomplete window at the end is not used
    error = worst_error(result["attention.projection.qkv"].numpy(), wide.T @ wide / 192)
    assert error <= tolerance("float32", 1, 192)


def test_moments_do_not_depend_on_the_number_of_passes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = seeded(BYTES)
    sample = samples.read(_text(tmp_path), model)
    (at_once,) = calibration.moments(model, sample)
    monkeypatch.setattr(calibration, "MEMORY", 1)
    apart = dict(collections.ChainMap(*calibration.moments(model, sample)))
    assert all(torch.equal(at_once[name], apart[name]) for name in at_once)


def test_a_tied_table_is_rounded_with_the_moments_of_the_inputs_of_its_head(tmp_path: Path) -> None:
    model = seeded(BYTES)
    (moments,) = calibration.moments(model, samples.read(_text(tmp_path), model))
    models: Any = (model, rounded(model, "int4", [moments]).model)
    table, result = (one.tokens.embedding.weight.detach().numpy() for one in models)
    wanted = FORMATS["int4"].tables.compensated(table, moments["head.linear"]).weight
    np.testing.assert_array_equal(result, wanted)


@pytest.mark.exhaustive
def test_the_manifest_contains_the_digest_of_the_calibration_data_and_verify_needs_that_data(
    tmp_path: Path,
) -> None:
    text = _text(tmp_path)
    one, other = (
        export(seeded(BYTES), "ort", tmp_path / name, weights="int4", calibrate=text)
        for name in ("one", "other")
    )
    assert one.calibration is not None
    assert one.calibration.tokens == 432
    assert one.digest == other.digest
    assert verify(tmp_path / "one", calibrate=text)["passed"]
    said = "expected the calibration data of the export, sha256 .*, got none"
    with pytest.raises(ValueError, match=said):
        verify(tmp_path / "one")


def _text(folder: Path, size: int = 500) -> Path:
    path = folder / "text"
    path.write_bytes(np.random.default_rng(0).bytes(size))
    return path


REFUSALS: dict = {
    "a text shorter than a window": (
        BYTES,
        _text,
        {"size": 20},
        "expected at least 48 tokens of calibration data, got fewer",
    ),
    "a text for token ids without a tokenizer": (
        decoder_config(61, 1, 56, BLOCK),
        _text,
        {},
        "got vocabulary 61",
    ),
    "a text for hidden states": (BLOCK, _text, {}, r"expected hidden states float32 \[tokens,24\]"),
}


@pytest.mark.parametrize(("config", "make", "more", "message"), REFUSALS.values(), ids=REFUSALS)
def test_calibration_data_that_the_model_cannot_read_is_refused(
    config: Any, make: Any, more: dict, message: str, tmp_path: Path
) -> None:
    with pytest.raises(ValueError, match=message):
        samples.read(make(tmp_path, **more), seeded(config))


@pytest.mark.parametrize(
    "wrong",
    [np.zeros((100, 23), np.float32), np.zeros((100, 24)), np.full((100, 24), np.nan, np.float32)],
    ids=["width", "dtype", "nan"],
)
def test_hidden_states_of_another_width_or_dtype_or_with_nan_are_refused(
    wrong: np.ndarray, tmp_path: Path
) -> None:
    np.save(tmp_path / "x.npy", wrong)
    said = r"hidden states float32 \[tokens,24\] in a .npy file for calibration, all finite, got"
    with pytest.raises(ValueError, match=said):
        samples.read(tmp_path / "x.npy", seeded(BLOCK))


@pytest.mark.parametrize("weights", [None, "int8-32"])
def test_calibration_data_is_refused_for_formats_that_do_not_use_it(
    weights: str, tmp_path: Path
) -> None:
    said = "calibration data only for weights int8 or of 4 bits, or cache int8, got it for"
    with pytest.raises(ValueError, match=said):
        export(seeded(BLOCK), "ort", tmp_path / "made", weights=weights, calibrate=_text(tmp_path))
