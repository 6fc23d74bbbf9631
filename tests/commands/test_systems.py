"""The command runs where calls and files of Linux do not exist, as on Windows and macOS; audits and
benchmarks need signals and connections of POSIX.
"""

import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Dict

import pytest

from posenc_export.commands.cli import COMMANDS

ELSEWHERE = """
import builtins, errno, importlib, io, os, pkgutil, signal, sys

MODULES = ("fcntl", "grp", "pwd", "resource", "termios")
OF_OS = ("fork", "getuid", "killpg", "link", "sched_getaffinity", "setsid", "symlink", "sysconf")
OF_SIGNAL = ("SIGCONT", "SIGHUP", "SIGPIPE", "SIGSTOP", "alarm", "pthread_sigmask", "setitimer")

def ours(depth):
    return sys._getframe(depth).f_globals.get("__name__", "").startswith("posenc_export")

def without(original):
    def imported(name, *arguments, **named):
        if name in MODULES and ours(2):
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)
        return original(name, *arguments, **named)
    return imported

def outside_proc(original):
    def opened(path, *arguments, **named):
        if isinstance(path, (str, os.PathLike)) and os.fspath(path).startswith("/proc"):
            raise FileNotFoundError(errno.ENOENT, "No such file or directory", os.fspath(path))
        return original(path, *arguments, **named)
    return opened

import asyncio  # which calls os.sysconf from Python 3.13 on, where the system is not Windows
builtins.__import__ = without(builtins.__import__)
for place, name in ((builtins, "open"), (io, "open"), (os, "stat")):
    setattr(place, name, outside_proc(getattr(place, name)))
for place, names in ((os, OF_OS), (signal, OF_SIGNAL)):
    for name in names:
        delattr(place, name)
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
        assert error.name not in MODULES and not error.name.startswith("posenc_export"), error
"""


def _run(program: str, *arguments: object) -> str:
    command, named = (
        [sys.executable, "-c", ELSEWHERE + program, *map(str, arguments)],
        {**os.environ, "USERNAME": "user"},
    )  # torch asks for the name
    done = subprocess.run(
        command, capture_output=True, encoding="utf-8", env=named, timeout=600, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_every_command_prints_its_help_without_calls_of_linux_and_without_colours() -> None:
    text = _run(HELP)
    said: Dict[str, str] = dict(
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
