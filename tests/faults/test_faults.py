"""The grid detects every planted fault, and correct modules pass."""

import pytest

from tests.faults import FAULTS, correct

WINDOWED = [f"windowed {variant}" for variant in ("fox", "fox_pair", "inkling-near")]
ENCODERS = ["encoder learned", "encoder learned_2d"]


@pytest.mark.parametrize(
    "model", ["rope", "fox", "shaw-bert", "two thetas", *WINDOWED, *ENCODERS]
)  # the parity tests check the others
def test_a_correct_module_passes(model: str) -> None:
    assert not correct(model).detects()


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=pytest.mark.xdist_group(fault.model.rpartition(" ")[2]))
        for name, fault in FAULTS.items()
    ],
)
def test_a_planted_fault_is_detected(name: str) -> None:
    fault = FAULTS[name]
    assert correct(fault.model, fault.target).detects(fault)
