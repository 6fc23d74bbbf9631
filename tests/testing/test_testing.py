"""The checks for authors of encodings: correct encodings pass, and faults are detected."""

import math
from typing import Any, Optional, Sequence, Union

import numpy as np
import pytest
import torch
from torch import Tensor

from posenc_export import encodings
from posenc_export.encodings import Geometry, Oracle, PositionEncoding
from posenc_export.encodings.rope_2d import RoPE2D, RoPE2DOracle
from posenc_export.encodings.shared.base import Table
from posenc_export.testing import FAULTS, check_encoding


class Rooted(PositionEncoding):
    """scores - sqrt(|i - j|) h / H."""

    def __init__(self, geometry: Geometry, strength: float = 1.0) -> None:
        super().__init__()
        self.slopes = Table(strength * (np.arange(geometry.heads) + 1) / geometry.heads)

    def bias(self, q_positions: Tensor, k_positions: Tensor) -> Optional[Tensor]:
        """q_positions [B,S], k_positions [B,T] int64 to [B,H,S,T] float32."""
        distance = (q_positions[:, None, :, None] - k_positions[:, None, None, :]).abs().to(torch.float32)
        return -self.slopes.rows[:, None, None] * torch.sqrt(distance)

    def oracle(self) -> Oracle:
        return RootedOracle(self.slopes.exact)


class RootedOracle(Oracle):
    def __init__(self, slopes: np.ndarray) -> None:
        self.slopes = slopes

    def bias(self, head: int, query: int, key: int) -> float:
        return -float(self.slopes[head]) * math.sqrt(abs(query - key))


class AnotherOracle(Rooted):
    def oracle(self) -> Oracle:
        return RootedOracle(1.001 * self.slopes.exact)


class NoOracle(Rooted):
    def oracle(self) -> Oracle:
        return Oracle()


class Nothing(Rooted):
    """A bias that does not read positions."""

    def bias(self, q_positions: Tensor, k_positions: Tensor) -> Optional[Tensor]:
        return super().bias(torch.zeros_like(q_positions), torch.zeros_like(k_positions))

    def oracle(self) -> Oracle:
        return RootedOracle(0 * self.slopes.exact)


class OnGrid(RoPE2D):
    """A rotation by row and column."""


class ColumnsAsRows(OnGrid):
    """The same rotation, with an oracle that exchanges the axes. At positions of text, which are equal on all axes, both agree."""


class ColumnsAsRowsOracle(RoPE2DOracle, of=ColumnsAsRows):
    def rotated(self, x: np.ndarray, place: Union[int, Sequence[int]], frequencies: np.ndarray) -> np.ndarray:
        return super().rotated(x, place if isinstance(place, int) else place[::-1], frequencies)


def test_an_oracle_on_a_grid_gets_coordinates() -> None:
    assert set(check_encoding(OnGrid, targets=[], faults=[])["oracle"]) == {"rotate"}
    with pytest.raises(AssertionError, match="ColumnsAsRows: expected rotate within .* of its oracle"):
        check_encoding(ColumnsAsRows, targets=[], faults=[])


def test_a_correct_encoding_passes_and_every_fault_is_detected() -> None:
    found = check_encoding(Rooted, {"strength": 0.5}, targets=["ort"])
    assert found["targets"]["ort"]["passed"] and set(found["faults"]) == set(FAULTS) - {"states forgotten"} and set(found["oracle"]) == {"bias"}


@pytest.mark.exhaustive
def test_a_correct_encoding_passes_on_every_target() -> None:
    assert all(certificate["passed"] for certificate in check_encoding(Rooted)["targets"].values())


@pytest.mark.exhaustive
@pytest.mark.parametrize("name", ["learned", "rope", "shaw", "mrope", "t5"])
def test_built_in_encodings_pass_the_checks_for_authors(name: str) -> None:
    assert len(check_encoding(encodings.REGISTRY[name], targets=[])["faults"]) == 2


def test_a_lost_state_is_detected() -> None:
    assert set(check_encoding(encodings.REGISTRY["fox"], targets=[], faults=["states forgotten"])["faults"]) == {"states forgotten"}


@pytest.mark.parametrize(
    ("cls", "message"),
    [
        (AnotherOracle, r"check_encoding AnotherOracle: expected bias within .* of its oracle at positions 0, 1, 2, 255, 1000, 1099, got 1\.0e-03"),
        (NoOracle, "check_encoding NoOracle: expected bias within"),
        (Nothing, "expected the grid to detect the planted fault 'offset ignored', got no difference"),
    ],
)
def test_an_incorrect_encoding_raises_an_assertion_error(cls: Any, message: str) -> None:
    with pytest.raises(AssertionError, match=message):
        check_encoding(cls, targets=[])


@pytest.mark.parametrize(
    ("given", "message"),
    [({"faults": ["all"]}, "expected faults to be among offset ignored"), ({"parameters": {"strenght": 1.0}}, "expected parameter to be one of strength, got")],
)
def test_invalid_arguments_of_the_checks_are_refused(given: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        check_encoding(Rooted, targets=[], **given)
    assert "encoding_under_test" not in encodings.KNOWN
