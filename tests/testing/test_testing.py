"""The checks for authors of encodings: correct encodings pass, and faults are detected."""

import math
from typing import Any, Optional, Sequence, Tuple, Union

import numpy as np
import pytest
import torch
from torch import Tensor

from posenc_export import encodings
from posenc_export.encodings import Geometry, Oracle, PositionEncoding
from posenc_export.encodings.rope_2d import RoPE2D, RoPE2DOracle
from posenc_export.encodings.shared.base import Table
from posenc_export.testing import check_encoding


class Rooted(PositionEncoding):
    """scores - sqrt(|i - j|) h / H."""

    def __init__(self, geometry: Geometry, strength: float = 1.0) -> None:
        super().__init__()
        self.slopes = Table(strength * (np.arange(geometry.heads) + 1) / geometry.heads)

    def bias(self, q_positions: Tensor, k_positions: Tensor) -> Optional[Tensor]:
        """q_positions [B,S], k_positions [B,T] int64 to [B,H,S,T] float32."""
        distance = (
            (q_positions[:, None, :, None] - k_positions[:, None, None, :]).abs().to(torch.float32)
        )
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


class Waving(Rooted):
    """A bias of up to -1099 that is wrong by at most 0.0005: 4.5e-7 of the largest."""

    def bias(self, q_positions: Tensor, k_positions: Tensor) -> Optional[Tensor]:
        """q_positions [B,S], k_positions [B,T] int64 to [B,H,S,T] float32."""
        distance = (q_positions[:, None, :, None] - k_positions[:, None, None, :]).abs()
        return -self.slopes.rows[:, None, None] * distance - 0.0005 * torch.sin(distance.float())

    def oracle(self) -> Oracle:
        return LinearOracle(self.slopes.exact)


class LinearOracle(RootedOracle):
    def bias(self, head: int, query: int, key: int) -> float:
        return -float(self.slopes[head]) * abs(query - key)


class ByHead(PositionEncoding):
    """Query head h divided by 1 + h p; its oracle does not know the head."""

    def __init__(self, geometry: Geometry) -> None:
        super().__init__()

    def rotate(self, q: Tensor, k: Tensor, positions: Tensor) -> Tuple[Tensor, Tensor]:
        """q [B,S,H,D], k [B,S,K,D], positions [B,S] int64 to the same shapes."""
        return q / (1 + torch.arange(q.size(2))[:, None] * positions[:, :, None, None]), k


class QueriesOnly(ByHead):
    """Queries times position + 1; the oracle does the same to keys."""

    def rotate(self, q: Tensor, k: Tensor, positions: Tensor) -> Tuple[Tensor, Tensor]:
        """q [B,S,H,D], k [B,S,K,D], positions [B,S] int64 to the same shapes."""
        return q * (positions[:, :, None, None] + 1), k


class QueriesOnlyOracle(Oracle, of=QueriesOnly):
    def rotate(self, x: np.ndarray, position: int) -> np.ndarray:
        return x * (position + 1)


class NoOracle(Rooted):
    def oracle(self) -> Oracle:
        return Oracle()


class NotAhead(PositionEncoding):
    """A bias that is no number for keys after the query."""

    def __init__(self, geometry: Geometry) -> None:
        super().__init__()

    def bias(self, q_positions: Tensor, k_positions: Tensor) -> Optional[Tensor]:
        """q_positions [B,S], k_positions [B,T] int64 to [B,1,S,T] float32."""
        return -torch.sqrt(
            (q_positions[:, None, :, None] - k_positions[:, None, None, :]).to(torch.float32)
        )


class NotAheadOracle(Oracle, of=NotAhead):
    def bias(self, head: int, query: int, key: int) -> float:
        return -math.sqrt(abs(query - key))


class Past(NotAhead):
    """The same bias, for causal attention only."""

    works_in = ("causal",)


class PastOracle(Oracle, of=Past):
    def bias(self, head: int, query: int, key: int) -> float:
        return -math.sqrt(query - key)


class Rounded(PositionEncoding):
    """A bias whose fixed numbers are stored in float16."""

    def __init__(self, geometry: Geometry) -> None:
        super().__init__()
        self.register_buffer("slope", (torch.arange(geometry.heads) / 3).half())

    def bias(self, q_positions: Tensor, k_positions: Tensor) -> Optional[Tensor]:
        """q_positions [B,S], k_positions [B,T] int64 to [B,H,S,T] float32."""
        return self.slope[:, None, None].float() * (
            q_positions[:, None, :, None] - k_positions[:, None, None, :]
        )


class RoundedOracle(Oracle, of=Rounded):
    def bias(self, head: int, query: int, key: int) -> float:
        return head / 3 * (query - key)


class ReadsBuffer(Rounded):
    """An encoding whose oracle takes a buffer for a trained number."""


class ReadsBufferOracle(Oracle, of=ReadsBuffer):
    def bias(self, head: int, query: int, key: int) -> float:
        return float(self.weights["slope"][head]) * (query - key)


@encodings.bias
def of_function(head: Tensor, query: Tensor, key: Tensor) -> Tensor:
    return -torch.sqrt((query - key) * 0.5)


class OnGrid(RoPE2D):
    """A rotation by row and column."""


class ColumnsAsRows(OnGrid):
    """The same rotation, with an oracle that exchanges the axes. At positions of text, which are
    equal on all axes, both agree.
    """


class ColumnsAsRowsOracle(RoPE2DOracle, of=ColumnsAsRows):
    def rotated(
        self, x: np.ndarray, place: Union[int, Sequence[int]], frequencies: np.ndarray
    ) -> np.ndarray:
        return super().rotated(x, place if isinstance(place, int) else place[::-1], frequencies)


def test_an_oracle_on_a_grid_gets_coordinates() -> None:
    assert set(check_encoding(OnGrid, targets=[])["oracle"]) == {"rotate"}
    with pytest.raises(
        AssertionError,
        match=r"ColumnsAsRows: expected rotate within .* worst at coordinates \(\d+, \d+\), entry "
        r"\d+ of \w+ head \d: exp",
    ):
        check_encoding(ColumnsAsRows, targets=[])


def test_a_correct_encoding_passes() -> None:
    result = check_encoding(Rooted, {"strength": 0.5}, targets=["ort"])
    assert result["targets"]["ort"]["passed"]
    assert set(result["oracle"]) == {"bias"}


@pytest.mark.exhaustive
def test_a_correct_encoding_passes_on_every_target() -> None:
    assert all(certificate["passed"] for certificate in check_encoding(Rooted)["targets"].values())


def test_the_oracle_of_a_causal_encoding_is_not_asked_for_keys_after_the_query() -> None:
    assert set(check_encoding(Past, targets=[])["oracle"]) == {"bias"}


def test_an_oracle_that_reads_a_buffer_as_a_weight_is_told_what_to_do() -> None:
    with pytest.raises(
        ValueError,
        match=r"expected its oracle to read the name of a trained number \(it has none\), got "
        r"slope, a buffer; keep fixed",
    ):
        check_encoding(ReadsBuffer, targets=[])


@pytest.mark.parametrize(("cls", "message"), [
    (AnotherOracle, r"AnotherOracle: expected bias within .* of its oracle, got 1\.0e-03, worst at "
        r"query \d+, key \d+, head \d: expected -\d\.\d+, got -\d\.\d+: your module"),
    (NotAhead, "expected finite numbers at query 0, key 1, head 0, got nan from bias and .*, or "
        'set works_in = ..causal",. in the class'),
    (Rounded, "worst at query .*; slope is float16: keep fixed numbers in a Table and trained "
        "ones in an Exact, which are float32"),
    (of_function, "expected finite numbers at query 0, key 1, head 0, got nan from your function; "
        "compute with the absolute distance, or select with"),
    (Waving, "Waving: expected bias within .* got 4.5e-04, worst at query 2, key 0, head"),
    (NoOracle, "check_encoding NoOracle: expected bias within"),
    (ByHead, "ByHead: expected rotate within .* override `rotate_heads` .* `rotate_key` or"),
    (QueriesOnly, "QueriesOnly: expected rotate .* `rotate_heads` .* `rotate_key` or"),
])  # fmt: skip
def test_an_incorrect_encoding_raises_an_assertion_error(cls: Any, message: str) -> None:
    with pytest.raises(AssertionError, match=message):
        check_encoding(cls, targets=[])


def test_invalid_parameters_are_refused() -> None:
    with pytest.raises(ValueError, match="expected parameter to be one of strength, got"):
        check_encoding(Rooted, {"strenght": 1.0}, targets=[])
    assert "encoding_under_test" not in encodings.KNOWN
