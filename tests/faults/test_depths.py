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
from tests.cases import choice, covering
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


IN_SHALLOW = [
    (name, format_)
    for name, format_ in itertools.product(FAULTS, SHALLOW)
    if format_ in FORMATS.get(name, ROUNDED)
]
# Of each fault one format, both in turn.
TURN = {name: SHALLOW[number % 2] for number, name in enumerate(FAULTS)}
IN_TURN = {name: (name, f) for name, f in sorted(IN_SHALLOW, key=lambda c: TURN[c[0]] == c[1])}


@pytest.mark.xdist_group("artefact_faults")
@pytest.mark.parametrize(("name", "format_"), choice(IN_SHALLOW, IN_TURN.values()))
def test_a_fault_of_a_shallow_artefact_exceeds_its_tolerance(name: str, format_: str) -> None:
    assert correct_artefact(FAULTS[name].model, format_, 2).detects(FAULTS[name])


QUICK = covering(SMALL, [format_ for format_ in ROUNDED if format_ not in SHALLOW], [2])


@pytest.mark.xdist_group("artefact_faults")
@pytest.mark.parametrize(
    ("name", "format_", "layers"), choice(itertools.product(SMALL, ROUNDED, (2, 12, 32)), QUICK)
)
def test_a_fault_smaller_than_the_rounding_of_activations_is_found_at_every_depth(
    name: str, format_: str, layers: int
) -> None:
    assert correct_artefact(FAULTS[name].model, format_, layers).detects(FAULTS[name])


CORRECT = itertools.product(("int8", "float16", "int4", "int4-128", "cache int8"), (2, 12, 32, 48))


@pytest.mark.parametrize(("format_", "layers"), choice(CORRECT, [("int8", 2)]))
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
