"""Output of the `posenc` command: progress, tables, certificates, errors in one line."""

import argparse
import contextlib
import difflib
import io
import re
import shlex
import sys
import time
import traceback
from pathlib import Path
from typing import Any, Iterable, Iterator, NoReturn, TextIO, cast

from posenc_export.runtime.artefact import certificate as certificates
from posenc_export.runtime.artefact.manifest import Manifest
from posenc_export.runtime.session.errors import GraphError
from posenc_export.shared.progress import Step
from posenc_export.shared.suggestion import suggestion
from posenc_export.shared.tables import WIDTH, aligned

FAILED_CHECK, BAD_INPUT = 1, 2
# Modules that commands import, by the extra that installs them.
EXTRAS = {
    "export": "torch onnx_ir onnxscript safetensors",
    "cpu": "onnxruntime",
    "native": "posenc_export_kernels",
    "report": "matplotlib",
    "text": "tokenizers jinja2",
    "gguf": "gguf",
    "serve": "fastapi uvicorn prometheus_client",
}

# Control characters but tabs and ends of lines, and those that end or reorder a line of Unicode.
CONTROL = re.compile(
    r"[\x00-\x08\x0b\x0c\x0e-\x1f\x7f-\x9f\u2028\u2029\u202a-\u202e\u2066-\u2069]|\r(?!\n)"
)


def escaped(text: str) -> str:
    """Return a text with its control characters as JSON writes them, such as \\u001b."""
    return CONTROL.sub(lambda match: f"\\u{ord(match[0]):04x}", text)


class Escaped:
    """A stream that escapes control characters, which names in files of others may contain."""

    def __init__(self, stream: TextIO) -> None:
        self.stream = stream

    def write(self, text: str) -> int:
        return self.stream.write(escaped(text))

    def writelines(self, lines: Iterable[str]) -> None:
        self.stream.writelines(map(escaped, lines))

    def __getattr__(self, name: str) -> Any:
        return getattr(self.stream, name)


@contextlib.contextmanager
def escaping() -> Iterator[None]:
    """Context manager that escapes what is printed to stdout and stderr, also by warnings."""
    with contextlib.ExitStack() as stack:
        if isinstance(sys.stdout, io.TextIOWrapper):
            # As stderr: a terminal without a character shows its code.
            sys.stdout.reconfigure(errors="backslashreplace")
        if sys.stdout is not None:  # None: closed by the calling program
            stack.enter_context(contextlib.redirect_stdout(cast(TextIO, Escaped(sys.stdout))))
        if sys.stderr is not None:
            stack.enter_context(contextlib.redirect_stderr(cast(TextIO, Escaped(sys.stderr))))
        yield


def _unescaped(stream: TextIO) -> TextIO:
    return stream.stream if isinstance(stream, Escaped) else stream


def print_text(text: str) -> None:
    """Print text of a model at once: as it is to a file or a pipe, escaped to a terminal."""
    stream = sys.stdout if sys.stdout.isatty() else _unescaped(sys.stdout)
    print(text, end="", file=stream, flush=True)


def note(line: str) -> None:
    """Print a message to stderr, if it is open, in one line."""
    if sys.stderr is not None:
        print(f"posenc: {' '.join(line.split())}", file=sys.stderr)


class OneLineParser(argparse.ArgumentParser):
    """Parser with errors of one line and the closest name. Options cannot be abbreviated."""

    def __init__(self, **arguments: Any) -> None:
        super().__init__(**{"allow_abbrev": False, **arguments})
        self.color = False  # Python 3.14 writes colours as control characters

    def error(self, message: str) -> NoReturn:
        near, options = "", re.findall(r"--[\w-]+", self.format_usage())
        if choice := re.search(r"invalid choice: '(.*?)' \(choose from (.*)\)", message):
            near = suggestion(choice[1], re.findall(r"[\w.-]+", choice[2])) + "; "
        elif option := re.search(r"unrecognized arguments: (--[\w-]+)", message):
            close = difflib.get_close_matches(option[1], options, 1)
            near = f"did you mean {close[0]}?; " if close else ""
        elif re.search(r"unrecognized arguments: \d", message) and "N,N" in self.format_usage():
            near = "numbers of an option are joined by commas, as --contexts 16,128; "
        line = " ".join(message.split())
        for kind, meant in (("int", "a whole number"), ("float", "a number")):
            line = line.replace(f"invalid {kind} value:", f"expected {meant}, got")
        self.exit(BAD_INPUT, f"{self.prog}: {line}; {near}see {self.prog} --help\n")


class Progress:
    """Prints stages to stderr with the seconds since the start: one line each, or one line that is
    overwritten on a terminal, which also shows steps within a stage.
    """

    def __init__(self) -> None:
        self.start, self.printed = time.monotonic(), 0

    def __call__(self, stage: str) -> None:
        if sys.stderr is None:  # closed by the calling program
            return
        if isinstance(stage, Step) and not sys.stderr.isatty():
            return
        line = f"[{time.monotonic() - self.start:5.1f} s] {escaped(' '.join(stage.split()))}"
        if sys.stderr.isatty():
            self._overwrite(line.ljust(self.printed))
            self.printed = len(line)
        else:
            print(line, file=sys.stderr, flush=True)

    def close(self) -> None:
        """Clear the line on a terminal, so that the next output starts at its beginning."""
        if self.printed:
            self._overwrite(" " * self.printed + "\r")
            self.printed = 0

    def _overwrite(self, line: str) -> None:
        print(f"\r{line}", end="", file=_unescaped(sys.stderr), flush=True)


REFUSED = (GraphError, ModuleNotFoundError, OSError, OverflowError, RecursionError, ValueError)


def refusal(error: BaseException) -> str | None:
    """The message for an error, or None if it is none of REFUSED or the input did not cause it."""
    if isinstance(error, ModuleNotFoundError):
        module = (error.name or "").partition(".")[0]
        for extra, modules in EXTRAS.items():
            if module in modules.split():
                install = f"pip install 'posenc-export[{extra}]'"
                return f"packages: expected {module} to be installed, got none; {install}"
        return None
    if isinstance(error, OSError):
        got = f"{error.strerror or error} for {error.filename or 'the output'}"
        rule = "expected a file that can be read and written"
        return f"file: {rule}, got {got}; give another path"
    if isinstance(error, OverflowError):
        rule = "number: expected whole numbers within 64 bits"
        return f"{rule}, got a larger one ({error}); give a smaller one"
    if isinstance(error, RecursionError):
        if "JSON" not in str(error):
            return None
        return "file: expected JSON with few nested levels, got too many; give another path"
    return str(error) if isinstance(error, REFUSED) else None


def in_encoding(error: BaseException) -> str | None:
    """The message, with file and line, for an error in an encoding from outside, or None."""
    plugins = sys.modules.get("posenc_export.encodings.shared.plugins")
    names = set() if plugins is None else plugins.modules()
    frames = [
        (frame.f_globals.get("__name__"), f"{frame.f_code.co_filename}:{line}")
        for frame, line in traceback.walk_tb(error.__traceback__)
    ]
    own = [place for module, place in frames if module in names]
    if not own or str(error).startswith("encoding"):  # it says already which encoding it is
        return None
    remedy = "correct the code there, and run posenc_export.testing.check_encoding"
    return f"encoding: expected {own[-1]} to run, got {type(error).__name__}: {error}; {remedy}"


def refuse(progress: Progress, line: str) -> int:
    """Print an error in one line and return the exit status."""
    progress.close()
    note(line)
    return BAD_INPUT


def note_unverified(progress: Progress, folder: Path, manifest: Manifest) -> None:
    """Print a line to stderr if no verification of the artefact has passed."""
    if not any(proof and proof["passed"] for proof in (manifest.certificate, *manifest.proofs)):
        progress.close()
        said = "has no passed certificate: its outputs are not known to be those of its model"
        note(f"{folder} {said}; run posenc verify {shlex.quote(str(folder))}")


def show(rows: list[dict[str, Any]]) -> None:
    """Print rows with equal keys as a table."""
    cells = [[str(value) for value in row.values()] for row in rows]
    print("\n".join(aligned(list(rows[0]), cells, WIDTH)))


def summary(certificate: dict[str, Any] | None) -> dict[str, Any]:
    """Table cells of a certificate; the worst error is the largest one relative to its tolerance:
    of an artefact that rounds activations that of the float32 form, beside that as exported.
    """
    if certificate is None:
        return {"cells": 0, "worst error": "not verified", "tolerance": "-", "passed": False}
    cells = certificates.count_cells(certificate)
    return {
        "cells": cells if certificate.get("grid", "whole") == "whole" else f"{cells} (quick)",
        "worst error": certificates.format_worst_cell(certificate),
        "tolerance": certificates.format_bound(certificate, certificates.worst_cell(certificate)),
        "passed": certificate["passed"],
    }
