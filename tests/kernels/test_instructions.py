"""Instruction sets that the library chooses from, and its object files for each."""

import os
import shutil
import subprocess
import sys

import pytest

from posenc_export.runtime.graphs import kernel_library
from tests.kernels.calls import built

pytestmark = built
SETS = ("avx512", "avx2", "plain")
NAME = (
    "import ctypes, sys; name = ctypes.CDLL(sys.argv[1]).posenc_instructions; "
    "name.restype = ctypes.c_char_p; print((name() or b'').decode())"
)
OBJECTS = kernel_library.SOURCE_TREE / "build" / "kernels" / "objects" / "source"


def _chosen(asked: str, library: object) -> str:
    """Return the set that a process uses that asks for one; empty if it is refused."""
    environment = {**os.environ, "POSENC_INSTRUCTIONS": asked}
    command = [sys.executable, "-c", NAME, str(library)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    return done.stdout.strip()


def skip_without(instructions: str, library: object) -> None:
    """Skip a test of an instruction set that this processor lacks."""
    if not _chosen(instructions, library):
        pytest.skip(f"this processor has no {instructions}")


@pytest.mark.parametrize("instructions", SETS)
def test_the_instruction_set_that_is_asked_for_is_used(instructions: str) -> None:
    skip_without(instructions, kernel_library.path())
    assert _chosen(instructions, kernel_library.path()) == instructions


@pytest.mark.parametrize("word", ["sse", "AVX2"])
def test_a_word_that_names_no_instruction_set_is_refused_when_a_graph_is_loaded(word: str) -> None:
    environment = {**os.environ, "POSENC_INSTRUCTIONS": word}
    check = "from tests.kernels.calls import Case; Case().run()"
    done = subprocess.run(
        [sys.executable, "-c", check], env=environment, capture_output=True, text=True
    )
    said = "ValueError: runtime: expected POSENC_INSTRUCTIONS to name an instruction set of this"
    last = done.stderr.splitlines()[-1]
    assert last.startswith(said) and f"got {word}; unset it" in last


def test_a_path_of_the_library_that_is_no_file_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("POSENC_KERNELS", "nowhere.so")
    with pytest.raises(ValueError, match="expected POSENC_KERNELS to name a file, got nowhere.so"):
        kernel_library.path()


@pytest.mark.skipif(shutil.which("nm") is None, reason="nm is not installed")
@pytest.mark.parametrize("instructions", SETS)
@pytest.mark.parametrize(
    ("part", "table"), [("attention", "7kernels"), ("product", "15product_kernels")]
)
def test_no_function_of_an_instruction_set_can_replace_one_of_other_files(
    part: str, table: str, instructions: str
) -> None:
    file = OBJECTS / f"{part}_{instructions}.o"
    if not file.exists():
        pytest.skip("the library was not built by make kernels")
    command = ["nm", "--defined-only", "--extern-only", str(file)]
    lines = subprocess.run(command, capture_output=True, text=True, check=True).stdout.split("\n")
    names = [line.split()[-1] for line in lines if line]
    assert names == [f"_ZN6posenc{len(instructions)}{instructions}{table}E"]
