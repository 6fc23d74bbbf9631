"""The command runs where calls and files of Linux do not exist, as on macOS. Windows, which has no
calls of POSIX, is not supported.
"""

import re
import subprocess
import sys
from pathlib import Path

import pytest

from posenc_export.commands.cli import COMMANDS

ELSEWHERE = """
import builtins, errno, importlib, io, os, pkgutil, sys

def outside_proc(original):
    def opened(path, *arguments, **named):
        if isinstance(path, (str, os.PathLike)) and os.fspath(path).startswith("/proc"):
            raise FileNotFoundError(errno.ENOENT, "No such file or directory", os.fspath(path))
        return original(path, *arguments, **named)
    return opened

del os.sched_getaffinity
for place, name in ((builtins, "open"), (io, "open"), (os, "stat")):
    setattr(place, name, outside_proc(getattr(place, name)))
"""
HELP = """
from posenc_export.commands.cli import COMMANDS, main
for name in COMMANDS:
    print(f"== {name}")
    try:
        main([name, "--help"])
    except SystemExit as exit:
        assert exit.code == 0, name
"""
EXPORT = """
from posenc_export.commands.cli import main
block = "export block --encoding alibi --width 16 --heads 2 --max-positions 48"
arguments = f"{block} --target torchscript --verify quick".split()
assert main([*arguments, "-o", sys.argv[1]]) == 0
folder, name = os.path.split(sys.argv[1])
assert sorted(os.listdir(folder)) == [name], "temporary folders are left"
"""
IMPORTS = """
import posenc_export
for module in pkgutil.walk_packages(posenc_export.__path__, "posenc_export."):
    try:
        importlib.import_module(module.name)
    except ModuleNotFoundError as error:  # a package that is not installed
        assert not error.name.startswith("posenc_export"), error
"""


def _run(program: str, *arguments: object) -> str:
    command = [sys.executable, "-c", ELSEWHERE + program, *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, encoding="utf-8", timeout=600, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_every_command_prints_its_help_without_calls_of_linux_and_without_colours() -> None:
    text = _run(HELP)
    said: dict[str, str] = dict(
        zip(*[iter(re.split(r"^== (\w+)\n", text, flags=re.MULTILINE)[1:])] * 2, strict=True)
    )
    assert said.keys() == COMMANDS.keys()
    assert (
        all(f"usage: posenc {name}" in printed for name, printed in said.items())
        and "\x1b" not in text
    )


def test_an_export_runs_without_calls_of_linux(tmp_path: Path) -> None:
    _run(EXPORT, tmp_path / "artefact")


@pytest.mark.exhaustive
def test_every_module_is_imported_without_calls_of_linux() -> None:
    _run(IMPORTS)
