"""Sums of products of integers are exact on processors whose instructions limit them."""

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from posenc_export.runtime.graphs import ort_options


def test_sessions_ask_for_exact_sums_where_others_are_limited(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(ort_options, "saturates", lambda: True)
    manifest: Any = SimpleNamespace(operators={"MatMulIntegerToFloat": 1}, target="", weights=None)
    name, value = ort_options.EXACT
    assert ort_options.session_options(manifest, 1).get_session_config_entry(name) == value
    manifest.operators = {"MatMul": 1}
    with pytest.raises(RuntimeError, match="does not have configuration"):
        ort_options.session_options(manifest, 1).get_session_config_entry(name)


def test_versions_that_abort_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ort_options, "saturates", lambda: True)
    monkeypatch.setattr("onnxruntime.__version__", "1.29.0")
    with pytest.raises(ValueError, match="ONNX Runtime 1.30 or newer for .*, got 1.29.0; pip inst"):
        ort_options.keep_exact(None, ["MatMulIntegerToFloat"])


def test_limited_sums_are_found_by_running_products(monkeypatch: pytest.MonkeyPatch) -> None:
    limited = SimpleNamespace(run=lambda _, feeds: [np.full((len(feeds["x"]), 64), 1048544.0)])
    monkeypatch.setattr(ort_options, "opened", lambda model, folder: limited)
    assert ort_options.saturates.__wrapped__()
