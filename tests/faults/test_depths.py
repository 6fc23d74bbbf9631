"""Faults planted in artefacts are found in every format, and correct artefacts pass at every depth."""

import functools
from pathlib import Path

import pytest

from bench.planted_faults import arguments_of, correct_artefact, described
from posenc_export.export import export
from posenc_export.models.presets import seeded
from posenc_export.runtime import verify
from posenc_export.testing.planting import CorrectArtefact
from tests.faults.of_artefacts import FAULTS
from tests.traces import sources

HIDDEN = "one frequency 1 % off"  # by the rounding of activations; the float32 graph of the same numbers, which every export verifies too, shows it
CASES = [
    *((name, format_) for format_ in ("float16", "int8") for name in FAULTS if name != HIDDEN),
    (HIDDEN, "float32"),
]


@functools.cache
def _correct(model: str, format_: str) -> CorrectArtefact:
    return correct_artefact(sources(described(model, 2)), format_)


@pytest.mark.xdist_group("artefact_faults")
@pytest.mark.parametrize(("name", "format_"), CASES)
def test_a_fault_of_a_shallow_artefact_exceeds_its_tolerance(name: str, format_: str) -> None:
    assert _correct(FAULTS[name].model, format_).detects(FAULTS[name])


@pytest.mark.parametrize(
    "layers", [2, *(pytest.param(depth, marks=pytest.mark.exhaustive) for depth in (12, 32, 48))]
)
@pytest.mark.parametrize(
    "format_",
    [
        "int8",
        *(
            pytest.param(name, marks=pytest.mark.exhaustive)
            for name in ("float16", "int4", "int4-128", "cache int8")
        ),
    ],
)
def test_a_correct_artefact_passes_at_every_depth(
    format_: str, layers: int, tmp_path: Path
) -> None:
    export(
        seeded(described("rope", layers)),
        "ort",
        tmp_path / "made",
        **arguments_of(format_, tmp_path),
    )
    assert verify(tmp_path / "made", "cpu")["passed"]
