"""Calls that are invalid in every state of a session; each must be refused with a message of one
line.
"""

from typing import Any, Callable

import numpy as np

from posenc_export.runtime import Session
from tests.fuzz.subjects import Subject

Wrong = Callable[[Subject, Session], Any]
HUGE = [2**31, 2**62, 2**63 - 1, 2**63, 2**64 - 1, 2**70, -(2**63), -(2**70)]


def _two(subject: Subject) -> np.ndarray:
    """Return two tokens of one row [1,2] or [1,2,E]."""
    return subject.texts[:1, :2].copy()


def _whole(subject: Subject, session: Session) -> np.ndarray:
    return np.repeat(_two(subject), max(session.batch, 1), 0)


def _prefill(**arguments: Any) -> Wrong:
    return lambda subject, session: session.prefill(_whole(subject, session), **arguments)


def _rows(make: Callable[[np.ndarray], Any]) -> Wrong:
    return lambda subject, session: session.prefill(make(_whole(subject, session)))


def _step(make: Callable[[np.ndarray], Any]) -> Wrong:
    return lambda subject, session: session.step(make(_whole(subject, session)[:, 0]))


def _grid(make: Callable[[np.ndarray, int], Any]) -> Wrong:
    def call(subject: Subject, session: Session) -> Any:
        tokens = _whole(subject, session)
        grid = make(
            np.zeros((max(subject.manifest.axes, 1), len(tokens), 2), np.int64), subject.spec.size
        )
        return session.prefill(tokens, grid=grid)

    return call


def _changed(array: np.ndarray, value: Any, dtype: Any = None) -> np.ndarray:
    array = array.astype(dtype) if dtype else array
    array.flat[-1] = value
    return array


WRONG: dict[str, Wrong] = {
    "no rows": _rows(lambda x: []),
    "no rows of an array": _rows(lambda x: x[:0]),
    "no tokens": _rows(lambda x: x[:, :0]),
    "rows without tokens": _rows(lambda x: [[]] * len(x)),
    "a rank too many": _rows(lambda x: x[None]),
    "a rank too few": _rows(lambda x: x[:, 0]),
    "rows of a rank too few": _rows(lambda x: [1] * len(x)),
    "text": _rows(lambda x: ["a"] * len(x)),
    "rows of text": _rows(lambda x: [["a", "b"]] * len(x)),
    "ragged rows in a row": _rows(lambda x: [[[1], [1, 2]]] * len(x)),
    "a row of nothing": _rows(lambda x: [None] * len(x)),
    "an array of objects": _rows(lambda x: x.astype(object)),
    "complex numbers": _rows(lambda x: x.astype(np.complex64)),
    "numbers of another size": _rows(
        lambda x: x.astype(np.float32 if x.dtype == np.int64 else np.float64)
    ),
    "rows more than there are, and none": lambda subject, session: session.prefill(
        [*subject.texts[:1, :2]] * (session.batch + 1), start=subject.spec.size
    ),
    "mask of another shape": _prefill(attention_mask=np.ones((9, 2), np.int64)),
    "mask of a row": _prefill(attention_mask=np.ones(2, np.int64)),
    "mask of twos": lambda subject, session: session.prefill(
        _whole(subject, session), attention_mask=np.full((max(session.batch, 1), 2), 2)
    ),
    "mask of nothing": lambda subject, session: session.prefill(
        _whole(subject, session), attention_mask=np.full((max(session.batch, 1), 2), np.nan)
    ),
    "mask of zeros": lambda subject, session: session.prefill(
        _whole(subject, session), attention_mask=np.zeros((max(session.batch, 1), 2), np.int64)
    ),
    "mask of ragged lists": _prefill(attention_mask=[[1], [1, 1]]),
    "start past the range": lambda subject, session: session.prefill(
        _whole(subject, session), start=subject.spec.size - 1
    ),
    "start below zero": _prefill(start=-1),
    "start of a fraction": _prefill(start=0.5),
    "start of text": _prefill(start="0"),
    "start that is true": _prefill(start=True),
    "start of another count": _prefill(start=[0] * 9),
    "start of another rank": _prefill(start=np.zeros((3, 400), np.int64)),
    "start of ragged lists": _prefill(start=[[0], [0, 1]]),
    "step of fractions": _step(
        lambda x: x.astype(np.float64) if x.dtype == np.int64 else x.astype(np.int64)
    ),
    "step of another count": lambda subject, session: session.step(
        np.repeat(subject.texts[:1, 0], session.batch + 1, 0)
    ),
    "step of another rank": _step(lambda x: x[:, None]),
    "step of nothing": _step(lambda x: None),
    "step of text": _step(lambda x: ["a"] * len(x)),
    "step of ragged lists": _step(lambda x: [[1], [1, 2]]),
    "step of many dimensions": lambda subject, session: session.step(np.zeros((2, 3, 4, 5))),
    "rewind below zero": lambda subject, session: session.rewind(-1),
    "rewind of a fraction": lambda subject, session: session.rewind(0.5),  # type: ignore[arg-type]
    "rewind of another count": lambda subject, session: session.rewind([0] * 9),
    "rewind of another rank": lambda subject, session: session.rewind(np.zeros((40, 40), np.int64)),
    "rewind of more than there is": lambda subject, session: session.rewind(
        int(session.length.max(initial=0)) + 1
    ),
    "retire of a row that is not there": lambda subject, session: session.retire(session.batch),
    "retire below zero": lambda subject, session: session.retire(-1),
    "retire that is true": lambda subject, session: session.retire(True),
    "retire of a fraction": lambda subject, session: session.retire(0.0),  # type: ignore[arg-type]
    "retire of many rows": lambda subject, session: session.retire(np.zeros((40, 40), np.int64)),  # type: ignore[arg-type]
    "chunk of many numbers": _prefill(chunk=np.zeros((40, 40), np.int64)),
    "retire of rows": lambda subject, session: session.retire([0]),  # type: ignore[arg-type]
    "admit of no rows": lambda subject, session: session.admit([]),
    "admit of a row without tokens": lambda subject, session: session.admit(
        [subject.texts[0, :1], subject.texts[0, :0]]
    ),
    "admit past the range": lambda subject, session: session.admit(
        _two(subject), start=subject.spec.size - 1
    ),
    "admit below zero": lambda subject, session: session.admit(_two(subject), start=-1),
    "admit of starts of another count": lambda subject, session: session.admit(
        _two(subject), start=[0, 0]
    ),
    "grid of another shape": _grid(lambda grid, size: grid[:, :, :1]),
    "grid of fractions": _grid(lambda grid, size: grid.astype(np.float32)),
    "grid past the range": _grid(lambda grid, size: _changed(grid, size)),
    "grid below zero": _grid(lambda grid, size: _changed(grid, -1)),
    "grid beyond 64 bits": _grid(lambda grid, size: _changed(grid, 2**64 - 1, np.uint64)),
    "grid of ragged lists": _grid(lambda grid, size: [[1], [1, 2]]),
    **{
        f"chunk {chunk!r}": _prefill(chunk=chunk)
        for chunk in (0, -1, -(2**63), 1.5, True, "2", [2])
    },
    **{f"start {number}": _prefill(start=number) for number in HUGE},
    **{
        f"start {number} of a row": lambda subject, session, n=number: session.prefill(
            _whole(subject, session), start=[n] * max(session.batch, 1)
        )
        for number in HUGE
    },  # type: ignore[misc]
    **{f"rewind {number}": lambda subject, session, n=number: session.rewind(n) for number in HUGE},  # type: ignore[misc]
    **{f"retire {number}": lambda subject, session, n=number: session.retire(n) for number in HUGE},  # type: ignore[misc]
    **{
        f"admit at {number}": lambda subject, session, n=number: session.admit(
            _two(subject), start=n
        )
        for number in HUGE
    },  # type: ignore[misc]
}
IDS = [256, 2**31, 2**62, -1, -(2**63)]
WRONG_IDS: dict[str, Wrong] = {
    "the first id past the last": lambda subject, session: session.prefill(
        _changed(_whole(subject, session), subject.vocabulary)
    ),
    "the first id past the last in a step": lambda subject, session: session.step(
        _changed(_whole(subject, session)[:, 0], subject.vocabulary)
    ),
    **{f"id {number}": _rows(lambda x, n=number: _changed(x, n)) for number in IDS},  # type: ignore[misc]
    **{
        f"id {number} of a list": _rows(lambda x, n=number: [[0, n]] * len(x))
        for number in [*IDS, 2**63, 2**64 - 1, 2**70, 0.5]
    },  # type: ignore[misc]
    **{f"id {number} of a step": _step(lambda x, n=number: _changed(x, n)) for number in IDS},  # type: ignore[misc]
    "id of unsigned 64 bits": _rows(lambda x: [np.full(2, 2**64 - 9, np.uint64) for _ in x]),
    "id of unsigned 64 bits of a step": _step(lambda x: _changed(x, 2**64 - 9, np.uint64)),
    "id of a small type of a step": _step(lambda x: _changed(x, -3, np.int8)),
}
# Invalid activations.
WRONG_ACTIVATIONS: dict[str, Wrong] = {
    "another width": _rows(lambda x: x[:, :, :-1]),
    "rows of another width": _rows(lambda x: [row[:, :-1] for row in x]),
    "another width of a step": _step(lambda x: x[:, :-1]),
}


def wrong_calls(subject: Subject) -> dict[str, Wrong]:
    """Return the invalid calls that apply to a subject."""
    return {**WRONG, **(WRONG_IDS if subject.vocabulary else WRONG_ACTIVATIONS)}
