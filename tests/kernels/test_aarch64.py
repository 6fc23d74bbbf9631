"""The operators compiled for aarch64, in an emulator."""

import shutil
import subprocess
from pathlib import Path
from typing import Sequence

import numpy as np
import pytest

from tests.kernels import alone
from tests.kernels.calls import Case
from tests.kernels.test_operator import CACHES, CASES, bound

COMPILER, EMULATOR = "aarch64-linux-gnu-g++", "qemu-aarch64"
PRODUCTS = ("product_weights", "product_plain", "product_dotprod")
FILES = ("operator", "node", "work", "dispatch", "attention_plain", "product", *PRODUCTS)
DOTPROD = "-march=armv8.2-a+dotprod"
pytestmark = [
    pytest.mark.exhaustive,
    *(
        pytest.mark.skipif(shutil.which(name) is None, reason=f"{name} is not installed")
        for name in (COMPILER, EMULATOR)
    ),
]


def test_output_on_aarch64_is_attention_in_float64(tmp_path: Path) -> None:
    sources = [alone.SOURCE / f"{name}.cpp" for name in FILES]
    program = alone.linked(tmp_path / "calls", [COMPILER, "-O2", "-static", DOTPROD], sources)
    cases = [Case(**case, cache=cache) for case in CASES.values() for cache in CACHES]
    calls = [(case.feeds, case.node) for case in cases]
    for case, (y, *_) in zip(
        cases, alone.answers([EMULATOR, str(program)], calls, tmp_path), strict=True
    ):
        expected, _ = case.expected()
        assert np.abs(y - expected).max() <= bound(case, expected)


@pytest.mark.parametrize(("name", "options"), [("plain", ()), ("dotprod", (DOTPROD,))])
def test_products_on_aarch64_are_sums_of_whole_numbers(
    name: str, options: Sequence[str], tmp_path: Path
) -> None:
    files = [Path(__file__).with_name("products.cpp")]
    files += [alone.SOURCE / f"product_{part}.cpp" for part in ("weights", name)]
    command = [COMPILER, "-std=c++17", "-O2", "-static", "-Wall", *options, f"-DSET={name}"]
    command += [f"-I{alone.SOURCE}", *map(str, files), "-o", str(tmp_path / "products")]
    subprocess.run(command, check=True, capture_output=True)
    run = [EMULATOR, str(tmp_path / "products")]
    done = subprocess.run(run, check=True, capture_output=True, text=True)
    assert float(done.stdout) <= 1e-6
