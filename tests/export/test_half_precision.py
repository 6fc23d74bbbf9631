"""Faults in half precision of encodings from outside the package are found before export, with
the file and line that makes them.
"""

import inspect
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from posenc_export import block_config, encodings, export_model
from posenc_export.encodings import Exact, Geometry, Oracle, PositionEncoding, Table
from posenc_export.encodings.shared.combined import Combined
from posenc_export.export.half_precision import check_encoding
from posenc_export.models.presets import seeded
from posenc_export.testing import check_encoding as check_for_authors

GEOMETRY = Geometry(width=24, heads=2, head_size=8, max_positions=1100)


class Waves(PositionEncoding):
    """Queries and keys times a table of cosines."""

    def __init__(self, geometry: Geometry) -> None:
        super().__init__()
        self.table = Table(np.cos(0.1 * np.arange(geometry.max_positions))[:, None])

    def rotate(self, q: Tensor, k: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        waves = self.table(positions).unsqueeze(2).to(q.dtype)
        return q * waves, k * waves


class Forgotten(Waves):
    def rotate(self, q: Tensor, k: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        waves = self.table(positions).unsqueeze(2)
        return q * waves, k * waves


class Product(Waves):
    def rotate(self, q: Tensor, k: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        same = torch.eye(8)
        return q @ same, k @ same


class Plain(PositionEncoding):
    """Queries and keys times the cosine of a trained frequency."""

    def __init__(self, geometry: Geometry) -> None:
        super().__init__()
        self.frequency = torch.nn.Parameter(torch.tensor([0.7]))

    def rotate(self, q: Tensor, k: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        angles = positions[:, :, None, None] * self.frequency
        waves = angles.cos().to(q.dtype)
        return q * waves, k * waves


class Slopes(PositionEncoding):
    """Biases by distance and head with trained slopes."""

    def __init__(self, geometry: Geometry) -> None:
        super().__init__()
        self.slopes = torch.nn.Parameter(torch.linspace(0.1, 0.4, geometry.heads))

    def bias(self, q_positions: Tensor, k_positions: Tensor) -> Tensor | None:
        distance = q_positions[:, None, :, None] - k_positions[:, None, None, :]
        return -self.slopes[:, None, None] * distance


class SlopesOracle(Oracle, of=Slopes):
    def bias(self, head: int, query: int, key: int) -> float:
        return -float(self.weights["slopes"][head]) * (query - key)


class Kept(Slopes):
    """Slopes that stay float32."""

    def __init__(self, geometry: Geometry) -> None:
        PositionEncoding.__init__(self)
        self.kept = Exact(torch.linspace(0.1, 0.4, geometry.heads))

    def bias(self, q_positions: Tensor, k_positions: Tensor) -> Tensor | None:
        return -self.kept()[:, None, None] * (
            q_positions[:, None, :, None] - k_positions[:, None, None, :]
        )


class Buffered(Slopes):
    """Slopes in a buffer, which the cast of a model rounds."""

    def __init__(self, geometry: Geometry) -> None:
        PositionEncoding.__init__(self)
        self.register_buffer("slopes", torch.linspace(0.1, 0.4, geometry.heads))

    def bias(self, q_positions: Tensor, k_positions: Tensor) -> Tensor | None:
        return -self.slopes.float()[:, None, None] * (
            q_positions[:, None, :, None] - k_positions[:, None, None, :]
        )


class Halves(Buffered):
    """Slopes in a buffer that are numbers of float16 and of bfloat16."""

    def __init__(self, geometry: Geometry) -> None:
        super().__init__(geometry)
        self.slopes = torch.full((geometry.heads,), 0.5)


def _place(cls: Any) -> str:
    """FILE:LINE of the hook of an encoding."""
    hook = cls.rotate if cls.rotate is not PositionEncoding.rotate else cls.bias
    return f"{__file__}:{inspect.getsourcelines(hook)[1]}"


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize(("cls", "message"), [
    (Forgotten, "expected rotate at {place} to return {dtype} in a model of {dtype}, got float32; "
        "convert tables"),
    (Product,
        "expected rotate at {place} to run in {dtype}, got expected m1 and m2 to have the same "
        "dtype, but got: .*; convert tables"),
    (Plain, r"expected rotate at {place} within .* of float32 in {dtype}, got .*, with positions "
        r"rounded to {dtype}; keep trained numbers"),
    (Slopes, "expected bias at {place} to return float32 in a model of {dtype}, got {dtype}; "
        "keep trained numbers"),
    (Buffered, "expected fixed numbers that keep their values in a model of {dtype}, got buffer "
        "slopes, which the cast rounds; keep them in a Table"),
])  # fmt: skip
def test_a_fault_in_half_precision_is_named_with_file_and_line(
    cls: Any, message: str, dtype: str
) -> None:
    expected = message.format(dtype=dtype, place=re.escape(_place(cls)))
    with pytest.raises(ValueError, match=f"encoding {cls.__name__}: {expected}"):
        check_encoding(cls(GEOMETRY), GEOMETRY, dtype)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize(
    "make", [Waves, Kept, Halves, lambda geometry: Combined([Waves(geometry), Kept(geometry)])]
)
def test_encodings_that_keep_positions_in_float32_pass(make: Any, dtype: str) -> None:
    check_encoding(make(GEOMETRY), GEOMETRY, dtype)


@pytest.mark.parametrize("name", sorted(encodings.REGISTRY))
def test_built_in_encodings_pass_in_float16(name: str) -> None:
    geometry = Geometry(24, 2, 12, 1100, "causal" in encodings.REGISTRY[name].works_in)
    check_encoding(encodings.build({"name": name}, geometry), geometry, "float16")


def test_an_export_in_float16_refuses_a_faulty_encoding_before_it_is_traced(tmp_path: Path) -> None:
    encodings.register("forgotten", Forgotten)
    try:
        with pytest.raises(
            ValueError, match="encoding Forgotten: expected rotate at .* to return float16"
        ):
            export_model(
                seeded(block_config(16, 2, 64, encoding={"name": "forgotten"})),
                "ort",
                tmp_path / "made",
                dtype="float16",
            )
    finally:
        del encodings.KNOWN.registered["forgotten"]
    assert not (tmp_path / "made").exists()


def test_the_checks_for_authors_find_a_fault_in_float16_without_an_export() -> None:
    with pytest.raises(
        ValueError,
        match="encoding Slopes: expected bias at .* to return float32 in a model of float16",
    ):
        check_for_authors(Slopes, targets=[])
