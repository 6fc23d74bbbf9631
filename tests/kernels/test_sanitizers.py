"""The tests of the operator, with the library compiled for the address, undefined-behaviour and
thread sanitizers of gcc.
"""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from posenc_export.runtime.graphs import kernel_library
from tests.kernels import alone, mutated
from tests.kernels.test_instructions import SETS, skip_without

TOP = Path(__file__).parents[2]
PACKAGE = TOP / "packages" / "kernels"
MUTATED = 4000  # calls
MEMORY = ("-fsanitize=address,undefined", "-fno-sanitize-recover=all")
pytestmark = [
    pytest.mark.exhaustive,
    pytest.mark.skipif(shutil.which("g++") is None, reason="g++ is not installed"),
]


def _library(folder: Path, options: str) -> Path:
    """Build the library with further options of the compiler, and return it."""
    environment = {**os.environ, "CXXFLAGS": f"{options} -g -fno-omit-frame-pointer"}
    command = [sys.executable, "setup.py", "-q", "build_ext", "--build-lib", str(folder)]
    command += ["--build-temp", str(folder / "objects")]
    subprocess.run(command, cwd=PACKAGE, env=environment, check=True, capture_output=True)
    return folder / "posenc_export_kernels" / "libposenc_kernels.so"


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return _library(tmp_path_factory.mktemp("sanitized"), " ".join(MEMORY))


@pytest.mark.parametrize("instructions", SETS)
def test_no_access_outside_a_buffer_and_no_undefined_behaviour(
    instructions: str, library: Path
) -> None:
    skip_without(instructions, kernel_library.path())
    # With libstdc++, whose exceptions ASan wants to see, although Python is a program in C.
    preloaded = [
        subprocess.run(
            ["g++", f"-print-file-name={name}.so"], check=True, capture_output=True, text=True
        ).stdout.strip()
        for name in ("libasan", "libstdc++")
    ]
    environment = {
        **os.environ,
        "POSENC_KERNELS": str(library),
        "POSENC_INSTRUCTIONS": instructions,  # which a test of them asserts
        "LD_PRELOAD": " ".join(preloaded),
        "ASAN_OPTIONS": "detect_leaks=0",  # Python keeps memory until it ends
        "PYTHONPATH": str(TOP),
    }
    tests = [
        str(Path(__file__).parent / f"test_{name}.py")
        for name in ("operator", "hostile", "products")
    ]
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-n", "0", "-p", "no:cacheprovider"]
    command += ["-k", "not instruction_set"]  # in processes without the sanitizer
    done = subprocess.run(
        [*command, *tests], cwd=TOP, env=environment, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]


@pytest.mark.parametrize("instructions", SETS)
def test_mutated_calls_stay_in_their_buffers(
    instructions: str, library: Path, tmp_path: Path
) -> None:
    skip_without(instructions, kernel_library.path())
    program = alone.linked(tmp_path / "run", ["g++", *MEMORY], library.parents[1].rglob("*.o"))
    calls = list(mutated.calls(MUTATED, 0))
    results = alone.answers(
        [str(program)], calls, tmp_path, POSENC_INSTRUCTIONS=instructions,
        ASAN_OPTIONS="allocator_may_return_null=1:detect_leaks=0",
    )  # fmt: skip
    refused = [result for result in results if isinstance(result, str)]
    assert MUTATED / 4 < len(refused) < MUTATED * 3 / 4


def test_threads_do_not_race(tmp_path: Path) -> None:
    _library(tmp_path, "-fsanitize=thread")
    objects = [p for p in tmp_path.rglob("*.o") if p.stem not in ("operator", "node", "product")]
    driver = tmp_path / "threads"
    source = Path(__file__).with_name("threads.cpp")
    command = ["g++", "-std=c++17", "-g", "-fsanitize=thread", "-pthread"]
    command += [f"-I{PACKAGE / 'source'}", str(source), *map(str, objects), "-o", str(driver)]
    compiled = subprocess.run(command, capture_output=True, text=True)
    assert compiled.returncode == 0, compiled.stderr[-4000:]
    done = subprocess.run([str(driver)], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]
