"""Sequences of calls that have failed before, as plain data: {"spec", "options", "calls"}.
test_sessions replays them.
"""

from typing import Any, Sequence


def _case(spec: Sequence[Any], *calls: dict[str, Any], rewind: int = 256) -> dict[str, Any]:
    """Return a sequence of calls on one session of an artefact (subjects.Spec)."""
    options = {"batch": 1, "capacity": None, "rewind": rewind}
    return {"spec": list(spec), "options": options, "calls": list(calls)}


def _read(*counts: int, do: str = "prefill", **others: Any) -> dict[str, Any]:
    """Return a call that reads a number of tokens of each row."""
    rows, none = [[0, -1, count] for count in counts], dict.fromkeys(("start", "padding", "chunk"))
    return {"do": do, "on": 0, "rows": rows, **none, **others}


def _steps(times: int, text: int = 0, copy: bool = False) -> dict[str, Any]:
    return {"do": "step", "on": 0, "times": times, "texts": [text], "copy": copy}


def _rewind(n: int) -> dict[str, Any]:
    return {"do": "rewind", "on": 0, "n": n}


def _wrong(name: str) -> dict[str, Any]:
    return {"do": "wrong", "on": 0, "name": name}


FOUND: dict[str, dict[str, Any]] = {
    # Rounding to float16 changes this model more than most; the bound of its calls did not know.
    "a model that rounding changes much": _case(
        ("integer", "bidirectional", "onnx", "mask", 40, "float16", "cpu"),
        _read(31, keep=None, rows=[[2, -1, 31]]),
    ),
    # Scores of large positions amplify rounding; the bound of these calls did not know.
    "a row whose scores amplify rounding": _case(
        ("integer", "block", "torchscript", "positions", 600), _read(25, chunk=1, keep=None)
    ),
    # The slot of a step that might have broken off was filled although a full cache does not have
    # it: IndexError.
    "a fork of a cache that steps have filled to its end": _case(
        ("rope", "decoder", "ort", "mask", 40),
        *(_read(21), _steps(19), {"do": "fork", "on": 0}, _rewind(3)),
        _steps(2, text=1, copy=True),
    ),
    # A query that sees nothing gave NaN, which stayed in the slot of the padding: the mask hides
    # it, but 0 times NaN is NaN.
    "a row without tokens beside one token, then a step": _case(
        ("rope", "decoder", "ort", "mask", 40), _read(0, 1), _steps(1)
    ),
    # Coordinates that are no places in the sequence are 0 where none are given.
    "an encoder of boxes without boxes": _case(
        ("boxes-joined", "encoder", "ort", "positions", 40), _read(5, 3, keep=None)
    ),
    # Its own last call was forgotten before start was looked at.
    "a refused start leaves a bidirectional model's lengths": _case(
        ("rope", "bidirectional", "ort", "positions", 40), _read(5), _wrong("start past the range")
    ),
    # Rows that share columns need more of them than there are positions: the rotation of cached
    # keys stopped at the end of its table.
    "more columns than positions, keys turned when they are read": _case(
        ("rope_longrope-short", "decoder", "ort", "mask", 40),
        *(_read(0, 0, 31, 0), _read(0, 0, 0, 2), _read(0, 0, 0, 8)),
    ),
    # Counted from where the row stood, not from the furthest it had read.
    "a rewind behind a rewind that used up what is kept": _case(
        ("nope", "linear", "onnx", "positions", 40),
        *(_read(1), _read(6, chunk=2), _steps(15), _rewind(21), _rewind(1)),
        rewind=20,
    ),
    # The mask had as many columns as tokens of the call, since these models cache no keys.
    "a step of a model without cached keys, with a mask": _case(
        ("rope", "linear", "onnx", "mask", 40), _read(3), _steps(1, copy=True)
    ),
    # Weights were read at the slot after a row without new tokens, which no row of the call had.
    "a row without tokens beside shorter ones, weights read by slot": _case(
        ("shaw-bert", "block", "ort-native"), _read(2, 1, 1), _read(0, 0, 1)
    ),
    # Memory for the first row alone was reserved, and rows without new tokens lost theirs.
    "a row that reads alone beside one that fills its memory": _case(
        ("fox", "block", "onnx-static"),
        *(_read(0, 0, 0, 30), _steps(10), _read(1, 0, 0, 0), _rewind(1)),
    ),
    # Keys were written behind the last slots of the call, where padding of the shorter rows goes.
    "a row without tokens beside shorter ones, keys counted from the last": _case(
        ("cope", "block", "ort-native"), _read(2, 1, 1), _read(0, 0, 1)
    ),
    # Messages were numpy's own, or an array printed over several lines.
    **{
        f"{name}: one line": _case(
            ("mrope", "block", "ort", "positions", 40), _read(5), _wrong(name)
        )
        for name in (
            *("start of another rank", "rewind of another rank", "ragged rows in a row"),
            *(f"{what} of ragged lists" for what in ("mask", "step", "grid")),
        )
    },
}
