"""Sessions on disk: what is restored continues as the session that was saved."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from posenc_export import load
from posenc_export.runtime.session import saved
from tests.tiny import decoder
from tests.traces import artefact

pytestmark = pytest.mark.xdist_group("alibi")  # one worker, which traces the model once

PROMPTS = [list(range(3, 12)), [40, 41], [7] * 5]
KINDS = [("alibi", "ort"), ("alibi", "onnx"), ("input_rnn", "ort")]
MORE = [("alibi", "onnx-static"), ("alibi", "torchscript"), ("input_rnn", "onnx")]


@pytest.fixture(
    scope="module",
    params=[*KINDS, *(pytest.param(which, marks=pytest.mark.exhaustive) for which in MORE)],
    ids="-".join,
)
def model(request: pytest.FixtureRequest) -> Any:
    encoding, target = request.param
    return load(artefact(decoder(encoding), target), provider="cpu", threads=1)


def _continued(session: Any) -> np.ndarray:
    tokens = np.arange(session.batch)
    return np.stack(
        [
            session.step(tokens),
            session.step(tokens + 3),
            session.prefill([[5, 6]] * session.batch)[:, -1],
        ]
    )


def test_a_restored_session_continues_as_the_one_that_was_saved(model: Any, tmp_path: Path) -> None:
    session = model.session()
    session.prefill(PROMPTS, start=None if model.manifest.signature == "mask" else [0, 7, 30])
    session.step(np.array([1, 2, 3]))
    held = [[*row, token] for row, token in zip(PROMPTS, (1, 2, 3), strict=True)]
    session.save(tmp_path / "saved", held)
    restored = model.restore(tmp_path / "saved")
    assert restored.length.tolist() == session.length.tolist()
    assert restored.position.tolist() == session.position.tolist()
    assert [row.tolist() for row in saved.tokens(tmp_path / "saved", model.manifest)] == held
    assert np.array_equal(_continued(restored), _continued(session))
    for one in (restored, session):
        one.rewind([1, 0, 2])
    assert np.array_equal(_continued(restored), _continued(session))


def test_a_session_without_rows_is_restored_without_rows(model: Any, tmp_path: Path) -> None:
    model.session().save(tmp_path / "empty")
    restored = model.restore(tmp_path / "empty")
    assert restored.batch == 0 and saved.tokens(tmp_path / "empty", model.manifest) is None
    assert np.array_equal(restored.prefill(PROMPTS), model.session().prefill(PROMPTS))


def test_ids_that_the_cache_does_not_hold_are_refused(model: Any, tmp_path: Path) -> None:
    session = model.session()
    session.prefill(PROMPTS)
    with pytest.raises(
        ValueError,
        match=r"expected tokens to be \[9, 2, 5\] ids, got \[9, 2\]; give those in the cache",
    ):
        session.save(tmp_path / "saved", PROMPTS[:2])
    assert not list(tmp_path.iterdir())
