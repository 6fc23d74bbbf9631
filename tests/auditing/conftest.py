"""Graphs of these tests are our own: open them in this process, which takes less time."""

import pytest

from posenc_export.auditing import confined
from posenc_export.auditing.confined import graph_of


@pytest.fixture(autouse=True)
def in_this_process(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(confined, "Confined", lambda path, seconds: graph_of(path))
