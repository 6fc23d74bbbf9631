"""Forecasts of series: normalisation, limits and errors. Those of small checkpoints are compared
with transformers in tests/models/test_families.py.
"""

import shlex
from pathlib import Path
from typing import Any, Dict, Tuple

import numpy as np
import pytest
import torch

from posenc_export import export_model, from_pretrained, load
from posenc_export.commands.cli import main
from posenc_export.export import ExportOptions
from posenc_export.export.expected import eager_session
from posenc_export.models import families
from posenc_export.models.presets import seeded
from posenc_export.models.short_forms import block_config
from posenc_export.runtime.session.forecaster import Forecaster

transformers = pytest.importorskip("transformers", reason="transformers is not installed")
from tests.models.checkpoints import randomised, saved  # noqa: E402
from tests.models.series import SIZES, built  # noqa: E402

PAGE = Path(__file__).parents[2] / "docs/series.md"


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Tuple[Any, Any]:
    """Return transformers' model in float64, and ours, exported to ort."""
    folder = tmp_path_factory.mktemp("series")
    peer, checkpoint = saved("timesfm2_5", folder / "checkpoint")
    export_model(from_pretrained(checkpoint), "ort", folder / "forecast", verify=False)
    return peer.model.double(), load(folder / "forecast", threads=1)


def _series(length: int, level: float = 0.0) -> np.ndarray:
    """Return a wave with a trend."""
    time = np.arange(length)
    return level + np.sin(time / 3) + time / 50


def _wanted(peer: Any, series: np.ndarray) -> np.ndarray:
    with torch.no_grad():
        return peer([torch.from_numpy(series).double()]).full_predictions[0].numpy()


@pytest.mark.parametrize("level", [0.0, 1e4])
def test_forecasts_of_series_of_any_length_match_transformers(model: Any, level: float) -> None:
    peer, ours = model
    rows = [_series(length, level) for length in (1, 2, 31, 48)]
    rows.append(rows[3].astype(np.float32))
    for row, forecast in zip(rows, ours.forecaster().forecast(rows), strict=True):
        wanted = _wanted(peer, row)
        assert np.abs(forecast - wanted).max() <= 1e-5 * np.abs(wanted - level).max()


def test_forecasts_move_with_the_level_of_a_series(model: Any) -> None:
    low, high = model[1].forecaster().forecast([_series(40), _series(40, 1e8)])
    # Values at this level are 1.5e-8 apart.
    assert np.abs(high - 1e8 - low).max() <= 1e-5 * np.abs(low).max()


def test_later_patches_continue_a_series_as_if_it_were_read_at_once(model: Any) -> None:
    peer, ours = model
    rows, forecaster = np.stack((_series(41, 3.0), -_series(41))), ours.forecaster()
    forecaster.forecast(rows[:, :7])
    for end in (9, 11, 25, 41):
        begin = {9: 7, 11: 9, 25: 11, 41: 25}[end]
        forecasts = forecaster.forecast(rows[:, begin:end])
        for row, forecast in zip(rows, forecasts, strict=True):
            wanted = _wanted(peer, row[:end])
            assert np.abs(forecast - wanted).max() <= 1e-5 * np.abs(wanted).max()


def test_forecasts_of_values_above_0_are_not_below_0(model: Any) -> None:
    peer, ours = model
    rows = np.abs(_series(40)) * 1e-3, _series(40)
    low, whole = ours.forecaster().forecast(rows)
    assert low.min() == 0 and (low > 0).any() and whole.min() < 0
    assert np.abs(low - _wanted(peer, rows[0])).max() <= 1e-5 * low.max()


def test_forecasts_are_below_0_if_the_checkpoint_does_not_forbid_it(tmp_path: Path) -> None:
    peer, checkpoint = saved("timesfm2_5 one-sided", tmp_path)
    series = np.abs(_series(40)) * 1e-3
    forecast = Forecaster(eager_session(from_pretrained(checkpoint))).forecast([series])[0]
    wanted = _wanted(peer.model.double(), series)
    assert wanted.min() < 0 and np.abs(forecast - wanted).max() <= 1e-5 * np.abs(wanted).max()


def test_a_constant_series_is_forecast_to_stay(model: Any) -> None:
    forecasts = model[1].forecaster().forecast(np.full((1, 7), 0.1))
    assert np.abs(forecasts - 0.1).max() <= 1e-12


def test_series_may_come_from_a_generator(model: Any) -> None:
    rows = [_series(4), _series(9)]
    forecasts = model[1].forecaster().forecast(row for row in rows)
    assert np.array_equal(forecasts, model[1].forecaster().forecast(rows))


def test_a_forecaster_that_was_reset_reads_other_series(model: Any) -> None:
    forecaster = model[1].forecaster()
    first = forecaster.forecast(_series(9)[None])
    forecaster.forecast(_series(4)[None])
    forecaster.reset()
    assert np.array_equal(forecaster.forecast(_series(9)[None]), first)


def test_the_program_of_the_page_forecasts_as_transformers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    command, program = (part.partition("\n")[2] for part in PAGE.read_text().split("```")[1:4:2])
    defaults = (
        "patch_length",
        "horizon_length",
        "quantiles",
        "output_quantile_len",
        "decode_index",
    )
    sizes = {key: size for key, size in SIZES["timesfm2_5"].items() if key not in defaults}
    config = transformers.TimesFm2_5Config(**{**sizes, "context_length": 1024})
    torch.manual_seed(0)
    peer = randomised(built(config))
    _, _, checkpoint, *options = shlex.split(command)
    peer.save_pretrained(tmp_path / checkpoint)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(ExportOptions, "quick", True)
    assert main(["export", checkpoint, *options]) == 0
    names: Dict[str, Any] = {}
    exec(program, names)
    wanted = _wanted(peer.model.double(), names["visits"])
    columns = np.stack([names[name] for name in ("median", "low", "high")], 1)
    assert np.abs(columns - wanted[:, [5, 1, 9]]).max() <= 1e-5 * np.abs(wanted).max()


WRONG = {
    "at least one value": lambda opened: opened.forecast([np.zeros(3), np.zeros(0)]),
    "finite numbers": lambda opened: opened.forecast([[1.0, np.nan]]),
    "put a single series into a list": lambda opened: opened.forecast(np.zeros(4)),
    "numbers \\[n\\], got array\\(\\['a'": lambda opened: opened.forecast([["a"]]),
    "a series to be one array, got rows of different": lambda opened: opened.forecast([[1, [2]]]),
    "a multiple of 2 values for each of 1 series": lambda opened: opened.forecast([[1.0, 2, 3]]),
    "values for each of 1": lambda opened: opened.forecast(np.zeros((2, 2))),
    "positions 0 .. 499": lambda opened: opened.forecast(np.zeros((1, 1000))),
    "has read": lambda opened: (opened.session.rewind(1), opened.forecast([[1.0, 2.0]])),
}


@pytest.mark.parametrize("rule", WRONG)
def test_a_wrong_call_is_refused_and_changes_nothing(model: Any, rule: str) -> None:
    forecaster, other = model[1].forecaster(), model[1].forecaster()
    forecaster.forecast(_series(5)[None])
    other.forecast(_series(5)[None])
    with pytest.raises(ValueError, match=f"session: expected .*{rule}"):
        WRONG[rule](forecaster)
    if rule != "has read":
        following = np.ones((1, 2))
        assert np.array_equal(forecaster.forecast(following), other.forecast(following))


def test_other_models_do_not_forecast(tmp_path: Path) -> None:
    export_model(seeded(block_config(16, 2, 8)), "onnx", tmp_path / "block", verify=False)
    with pytest.raises(ValueError, match="expected a model that forecasts series, got kind block"):
        load(tmp_path / "block").forecaster()


def test_a_config_is_read_without_tensors_of_its_sizes_and_without_sizes_that_are_null() -> None:
    values = {**transformers.TimesFm2_5Config().to_dict(), "horizon_length": 2**53}
    families.read(values, None)
    with pytest.raises(ValueError, match="output_quantile_len to be an integer of 1 or more"):
        families.read({**values, "output_quantile_len": None}, None)
