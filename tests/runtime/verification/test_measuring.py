"""Measuring the cells of a grid, which is shorter for large models and quick ones."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from posenc_export.export import VerificationError, export
from posenc_export.runtime import load, verify
from posenc_export.runtime.session.errors import GraphError
from posenc_export.runtime.session.runner import Runner
from posenc_export.runtime.verification import grid_inputs, measuring, proof
from posenc_export.shared.numerics import worst_error
from tests.tiny import block, decoder
from tests.traces import exported, sources

QUICK = {
    "past middle, new 1",
    "chunks of 5",
    "left padding",
    "ragged rows",
    "rewind by row",
    "fork",
    "steps",
    "at once",
}
CHOSEN = {"last of ragged rows", "last of left padding", "rows come and go"}
pytestmark = pytest.mark.xdist_group("rope")  # one worker, which traces the model once


def test_a_graph_that_stops_is_a_failed_cell(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    manifest = export(sources(block("rope")), "ort", tmp_path / "artefact", verify=False)
    session = load(tmp_path / "artefact", provider="cpu", threads=1).session()
    expected = proof.read(manifest, tmp_path / "artefact")

    def stopped(*_: Any, **__: Any) -> Any:
        raise GraphError(RuntimeError("stopped"))

    monkeypatch.setattr("posenc_export.runtime.session.session.Session.step", stopped)
    accuracy = proof.accuracy_on("cpu", manifest.reference)
    result = measuring.measure(session, expected, accuracy, lambda _: None)
    assert result.cells["batch 1, start 0: steps"] > 1e299
    assert result.cells["batch 1, start 0: chunks of 5"] < 1e-3
    assert result.failures["batch 1, start 0: steps"].endswith("RuntimeError: stopped")
    assert "batch 1, start 0: chunks of 5" not in result.failures


@pytest.mark.parametrize("dtype", ["float16", "float32", "float64"])
def test_the_worst_error_of_large_outputs_is_that_of_all_numbers_at_once(dtype: str) -> None:
    chance = np.random.default_rng(0)
    expected = chance.standard_normal((3, 37, 1000)).astype(dtype)
    actual = (expected + 1e-3 * chance.standard_normal(expected.shape)).astype(dtype)
    for one, other in ((actual, expected), (actual[:, 1::2, ::3], expected[:, 1::2, ::3])):
        wide = np.abs(one.astype(np.float64) - other.astype(np.float64)).max()
        assert worst_error(one, other) == wide / float(np.abs(other).max())


def test_the_grid_of_a_large_model_is_shorter_and_still_sees_a_wrong_position(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = export(sources(decoder("rope")), "ort", tmp_path / "whole")
    monkeypatch.setattr(grid_inputs, "LARGE", 1)
    thin = export(sources(decoder("rope")), "ort", tmp_path / "thin")
    assert (
        whole.certificate is not None
        and thin.certificate is not None
        and thin.certificate["passed"]
    )
    assert (
        3 * (tmp_path / "thin/reference.bin").stat().st_size
        < 2 * (tmp_path / "whole/reference.bin").stat().st_size
    )
    build = Runner.fill

    def shifted(self: Runner, *arguments: Any) -> Any:
        feeds = build(self, *arguments)
        late = self.manifest.target == "ort"  # the eager module gets the right positions
        return {
            name: np.maximum(array - 1, -1) if late and name == "position_ids" else array
            for name, array in feeds.items()
        }

    monkeypatch.setattr(Runner, "fill", shifted)
    with pytest.raises(VerificationError):
        export(sources(decoder("sinusoidal")), "ort", tmp_path / "fault")


@pytest.mark.parametrize("signature", ["positions", "mask"])
def test_the_quick_grid_has_a_cell_for_each_kind_of_call_and_is_named_in_the_certificate(
    signature: str, tmp_path: Path
) -> None:
    whole = export(sources(decoder("rope")), "ort", tmp_path / "artefact", signature)
    quick = verify(tmp_path / "artefact", "cpu", quick=True)
    assert (
        whole.certificate is not None
        and whole.certificate["grid"] == "whole"
        and quick["grid"] == "quick"
        and quick["passed"]
    )
    kinds = QUICK | CHOSEN if signature == "positions" else QUICK  # a mask describes whole columns
    assert {cell.split(": ")[1] for cell in quick["cells"]} == kinds
    assert set(quick["cells"]) < set(whole.certificate["cells"])


def test_the_quick_grid_sees_positions_that_are_wrong_only_behind_a_late_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    exported(tmp_path / "artefact", decoder("sinusoidal"), "ort")
    build = Runner.fill

    def shifted(self: Runner, *arguments: Any) -> Any:
        return {
            name: np.where(array > 500, array - 1, array) if name == "position_ids" else array
            for name, array in build(self, *arguments).items()
        }

    monkeypatch.setattr(Runner, "fill", shifted)
    assert not verify(tmp_path / "artefact", "cpu", quick=True)["passed"]
