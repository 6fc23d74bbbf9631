"""Random calls on a few artefacts, the same in each run; replays of earlier findings; and
planted faults of sessions, which must be found. More: `make fuzz`.
"""

import warnings
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, Phase, settings
from hypothesis.stateful import run_state_machine_as_test

from posenc_export.runtime.graphs import kernel_library
from posenc_export.runtime.session.caches import Caches
from posenc_export.runtime.session.prefixes import Prefix
from posenc_export.runtime.session.rows import Rows
from posenc_export.runtime.session.session import Session
from tests.fuzz.driver import replay
from tests.fuzz.machine import machine_of
from tests.fuzz.regressions import FOUND
from tests.fuzz.subjects import Spec, Subject, subject
from tests.fuzz.wrong import WRONG, WRONG_ACTIVATIONS, WRONG_IDS
from tests.reading.own_modules import READING

PHASES = (Phase.generate, Phase.shrink)
FAST = settings(
    derandomize=True, max_examples=4, stateful_step_count=20, deadline=None, database=None,
    suppress_health_check=list(HealthCheck), phases=PHASES,
)  # fmt: skip
EVERYWHERE = ("onnx", "onnx-static", "ort", "torchscript")
SPECS = [  # blocks if one layer is enough for the test, since tracing takes most of the time
    *(Spec("rope", "decoder", target) for target in EVERYWHERE),
    *(Spec("rope", "decoder", target, "mask") for target in (*EVERYWHERE, "pt2")),
    *(Spec("rope", "linear", target) for target in EVERYWHERE),
    *(Spec("input_rnn", "decoder", target) for target in EVERYWHERE),
    *(Spec("fox", "block", target) for target in ("onnx-static", "ort")),
    *(Spec("mrope", "block", target) for target in ("onnx", "ort", "torchscript")),
    *(Spec("alibi", "block", target, size=600) for target in ("onnx", "onnx-static", "ort")),
    *(Spec("rope", "windows", target, "positions", 600) for target in ("onnx-static", "ort")),
    *(Spec("rope_longrope-short", "block", target) for target in ("ort", "torchscript")),
    Spec("rope_longrope-short", "block", "onnx-static", "mask"),
    Spec("rope_dynamic-short", "block", "ort-native"),
    *(Spec("conditional_conv", "block", target) for target in ("onnx", "ort")),
    *(Spec("cope", "block", target) for target in ("onnx-static", "torchscript")),
    *(Spec(READING, "own", target) for target in ("onnx-static", "ort", "torchscript")),
    Spec("rope", "bidirectional", "ort"),
    Spec("learned", "encoder", "torchscript"),
]
# Every format, experts, cross-attention and own modules.
FORMATTED = [
    Spec("rope", "block", "ort", form="int8"),
    Spec("rope", "block", "ort", form="cache-int8"),
    Spec("rope", "block", "ort-native", form="cache-float16"),
    Spec("rope", "block", "onnx-static", form="float16"),
    Spec("experts", "own", "ort", form="int4"),
    Spec("a window", "own", "ort", "mask"),
    Spec(READING, "own", "ort", form="int4-128"),
]


def made(spec: Spec) -> Subject:
    if spec.target == "ort-native" and kernel_library.path() is None:
        pytest.skip("the library of packages/kernels is not built")
    torch.set_num_threads(1)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        return subject(spec)


# Specs that `make test` leaves out, since others there have similar caches.
THOROUGH = (
    *(Spec("rope", "linear", target) for target in ("onnx", "onnx-static", "ort")),
    *(Spec("input_rnn", "decoder", target) for target in ("onnx", "onnx-static", "ort")),
    *(Spec("rope", "decoder", t, "mask") for t in ("onnx", "onnx-static", "torchscript", "pt2")),
    *(Spec("mrope", "block", target) for target in ("onnx", "torchscript")),
    Spec("conditional_conv", "block", "onnx"),
    Spec("cope", "block", "onnx-static"),
    *(Spec(READING, "own", target) for target in ("onnx-static", "torchscript")),
    Spec("fox", "block", "onnx-static"),
    Spec("rope_longrope-short", "block", "torchscript"),
    Spec("rope_longrope-short", "block", "onnx-static", "mask"),
    Spec("rope", "bidirectional", "ort"),
    *(Spec("alibi", "block", target, "positions", 600) for target in ("onnx", "onnx-static")),
    Spec("rope", "windows", "ort", "positions", 600),
    *(spec for spec in FORMATTED if spec.form not in ("int8", "float32") or spec.kind != "block"),
)


def grouped(specs: list[Spec]) -> list[Any]:
    """Return parameters that run all specs of a module in one process, which traces it once."""
    made = []
    for spec in specs:
        marks = [pytest.mark.xdist_group(f"{spec.variant} {spec.kind}")]
        marks += [pytest.mark.exhaustive] if spec in THOROUGH else []
        made.append(pytest.param(spec, id=str(spec), marks=marks))
    return made


@pytest.mark.parametrize("spec", grouped([*SPECS, *FORMATTED]))
def test_random_calls_give_what_each_row_alone_would_give(spec: Spec) -> None:
    machine = machine_of(made(spec))
    try:
        run_state_machine_as_test(machine, settings=FAST)  # type: ignore[no-untyped-call]
    except Exception as error:
        error.add_note(f"to be kept in tests/fuzz/regressions.py: {machine.record}")
        raise
    assert machine.total["calls"] > 50


GROUPS = {name: " ".join(case["spec"][:2]) for name, case in FOUND.items()}


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.xdist_group(GROUPS[name])) for name in FOUND]
)
def test_what_was_found_once_stays_mended(name: str) -> None:
    result = FOUND[name]
    replay(made(Spec(*result["spec"])), result["options"], result["calls"])


FILLED: dict[str, Any] = {
    "do": "prefill", "on": 0, "rows": [[0, -1, 5], [1, -1, 3]],
    "start": None, "padding": None, "chunk": None,
}  # fmt: skip
REFUSING = [
    Spec("rope", "decoder", "ort"),
    Spec("alibi", "block", "onnx", size=600),
    Spec("mrope", "block", "ort"),
    Spec("learned", "encoder", "torchscript"),
]
OPTIONS = {"batch": 1, "capacity": None, "rewind": 256}


@pytest.mark.parametrize("calls", [[], [FILLED]], ids=["empty", "filled"])
@pytest.mark.parametrize("spec", grouped(REFUSING))
def test_wrong_calls_are_refused_in_one_line_and_change_nothing(
    spec: Spec, calls: list[Any]
) -> None:
    names = [*WRONG, *(WRONG_IDS if made(spec).vocabulary else WRONG_ACTIVATIONS)]
    assert len(names) > 90
    for name in names:
        replay(made(spec), OPTIONS, [*calls, {"do": "wrong", "on": 0, "name": name}])


COPY = Caches.copy


def _forgets_starts(self: Rows, slots: int, right: Any = Rows.begin) -> Any:
    self.first_position -= self.first_position > 5
    return right(self, slots)


def _moves_too_little(
    self: Caches, to: Any, source: Any, at: Any, tokens: int, kept: Any = (0, 0)
) -> None:
    COPY(self, to, source, at, max(tokens - 1, 0), kept)


def _swallows(self: Session, n: Any, right: Any = Session.rewind) -> None:
    right(self, n if np.ndim(n) else min(n, 2))


FAULTS: dict[str, Any] = {
    "a start off by one": (Rows, "begin", _forgets_starts),
    "a moved row short of a token": (Caches, "copy", _moves_too_little),
    "a rewind cut short": (Session, "rewind", _swallows),
    "a row that stays": (Rows, "without", lambda self, row: self),
    "a prefix that is lost": (Prefix, "write", lambda self, rows, row: rows),
}


@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.xdist_group("rope decoder")
def test_a_planted_fault_of_a_session_is_found_by_random_calls(
    fault: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    machine: Any = machine_of(made(Spec("rope", "decoder", "ort")))
    monkeypatch.setattr(*FAULTS[fault])
    long = settings(FAST, max_examples=300, phases=(Phase.generate,))
    with pytest.raises((AssertionError, ValueError)):
        run_state_machine_as_test(machine, settings=long)


def test_a_difference_that_rounding_would_hide_is_found_by_the_full_pass_of_the_artefact(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    driven, step = made(Spec("rope", "block", "ort", form="int8")), Session.step
    wrong = lambda self, x, copy=True: step(self, x, copy) * np.float32(1.05)  # noqa: E731
    monkeypatch.setattr(Session, "step", wrong)
    once = {"do": "step", "on": 0, "times": 1, "texts": [0], "copy": True}
    with pytest.raises(AssertionError, match="against its own full pass"):
        replay(driven, OPTIONS, [FILLED, once])
