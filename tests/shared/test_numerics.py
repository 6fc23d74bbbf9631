"""Tolerances do not grow with depth where activations are rounded, and no NaN is within one."""

from pathlib import Path

import numpy as np
import pytest

from posenc_export.commands.cli import main
from posenc_export.export import export
from posenc_export.export.describe import eager
from posenc_export.export.expected import accuracy_of
from posenc_export.export.verify import failure
from posenc_export.models.presets import seeded
from posenc_export.models.short_forms import block_config, decoder_config
from posenc_export.runtime import verify
from posenc_export.runtime.artefact.manifest import Calibration
from posenc_export.runtime.artefact.records import Reference, Weights
from posenc_export.runtime.verification import proof
from posenc_export.shared.numerics import LIMIT, Errors, cell_error, rounding_tolerance
from tests.tiny import block, decoder
from tests.traces import sources

pytestmark = pytest.mark.xdist_group("rope")  # one worker, which traces the model once
FORMATS = {
    "float16": {"dtype": "float16"},
    **{name: {"weights": Weights(name)} for name in ("int8", "int4", "int4-128")},
    "cache int8": {"cache": "int8", "calibration": Calibration("0" * 64, 1 << 17)},
}


@pytest.mark.parametrize("format_", FORMATS)
def test_the_tolerance_of_a_format_is_at_most_the_limit_and_the_same_at_every_depth(
    format_: str,
) -> None:
    result = set()
    for layers in (1, 48):
        model = seeded(decoder_config(61, layers, 8, block_config(8, 1, 16)))
        result.add(accuracy_of(model, eager(model)[1].replace(**FORMATS[format_])).tolerance)
    assert len(result) == 1 and max(result) <= LIMIT


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("at", [0, 1])
def test_a_number_that_is_not_finite_is_seen_in_every_pair_and_on_both_sides(
    bad: float, at: int
) -> None:
    good, wrong = np.ones((2, 3), np.float32), np.array([[1, 1, bad], [1, 1, 1]], np.float32)
    for pair in ((wrong, good), (good, wrong)):
        errors = Errors()
        for index in range(2):
            errors.add(*(pair if index == at else (good, good)))
        assert errors.largest == np.inf
        assert cell_error(errors, True) == np.inf
        assert cell_error(errors, False) == np.inf


def test_zeros_have_an_error_of_1_and_pass_no_tolerance() -> None:
    errors = Errors()
    errors.add(np.zeros((3, 5, 7)), np.random.default_rng(0).standard_normal((3, 5, 7)))
    assert errors.rms == 1
    assert cell_error(errors, True) == 1
    assert rounding_tolerance(1.0) == LIMIT


def test_errors_are_pooled_over_all_pairs() -> None:
    chance = np.random.default_rng(0)
    expected = [chance.standard_normal((2, size)) for size in (3, 400)]
    actual = [wanted + 1e-3 * chance.standard_normal(wanted.shape) for wanted in expected]
    errors = Errors()
    for pair in zip(actual, expected, strict=True):
        errors.add(*pair)
    flat = (
        np.concatenate([x.reshape(-1) for x in actual]),
        np.concatenate([x.reshape(-1) for x in expected]),
    )
    assert errors.rms == pytest.approx(
        np.sqrt(np.square(flat[0] - flat[1]).mean() / np.square(flat[1]).mean())
    )


def test_expected_outputs_that_are_not_finite_are_an_error_of_the_reference(tmp_path: Path) -> None:
    manifest = export(sources(block("rope")), "ort", tmp_path / "kept", verify=False)
    path = tmp_path / "kept" / proof.FILE_NAME
    path.write_bytes(b"\xff" * path.stat().st_size)
    with pytest.raises(
        ValueError, match="expected finite outputs of the module, got NaN or infinity"
    ):
        proof.read(manifest, tmp_path / "kept")


@pytest.mark.parametrize("given", [0.0, 1.0, -0.5, float("nan"), float("inf")])
def test_a_tolerance_outside_0_to_1_is_refused(given: float, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="expected tolerance to be above 0 and below 1, got"):
        export(sources(block("rope")), "ort", tmp_path / "made", tolerance=given)


def test_a_tolerance_above_the_limit_must_be_given_again(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    manifest = export(sources(decoder("rope")), "ort", tmp_path / "made", tolerance=0.5)
    assert manifest.certificate is not None and manifest.certificate["tolerance"] == 0.5
    with pytest.raises(
        ValueError,
        match="expected an artefact with a tolerance of at most 0.1, got 0.5; export it again, or "
        "give tolerance 0.5",
    ):
        verify(tmp_path / "made")
    assert verify(tmp_path / "made", tolerance=1e-5)["passed"]
    assert main(["verify", str(tmp_path / "made"), "--tolerance", "1e-9"]) == 1
    assert "EXCEEDS" in capsys.readouterr().out


def test_a_tolerance_of_an_earlier_version_is_not_accepted_in_silence() -> None:
    earlier = Reference(257, 0.84, True)
    with pytest.raises(ValueError, match="got 0.84"):
        proof.accuracy_on("cpu", earlier)
    assert proof.accuracy_on("cpu", earlier, 0.5) == proof.Accuracy(0.5)


def test_the_error_of_a_graph_is_shown_as_what_it_is() -> None:
    certificate = {
        "cells": {"a": 1e300, "b": 1e-7},
        "tolerance": 1e-5,
        "failures": {"a": "session: expected the graph to run, got RuntimeError: no kernel"},
    }
    assert "got RuntimeError: no kernel at 'a'" in failure(certificate, {})
