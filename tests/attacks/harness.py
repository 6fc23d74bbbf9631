"""Run a command on an attack, and say what it did that no command may do with a stranger's file.

A command must leave no trace, start no process, connect to nothing, write nothing outside its own
output and the current folder, import no module of the attack's folder, and refuse with one line.
"""

import contextlib
import io
import os
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Callable, Iterator, Sequence
from unittest import mock

import torch

from posenc_export.auditing import confined as processes
from posenc_export.auditing.confined import graph_of
from posenc_export.commands.cli import main
from posenc_export.runtime.artefact import files

Arguments = Callable[[Path, Path], Sequence[str]]
# By name, the arguments of a command on an attack, with a folder of its own.
COMMANDS: dict[str, Arguments] = {
    "audit": lambda path, own: (
        "audit", f"{path}", "--reference", f"{__name__}:flat", "--quick", "--seconds", "2",
    ),
    "load": lambda path, own: ("generate", f"{path}", "--prompt", "a", "--max-tokens", "1"),
    "verify": lambda path, own: ("verify", f"{path}"),
    "export": lambda path, own: (
        "export", f"{path}", "--target", "ort", "-o", f"{own / 'artefact'}", "--verify", "quick",
    ),
    "page": lambda path, own: ("page", f"{path}", "-o", f"{own / 'page'}"),
}  # fmt: skip
# Events of Python that no file of a stranger may cause.
PROCESSES = ("os.system", "os.exec", "os.posix_spawn", "os.fork", "os.spawn", "subprocess.Popen")
FORBIDDEN = (*PROCESSES, "socket.connect", "socket.bind", "socket.getaddrinfo", "os.remove")
LIMIT = 60.0  # seconds of a command on a busy machine


def flat(ids: torch.Tensor) -> torch.Tensor:
    """The reference of an audit: all 61 tokens are equally probable."""
    return torch.zeros(*ids.shape, 61)


@dataclass
class Watch:
    """An audit hook, switched on for one command at a time: what it heard that is forbidden."""

    folder: Path = Path()  # of the attack
    own: Path = Path()  # where the command may write
    on: bool = False
    heard: list[str] = field(default_factory=list)

    def hear(self, event: str, arguments: Any) -> None:
        if not self.on:
            return
        if event in FORBIDDEN and not self._child(event, arguments) and not self._own(arguments[0]):
            self.heard.append(f"{event} {str(arguments)[:100]}")
        elif event == "open" and isinstance(arguments[0], (str, bytes, os.PathLike)):
            flags = arguments[2] or 0
            writes = flags & (os.O_WRONLY | os.O_RDWR | os.O_CREAT)
            if writes and not self._own(arguments[0]):
                self.heard.append(f"wrote {arguments[0]!r}")
            elif not writes and os.fspath(arguments[0]).endswith((".py", ".pyc")):
                if _inside(arguments[0], self.folder):
                    self.heard.append(f"imported {arguments[0]!r}")

    def _own(self, path: Any) -> bool:
        devices = path in ("/dev/null", os.devnull) or "__pycache__" in str(path)
        return devices or _inside(path, self.own)

    def _child(self, event: str, arguments: Any) -> bool:
        """Whether it starts the process in which the audit runs a graph."""
        # From Python 3.13 on, subprocess starts it with posix_spawn.
        starts = event in ("subprocess.Popen", "os.posix_spawn")
        return starts and "confined" in str(arguments[1])


def _inside(path: Any, folder: Path) -> bool:
    with contextlib.suppress(TypeError, ValueError):
        return Path(os.path.realpath(os.fsdecode(path))).is_relative_to(folder.resolve())
    return False


WATCH = Watch()


@contextlib.contextmanager
def watching(folder: Path, own: Path) -> Iterator[Watch]:
    """Switch the audit hook on."""
    if WATCH.hear not in _hooks:
        sys.addaudithook(WATCH.hear)
        _hooks.append(WATCH.hear)
    WATCH.folder, WATCH.own, WATCH.heard, WATCH.on = folder, own, [], True
    try:
        yield WATCH
    finally:
        WATCH.on = False


_hooks: list[Callable[[str, Any], None]] = []  # that were added: a hook cannot be removed


def tried(
    write: Callable[[Path, Path], Path], name: str, around: Path, refused: bool = False,
    confined: bool = False,
) -> list[str]:  # fmt: skip
    """Write an attack below a new folder and return what `findings` finds."""
    folder, own, trace = around / "attack", around / "own", around / "trace"
    folder.mkdir(parents=True)
    own.mkdir()
    return findings(name, write(folder, trace), trace, own, refused, confined)


def findings(
    name: str, path: Path, trace: Path, own: Path, refused: bool = True, confined: bool = False
) -> list[str]:  # fmt: skip
    """Run a command on an attack. Return what is wrong, empty if nothing is.

    Args:
        name: of COMMANDS.
        path, trace: as of a threat.
        own: empty folder, in which the command runs and may write.
        refused: whether the command must fail.
        confined: whether the audit runs the graph in its child process, which hides what the graph
            does to this one; otherwise here, where the hook hears it.
    """
    words, before = [*COMMANDS[name](path, own)], _files(path)
    out, err, began = io.StringIO(), io.StringIO(), time.monotonic()
    inner = (
        contextlib.nullcontext() if confined else mock.patch.object(processes, "Confined", _here)
    )
    status: Any = None
    wrong: list[str] = []
    with (
        contextlib.chdir(own), contextlib.redirect_stdout(out), contextlib.redirect_stderr(err),
        mock.patch.dict(os.environ, **{files.CACHE: str(own)}), inner,
        watching(path if path.is_dir() else path.parent, own) as watch,
    ):  # fmt: skip
        try:
            status = main(words)
        except SystemExit as error:
            status = error.code
        except BaseException as error:
            wrong.append(f"traceback: {type(error).__name__}: {str(error)[:150]}")
    wrong += watch.heard
    # Without progress, and the line that says where the command that loads exports a checkpoint.
    lines = [line for line in err.getvalue().splitlines() if not line.startswith("[")]
    lines = [line for line in lines if "is exported once" not in line]
    if trace.exists():
        wrong.append("the attack succeeded")
        trace.unlink()
    if _files(path) != before:
        wrong.append("the folder of the attack changed")
    if refused and status == 0:
        wrong.append(f"not refused: {(out.getvalue().strip().splitlines() or [''])[-1][:150]}")
    if status == 2 and (len(lines) != 1 or "expected" not in lines[0] or len(lines[0]) > 2000):
        wrong.append(f"{len(lines)} lines, not one: {err.getvalue()[:200]!r}")
    if "Traceback" in out.getvalue() + err.getvalue():
        wrong.append("traceback on the terminal")
    if (seconds := time.monotonic() - began) > LIMIT:
        wrong.append(f"took {seconds:.0f} s")
    return [f"{name}: {text}" for text in dict.fromkeys(wrong)]


def _here(path: Path, seconds: float) -> Any:
    """Open a graph in this process."""
    return graph_of(path)


def _files(path: Path) -> list[str]:
    return sorted(map(str, (path if path.is_dir() else path.parent).rglob("*")))
