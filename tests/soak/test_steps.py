"""A short run of the soak test, and a planted leak, which it must detect. The long run: `make
soak`.
"""

from typing import Any

import numpy as np
import pytest

from posenc_export.runtime import Session
from tests.soak import steps


@pytest.mark.parametrize(
    ("target", "way", "count"),
    [
        pytest.param("ort", "rewinding", 20_000, marks=pytest.mark.exhaustive),
        ("onnx-static", "exchanging", 600),
        pytest.param("ort-native", "rewinding", 20_000, marks=pytest.mark.exhaustive),
    ],
)
def test_steps_without_end_keep_memory_flat(target: str, way: str, count: int) -> None:
    figure = steps.soak(target, way, count)
    assert not figure["wrong"], figure
    assert figure["steps_per_second"] > 0


@pytest.mark.exhaustive
def test_memory_that_grows_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    kept: list[Any] = []

    def leaking(session: Session, text: np.ndarray) -> steps.Steps:
        for output in steps.rewinding(session, text):
            kept.append(np.ones(40_000, np.uint8))
            yield output

    monkeypatch.setitem(steps.WAYS, "rewinding", leaking)
    memory, objects = steps.soak("ort", "rewinding", 1500)["wrong"]
    assert memory.startswith("memory grew by") and objects.startswith("objects grew by")
