"""The operator compiled for aarch64, in an emulator."""

import shutil
from pathlib import Path

import numpy as np
import pytest

from tests.kernels import alone
from tests.kernels.calls import Case
from tests.kernels.test_operator import CACHES, CASES, bound

COMPILER, EMULATOR = "aarch64-linux-gnu-g++", "qemu-aarch64"
FILES = ("operator", "node", "work", "dispatch", "attention_plain")
pytestmark = [
    pytest.mark.exhaustive,
    *(
        pytest.mark.skipif(shutil.which(name) is None, reason=f"{name} is not installed")
        for name in (COMPILER, EMULATOR)
    ),
]


def test_output_on_aarch64_is_attention_in_float64(tmp_path: Path) -> None:
    sources = [alone.SOURCE / f"{name}.cpp" for name in FILES]
    program = alone.linked(tmp_path / "calls", [COMPILER, "-O2", "-static", "-Wall"], sources)
    cases = [Case(**case, cache=cache) for case in CASES.values() for cache in CACHES]
    calls = [(case.feeds, case.node) for case in cases]
    for case, (y, *_) in zip(
        cases, alone.answers([EMULATOR, str(program)], calls, tmp_path), strict=True
    ):
        expected, _ = case.expected()
        assert np.abs(y - expected).max() <= bound(case, expected)
