"""Faults planted in artefacts are found in every format, and correct artefacts pass at every
depth.
"""

import itertools
from pathlib import Path

import pytest

from bench.ruins import arguments_of
from posenc_export.export import export
from posenc_export.models.presets import seeded
from posenc_export.runtime import verify
from tests.cases import covering
from tests.faults.artefacts import correct_artefact, described
from tests.faults.of_artefacts import FAULTS, FORMATS

SMALL = (  # faults that are smaller than the rounding of activations
    "one frequency 1 % off",
    "softmax scale 1 % off",
    "one head's queries late by one token",
    "slope of one head halved",
)
SHALLOW = ("float16", "int8")
ROUNDED = ("float16", "int8", "int8-32", "int4", "int4-128", "cache int8")


@pytest.mark.xdist_group("artefact_faults")
@pytest.mark.parametrize(
    ("name", "format_"),
    [
        (name, format_)
        for name in FAULTS
        for format_ in SHALLOW
        if format_ in FORMATS.get(name, ROUNDED)
    ],
)
def test_a_fault_of_a_shallow_artefact_exceeds_its_tolerance(name: str, format_: str) -> None:
    assert correct_artefact(FAULTS[name].model, format_, 2).detects(FAULTS[name])


QUICK = covering(SMALL, [format_ for format_ in ROUNDED if format_ not in SHALLOW])


@pytest.mark.xdist_group("artefact_faults")
@pytest.mark.parametrize(
    ("name", "format_", "layers"),
    [
        pytest.param(
            name,
            format_,
            layers,
            marks=[] if layers == 2 and (name, format_) in QUICK else [pytest.mark.exhaustive],
        )
        for name, format_, layers in itertools.product(SMALL, ROUNDED, (2, 12, 32))
    ],
)
def test_a_fault_smaller_than_the_rounding_of_activations_is_found_at_every_depth(
    name: str, format_: str, layers: int
) -> None:
    assert correct_artefact(FAULTS[name].model, format_, layers).detects(FAULTS[name])


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
