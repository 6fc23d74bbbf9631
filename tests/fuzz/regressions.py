"""Sequences of calls that have failed before, as plain data: {"spec", "options", "calls"}.
test_sessions replays them.
"""

from typing import Any, Dict

FOUND: Dict[str, Dict[str, Any]] = {
    # Rounding to float16 changes this model more than most; the bound of its calls did not know.
    "a model that rounding changes much": {
        "spec": ["integer", "bidirectional", "onnx", "mask", 40, "float16", "cpu"],
        "options": {"batch": 1, "capacity": None, "rewind": 256},
        "calls": [
            {
                "do": "prefill",
                "on": 0,
                "rows": [[2, -1, 31]],
                "start": None,
                "padding": None,
                "chunk": None,
                "keep": None,
            }
        ],
    },
    # The free slots of the shorter row had positions past the range, with which the encoding read
    # its table.
    "a row at the end of the range beside a longer one": {
        "spec": ["alibi-rounded", "decoder", "ort", "positions", 40],
        "options": {"batch": 1, "capacity": None, "rewind": 256},
        "calls": [
            {
                "do": "admit",
                "on": 0,
                "rows": [[0, -1, 2], [0, -1, 1]],
                "start": [0, 39],
                "padding": None,
                "chunk": None,
                "keep": None,
            }
        ],
    },
    # The slot of a step that might have broken off was filled although a full cache does not have
    # it: IndexError.
    "a fork of a cache that steps have filled to its end": {
        "spec": ["rope", "decoder", "ort", "mask", 40],
        "options": {"batch": 1, "capacity": None, "rewind": 256},
        "calls": [
            {
                "do": "prefill",
                "on": 0,
                "rows": [[0, -1, 21]],
                "start": None,
                "padding": None,
                "chunk": None,
            },
            {"do": "step", "on": 0, "times": 19, "texts": [0], "copy": False},
            {"do": "fork", "on": 0},
            {"do": "rewind", "on": 0, "n": 3},
            {"do": "step", "on": 0, "times": 2, "texts": [1], "copy": True},
        ],
    },
    # A query that sees nothing gave NaN, which stayed in the slot of the padding: the mask hides
    # it, but 0 times NaN is NaN.
    "a row without tokens beside one token, then a step": {
        "spec": ["rope", "decoder", "ort", "mask", 40],
        "options": {"batch": 1, "capacity": None, "rewind": 256},
        "calls": [
            {
                "do": "prefill",
                "on": 0,
                "rows": [[0, -1, 0], [0, -1, 1]],
                "start": None,
                "padding": None,
                "chunk": None,
            },
            {"do": "step", "on": 0, "times": 1, "texts": [0], "copy": False},
        ],
    },
    # Its own last call was forgotten before start was looked at.
    "a refused start leaves a bidirectional model's lengths": {
        "spec": ["rope", "bidirectional", "ort", "positions", 40],
        "options": {"batch": 1, "capacity": None, "rewind": 256},
        "calls": [
            {
                "do": "prefill",
                "on": 0,
                "rows": [[0, -1, 5]],
                "start": None,
                "padding": None,
                "chunk": None,
            },
            {"do": "wrong", "on": 0, "name": "start past the range"},
        ],
    },
    # Rows that share columns need more of them than there are positions: the rotation of cached
    # keys stopped at the end of its table.
    "more columns than positions, keys turned when they are read": {
        "spec": ["rope_longrope-short", "decoder", "ort", "mask", 40],
        "options": {"batch": 1, "capacity": None, "rewind": 256},
        "calls": [
            {
                "do": "prefill",
                "on": 0,
                "rows": [[0, -1, count] for count in counts],
                "start": None,
                "padding": None,
                "chunk": None,
            }
            for counts in ((0, 0, 31, 0), (0, 0, 0, 2), (0, 0, 0, 8))
        ],
    },
    # Counted from where the row stood, not from the furthest it had read.
    "a rewind behind a rewind that used up what is kept": {
        "spec": ["nope", "linear", "onnx", "positions", 40],
        "options": {"batch": 1, "capacity": None, "rewind": 20},
        "calls": [
            {
                "do": "prefill",
                "on": 0,
                "rows": [[0, -1, 1]],
                "start": None,
                "padding": None,
                "chunk": None,
            },
            {
                "do": "prefill",
                "on": 0,
                "rows": [[0, -1, 6]],
                "start": None,
                "padding": None,
                "chunk": 2,
            },
            {"do": "step", "on": 0, "times": 15, "texts": [0], "copy": False},
            {"do": "rewind", "on": 0, "n": 21},
            {"do": "rewind", "on": 0, "n": 1},
        ],
    },
    # The mask had as many columns as tokens of the call, since these models cache no keys.
    "a step of a model without cached keys, with a mask": {
        "spec": ["rope", "linear", "onnx", "mask", 40],
        "options": {"batch": 1, "capacity": None, "rewind": 256},
        "calls": [
            {
                "do": "prefill",
                "on": 0,
                "rows": [[0, -1, 3]],
                "start": None,
                "padding": None,
                "chunk": None,
            },
            {"do": "step", "on": 0, "times": 1, "texts": [0], "copy": True},
        ],
    },
    # Messages were numpy's own, or an array printed over several lines.
    **{
        f"{name}: one line": {
            "spec": ["mrope", "block", "ort", "positions", 40],
            "options": {"batch": 1, "capacity": None, "rewind": 256},
            "calls": [
                {
                    "do": "prefill",
                    "on": 0,
                    "rows": [[0, -1, 5]],
                    "start": None,
                    "padding": None,
                    "chunk": None,
                },
                {"do": "wrong", "on": 0, "name": name},
            ],
        }
        for name in (
            "start of another rank",
            "rewind of another rank",
            "ragged rows in a row",
            "mask of ragged lists",
            "step of ragged lists",
            "grid of ragged lists",
        )
    },
}
