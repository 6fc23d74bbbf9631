"""Every fault at an edge far from the first position stops an export, by an error far above the
tolerance.
"""

from pathlib import Path

import pytest

from posenc_export.export import VerificationError, export
from posenc_export.runtime.artefact.certificate import bound_of
from tests.faults.of_edges import FAULTS
from tests.traces import sources

FACTOR = 10  # of the error over its tolerance
THOROUGH = (  # a larger fault of the same place, the other side of a border, another depth
    "window ignored",
    "border of the last bucket one early",
    "clip distance one short",
    "slot shifted in a step at 256 cached tokens",
)


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=[pytest.mark.exhaustive] if name in THOROUGH else [])
        for name in FAULTS
    ],
)
@pytest.mark.xdist_group("faults at edges")
def test_a_fault_at_an_edge_is_found(name: str, tmp_path: Path) -> None:
    config, planted = FAULTS[name]
    with planted(), pytest.raises(VerificationError) as caught:
        export(sources(config), "ort", tmp_path / "artefact")
    result = caught.value.certificate
    assert any(error > FACTOR * bound_of(result, cell) for cell, error in result["cells"].items())
