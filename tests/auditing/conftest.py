"""Graphs of these tests are our own: open them in this process, which takes less time."""

import pytest

from posenc_export.auditing import opening
from posenc_export.auditing.reading import graph_of


@pytest.fixture(autouse=True)
def in_this_process(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(opening, "Confined", lambda path, seconds: graph_of(path))
