"""The checks for authors of encodings: correct encodings pass, and faults are detected."""

import math
from typing import Any, Sequence

import numpy as np
import pytest
import torch
from torch import Tensor

from posenc_export import encodings
from posenc_export.encodings import Geometry, Oracle, PositionEncoding
from posenc_export.encodings.rope_2d import RoPE2D, RoPE2DOracle
from posenc_export.encodings.shared.base import Table
from posenc_export.testing import check_encoding
from posenc_export.testing.against_oracle import HEADS


class Rooted(PositionEncoding):
    """scores - sqrt(|i - j|) h / H."""

    def __init__(self, geometry: Geometry, strength: float = 1.0) -> None:
        super().__init__()
        self.slopes = Table(strength * (np.arange(geometry.heads) + 1) / geometry.heads)

    def bias(self, q_positions: Tensor, k_positions: Tensor) -> Tensor | None:
        """q_positions [B,S], k_positions [B,T] int64 to [B,H,S,T] float32."""
        distance = (q_positions[:, None, :, None] - k_positions[:, None, None]).abs()
        return -self.slopes.rows[:, None, None] * torch.sqrt(distance.to(torch.float32))


class RootedOracle(Oracle, of=Rooted):
    def bias(self, head: int, query: int, key: int) -> float:
        return -float(self.encoding.slopes.rows[head]) * math.sqrt(abs(query - key))


def _biased(name: str, bias: Any, exact: Any, **attributes: Any) -> Any:
    """An encoding with bias(slopes [H,1,1], i - j) and the oracle exact(h / H, i - j)."""

    def hook(self: Any, q: Tensor, k: Tensor) -> Tensor:
        return bias(self.slopes.rows[:, None, None], q[:, None, :, None] - k[:, None, None])  # type: ignore[no-any-return]

    def oracle(self: Any, head: int, query: int, key: int) -> float:
        return float(exact((head + 1) / HEADS, query - key))

    cls = type(name, (Rooted,), {"bias": hook, **attributes})
    type(f"{name}Oracle", (Oracle,), {"bias": oracle}, of=cls)
    return cls


def _rotated(name: str, rotate: Any, exact: Any) -> Any:
    """An encoding whose queries are rotate(q, positions [B,S,1,1]), and the oracle exact(x, p) of
    queries and keys.
    """

    def hook(self: Any, q: Tensor, k: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        return rotate(q, positions[:, :, None, None]), k

    cls = type(name, (Rooted,), {"rotate": hook, "bias": PositionEncoding.bias})
    type(f"{name}Oracle", (Oracle,), {"rotate": lambda self, x, p: exact(x, p)}, of=cls)
    return cls


AnotherOracle = _biased(
    "AnotherOracle", lambda h, d: -h * d.abs().sqrt(), lambda h, d: -1.001 * h * abs(d) ** 0.5
)
# A bias of up to -1099 that is wrong by at most 0.0005: 4.5e-7 of the largest.
Waving = _biased(
    "Waving",
    lambda h, d: -h * d.abs() - 0.0005 * torch.sin(d.abs().float()),
    lambda h, d: -h * abs(d),
)
NoOracle = _biased("NoOracle", lambda h, d: -h * d.abs().sqrt(), lambda h, d: 0.0)
# No number for keys after the query, and the same for causal attention only.
NotAhead, Past = (
    _biased(name, lambda h, d: -torch.sqrt(d.float()), lambda h, d: -(abs(d) ** 0.5), **attributes)
    for name, attributes in (("NotAhead", {}), ("Past", {"works_in": ("causal",)}))
)
ByHead = _rotated("ByHead", lambda q, p: q / (1 + torch.arange(HEADS)[:, None] * p), lambda x, p: x)
QueriesOnly = _rotated("QueriesOnly", lambda q, p: q * (p + 1), lambda x, p: x * (p + 1))


class Rounded(PositionEncoding):
    """A bias whose fixed numbers are stored in float16."""

    def __init__(self, geometry: Geometry) -> None:
        super().__init__()
        self.register_buffer("slope", (torch.arange(geometry.heads) / 3).half())

    def bias(self, q_positions: Tensor, k_positions: Tensor) -> Tensor | None:
        """q_positions [B,S], k_positions [B,T] int64 to [B,H,S,T] float32."""
        distance = q_positions[:, None, :, None] - k_positions[:, None, None]
        return self.slope[:, None, None].float() * distance


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
        self, x: np.ndarray, place: int | Sequence[int], frequencies: np.ndarray
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
