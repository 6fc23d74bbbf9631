"""The grid must detect sessions that handle their caches wrongly."""

from pathlib import Path
from typing import Any, Dict

import numpy as np
import pytest

from posenc_export.export import export
from posenc_export.export.expected import expected_outputs
from posenc_export.export.verify import certify
from posenc_export.runtime import Session, load
from posenc_export.runtime.session.buffered_caches import BufferedCaches
from posenc_export.runtime.verification.scenarios import ragged
from posenc_export.shared.numerics import worst_error
from tests.export.planting import certificate_of
from tests.tiny import block, decoder
from tests.traces import sources


class KeepsWhatIsRewound(Session):
    """Rewinds its number of tokens, but clears no slots."""

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self._cache_manager.cut = lambda state, target: state.replace(settled_length=target)  # type: ignore[method-assign]
        self._cache_manager.tidy = lambda state: None  # type: ignore[method-assign]


class LeavesHiddenSlots(Session):
    """Truncates its rows, but clears no slots after them."""

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self._cache_manager.tidy = lambda state: None  # type: ignore[method-assign]


class MovesNoRow(Session):
    """Changes the index of the last row, but does not move its tokens."""

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self._cache_manager.apply_moves = lambda state: state.replace(moves=())  # type: ignore[method-assign]


class ForgetsCoordinates(Session):
    """Replays tokens after a rewind with the positions of text."""

    def rewind(self, n: Any) -> None:
        for history in self._now.histories:
            for snapshot in history.snapshots:
                snapshot.parts = [(tokens, {"grid": np.zeros_like(numbers["grid"])}) for tokens, numbers in snapshot.parts]
        super().rewind(n)


class ForgetsStates(Session):
    """Starts every call from the states of an empty session."""

    def prefill(self, *arguments: Any, **named: Any) -> Any:
        self._forget_states()
        return super().prefill(*arguments, **named)

    def step(self, *arguments: Any, **named: Any) -> Any:
        self._forget_states()
        return super().step(*arguments, **named)

    def _forget_states(self) -> None:
        now = self._now.without_stepper(False)
        if now.caches is not None:
            self._now = now.replace(caches=now.caches.restored({row: () for row in range(now.rows)}))


class ForksShareCaches(Session):
    """Forks without copying the caches."""

    def fork(self) -> Session:
        other = super().fork()
        other._now = other._now.replace(caches=self._now.caches)
        return other


def _on_target(config: Any, target: str, session: type, folder: Path) -> Dict[str, Any]:
    """Return the certificate of an artefact with another class of session."""
    made = sources(config)
    export(made, target, folder, verify=False)
    loaded = load(folder, provider="cpu", threads=1)
    return certify(session(loaded.graph.open, loaded.manifest), made.model, expected_outputs(made.model, loaded.manifest), lambda _: None)


@pytest.mark.parametrize(
    ("variant", "target", "session"),
    [
        pytest.param(*case, marks=pytest.mark.xdist_group(case[0]))  # one worker per variant, which traces it once
        for case in (
            ("rope", "onnx", KeepsWhatIsRewound),
            ("fox", "onnx-static", KeepsWhatIsRewound),
            ("rope", "onnx-static", LeavesHiddenSlots),
            ("rope", "onnx-static", ForksShareCaches),
            ("alibi", "ort", ForksShareCaches),
            ("rope", "ort", MovesNoRow),
            ("fox", "onnx-static", MovesNoRow),
        )
    ],
)
def test_a_session_with_a_stale_cache_is_detected(variant: str, target: str, session: type, tmp_path: Path) -> None:
    assert not _on_target(decoder(variant), target, session, tmp_path / "wrong")["passed"]


@pytest.mark.xdist_group("mrope")
@pytest.mark.parametrize("target", ["ort", "onnx"])
def test_a_session_that_loses_coordinates_at_a_rewind_is_detected(target: str, tmp_path: Path) -> None:
    config = block("mrope", mechanism="linear", kv_heads=6)
    assert not _on_target(config, target, ForgetsCoordinates, tmp_path / "wrong")["passed"]


@pytest.mark.parametrize("variant", ["input_rnn", "conditional_conv"])
def test_a_session_that_does_not_carry_states_is_detected(variant: str) -> None:
    assert not certificate_of(decoder(variant), session=ForgetsStates)["passed"]


@pytest.mark.xdist_group("rope")
@pytest.mark.parametrize("row", range(3))
def test_lost_outputs_past_the_width_of_any_row_are_detected_in_ragged_rows(row: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def cut(self: BufferedCaches, calls: Any, right: Any = BufferedCaches.run) -> Any:
        made, caches = right(self, calls)
        width = calls[min(row, len(calls) - 1)].new
        return [(index, np.where(np.arange(len(output))[:, None] < width, output, 0)) for index, output in made], caches

    made = sources(block("rope"))
    export(made, "ort", tmp_path / "a", verify=False)
    session = load(tmp_path / "a", provider="cpu", threads=1).session()
    (case, *_) = expected_outputs(made.model, session.manifest, filled=False).cases.values()
    monkeypatch.setattr(BufferedCaches, "run", cut)
    assert any(worst_error(*pair) > 0.1 for pair in ragged(session, case))
