"""Faults that are planted in a finished artefact are found at every depth and in every format, and correct artefacts pass."""

from pathlib import Path
from typing import Any, Dict, Tuple

import pytest

from bench.planted_faults import arguments_of, described, openers
from posenc_export.export import export
from posenc_export.models.presets import seeded
from posenc_export.runtime import verify
from posenc_export.runtime.artefact.manifest import Manifest
from tests.export.artefact_faults import FAULTS, measured
from tests.traces import sources

HIDDEN = "one frequency 1 % off"  # by the rounding of activations; the float32 graph of the same numbers, which every export verifies too, shows it
_made: Dict[Tuple[str, int, str], Tuple[Path, Manifest]] = {}


def _artefact(variant: str, layers: int, format_: str, folder: Path) -> Tuple[Path, Manifest]:
    key = variant, layers, format_
    if key not in _made:
        _made[key] = folder / "artefact", export(sources(described(variant, layers)), "ort", folder / "artefact", verify=False, **arguments_of(format_, folder))
    return _made[key]


@pytest.mark.xdist_group("artefact_faults")
@pytest.mark.parametrize("fault", [fault for fault in FAULTS if fault != HIDDEN])
@pytest.mark.parametrize("format_", ["float16", "int8"])
def test_a_fault_of_a_shallow_artefact_exceeds_its_tolerance(format_: str, fault: str, tmp_path_factory: Any, tmp_path: Path) -> None:
    folder, manifest = _artefact(FAULTS[fault].variant, 2, format_, tmp_path_factory.mktemp("made"))
    made, tolerance = measured(folder, manifest, FAULTS[fault], tmp_path, openers(format_)[1])
    assert made.exceeds(tolerance)


@pytest.mark.xdist_group("artefact_faults")
def test_the_float32_graph_shows_a_fault_that_rounding_hides(tmp_path_factory: Any, tmp_path: Path) -> None:
    folder, manifest = _artefact("rope", 2, "float32", tmp_path_factory.mktemp("made"))
    made, tolerance = measured(folder, manifest, FAULTS[HIDDEN], tmp_path, openers("float32")[1])
    assert made.exceeds(tolerance)


@pytest.mark.parametrize("layers", [2, *(pytest.param(depth, marks=pytest.mark.exhaustive) for depth in (12, 32, 48))])
@pytest.mark.parametrize("format_", ["int8", *(pytest.param(name, marks=pytest.mark.exhaustive) for name in ("float16", "int4", "int4-128", "cache int8"))])
def test_a_correct_artefact_passes_at_every_depth(format_: str, layers: int, tmp_path: Path) -> None:
    export(seeded(described("rope", layers)), "ort", tmp_path / "made", **arguments_of(format_, tmp_path))
    assert verify(tmp_path / "made", "cpu")["passed"]
