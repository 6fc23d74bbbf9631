"""Errors in the code of an encoding from outside the package name the encoding, and the command
line prints them in one line.
"""

import inspect
from pathlib import Path
from typing import Any, Iterator

import pytest
from torch import Tensor

from posenc_export import encodings
from posenc_export.commands.cli import main
from posenc_export.encodings import Geometry, Oracle, PositionEncoding

BLOCK = (
    "export block --width 16 --heads 2 --max-positions 32 --target torchscript --verify quick"
).split()


class OffByOne(PositionEncoding):
    """A bias whose oracle counts distances from 1."""

    def __init__(self, geometry: Geometry) -> None:
        super().__init__()

    def bias(self, q_positions: Tensor, k_positions: Tensor) -> Tensor | None:
        """q_positions [B,S], k_positions [B,T] int64 to [B,1,S,T] float32."""
        return 0.5 * (q_positions[:, None, :, None] - k_positions[:, None, None, :])


class OffByOneOracle(Oracle, of=OffByOne):
    def bias(self, head: int, query: int, key: int) -> float:
        return 0.5 * (query - key + 1) ** 2


class Raising(OffByOne):
    """An encoding whose oracle stops with an error of Python."""


class RaisingOracle(Oracle, of=Raising):
    def bias(self, head: int, query: int, key: int) -> float:
        return {}["slope"]  # type: ignore[no-any-return]


RAISES = inspect.getsourcelines(RaisingOracle.bias)[1] + 1  # the line


class Refusing(OffByOne):
    """An encoding that refuses a size."""

    def __init__(self, geometry: Geometry) -> None:
        raise ValueError(f"expected a head size that is a multiple of 5, got {geometry.head_size}")


@pytest.fixture(autouse=True)
def registered() -> Iterator[None]:
    names = {"off_by_one": OffByOne, "raising": Raising, "refusing": Refusing}
    for name, cls in names.items():
        encodings.register(name, cls)
    yield
    for name in names:
        del encodings.KNOWN.registered[name]


@pytest.mark.parametrize(("name", "status", "message"), [
    ("off_by_one", 1, "encoding off_by_one disagrees with its oracle; run "
        "posenc_export.testing.check_encoding on OffByOne"),
    ("raising", 2, f"test_errors.py:{RAISES} to run, got KeyError: 'slope'; correct the code "
        "there, and run posenc_export.testing.check_encoding"),
    ("refusing", 2,
        "posenc: encoding refusing: expected a head size that is a multiple of 5, got 8"),
])  # fmt: skip
def test_an_error_of_an_own_encoding_is_one_line_that_says_where(
    name: str, status: int, message: str, tmp_path: Path, capsys: Any
) -> None:
    assert main([*BLOCK, "--encoding", name, "-o", str(tmp_path / "artefact")]) == status
    lines = capsys.readouterr().err.splitlines()
    assert [line for line in lines if message in line] == lines[-1:]
