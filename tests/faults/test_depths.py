"""Faults planted in artefacts are found in every format, and correct artefacts pass at every
depth.
"""

import functools
from pathlib import Path

import pytest

from posenc_export.export import export
from posenc_export.models.presets import seeded
from posenc_export.runtime import verify
from posenc_export.testing.planting import CorrectArtefact
from tests.faults.artefacts import arguments_of, correct_artefact, described
from tests.faults.of_artefacts import FAULTS
from tests.traces import sources

SMALL = (  # faults that are smaller than the rounding of activations
    "one frequency 1 % off",
    "scores scaled 1 % off",
    "queries of one head a position later",
    "slope of one head halved",
)
ROUNDED = ("float16", "int8", "int8-32", "int4", "int4-128", "cache int8")


@functools.cache
def _correct(model: str, format_: str, layers: int) -> CorrectArtefact:
    return correct_artefact(sources(described(model, layers)), format_)


@pytest.mark.xdist_group("artefact_faults")
@pytest.mark.parametrize("format_", ["float16", "int8"])
@pytest.mark.parametrize("name", FAULTS)
def test_a_fault_of_a_shallow_artefact_exceeds_its_tolerance(name: str, format_: str) -> None:
    assert _correct(FAULTS[name].model, format_, 2).detects(FAULTS[name])


@pytest.mark.xdist_group("artefact_faults")
@pytest.mark.parametrize(
    "layers", [2, *(pytest.param(depth, marks=pytest.mark.exhaustive) for depth in (12, 32))]
)
@pytest.mark.parametrize("format_", ROUNDED)
@pytest.mark.parametrize("name", SMALL)
def test_a_fault_smaller_than_the_rounding_of_activations_is_found_at_every_depth(
    name: str, format_: str, layers: int
) -> None:
    assert _correct(FAULTS[name].model, format_, layers).detects(FAULTS[name])


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
