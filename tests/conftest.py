"""Make exports in tests faster: less garbage collection, operators looked up once in a process, no
waiting for the disk, sessions on one thread, one process for the tests of a file, and contracts of
kernels tried once. Seed the random numbers of each test. Say in one line before the tests which
encoding is not registered, and at the end what did not run here.
"""

import functools
import gc
import os
import re
import shutil
import tempfile
import tomllib
from collections import Counter
from pathlib import Path
from typing import Any, Iterable, Sequence

import pytest
import torch
from torch._export import utils

from posenc_export import encodings
from posenc_export.runtime.artefact import files
from posenc_export.runtime.graphs import kernel_library, ort_options

TOP = Path(__file__).parents[1]
NOTES = "bench/texts/encodings.toml"


def unregistered(files: Iterable[str], registered: Sequence[str], noted: Iterable[str]) -> str:
    """Return one line about the first encoding that lacks its file, its word or its notes; an
    empty text if none does.
    """
    for name in sorted({*files, *registered, *noted}):
        got = [
            place
            for place, names in (
                (f"posenc_export/encodings/{name}.py", files),
                ("NAMES of posenc_export/encodings/__init__.py", registered),
                (NOTES, noted),
            )
            if name not in names
        ]
        if got:
            return f"encoding {name}: expected it in {', '.join(got)}, got none; add it there"
    return ""


def pytest_configure(config: pytest.Config) -> None:
    """Keep results of contracts for the tests of this run alone, in all its processes."""
    written = {path.stem for path in (TOP / "posenc_export/encodings").glob("[!_]*.py")}
    if line := unregistered(
        written, encodings.NAMES, tomllib.loads((TOP / NOTES).read_text("utf-8"))
    ):
        raise pytest.UsageError(line)
    if not hasattr(config, "workerinput"):  # the workers of xdist inherit the variable
        os.environ[files.CACHE] = folder = tempfile.mkdtemp(prefix="contracts")
        config.add_cleanup(lambda: shutil.rmtree(folder, ignore_errors=True))


def pytest_collection_finish(session: pytest.Session) -> None:
    gc.collect()
    # Modules and collected tests stay until the end, so that collections need not visit them.
    gc.freeze()
    # A trace allocates millions of objects; with Python's threshold of 700, collections take a
    # tenth of it.
    gc.set_threshold(50_000, 20, 20)
    # No test ends the power supply: a process that is killed loses nothing that it has written.
    os.fsync = lambda descriptor: None
    # A trace looks up all operators of PyTorch 50 times, in case one was registered since.
    utils._materialize_cpp_cia_ops = functools.cache(utils._materialize_cpp_cia_ops)
    # Threads of ONNX Runtime that wait for work keep a core busy.
    options_of = ort_options.options_of
    ort_options.options_of = lambda operators, entries, threads, native: options_of(
        operators, entries, threads or 1, native
    )


@pytest.hookimpl(tryfirst=True)  # before xdist reads the groups
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    # The tests of a file run in one process, which makes their models and fixtures once.
    for item in items:
        if item.get_closest_marker("xdist_group") is None:
            item.add_marker(pytest.mark.xdist_group(item.nodeid.partition("::")[0]))
    if kernel_library.path() is None:  # as well as the mark `built` of tests/kernels
        skipped = pytest.mark.skip(reason="the library of packages/kernels is not built")
        for item in items:
            values = getattr(getattr(item, "callspec", None), "params", {}).values()
            if any(isinstance(value, str) and value == "ort-native" for value in values):
                item.add_marker(skipped)


def left_out(skipped: Iterable[Any]) -> str:
    """Return one line of what did not run here and why, from the reports of skipped tests."""
    reasons: Counter[str] = Counter()
    for report in skipped:
        reason = str(report.longrepr[-1]).removeprefix("Skipped: ")
        reasons[re.sub(r"^could not import (\S+): .*", r"there is no \1", reason)] += 1
    named = [f"{count} because {reason}" for reason, count in reasons.most_common()]
    return "tests or files that did not run here: " + (", ".join(named) or "none")


@pytest.hookimpl(trylast=True)
def pytest_terminal_summary(terminalreporter: Any) -> None:
    terminalreporter.write_line(left_out(terminalreporter.stats.get("skipped", ())))


@pytest.fixture(autouse=True)
def seeded_generator() -> None:
    """Make the random numbers of a test independent of the tests before it."""
    torch.manual_seed(0)
