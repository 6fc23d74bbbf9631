"""Graphs of these tests are our own: open them in this process, which takes less time; and read a
checkpoint once, which takes most of an audit.
"""

import functools
from pathlib import Path
from typing import Any

import pytest

from posenc_export.auditing import auditor, confined
from posenc_export.auditing.confined import graph_of
from posenc_export.auditing.reference import open_reference

read_once = functools.cache(open_reference)


def opened(reference: Any, *reads: Any) -> Any:
    """Open a reference; a checkpoint, which tests must not modify, once in a process."""
    if isinstance(reference, (str, Path)) and Path(reference, "config.json").is_file():
        return read_once(Path(reference).absolute(), *reads)
    return open_reference(reference, *reads)


@pytest.fixture(autouse=True)
def fast(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(confined, "Confined", lambda path, seconds: graph_of(path))
    monkeypatch.setattr(auditor, "open_reference", opened)
