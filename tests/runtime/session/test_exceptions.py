"""After an exception at any point, a session continues from the tokens that `length` gives;
`reset` restores it.
"""

import linecache
import signal
import sys
from types import FrameType
from typing import Any, Callable, Iterator

import numpy as np
import pytest

from posenc_export.runtime import GraphError, Session
from posenc_export.runtime.graphs.ort_graph import OrtGraph
from tests.runtime.sequences import CAPACITY, KINDS, excess, full, model, texts, worst_ahead

TARGETS = ["onnx", "onnx-static", "ort", "torchscript"]
LENGTHS = [9, 4, 7]  # tokens of each row before the interrupted call
POINTS = 16  # number of lines of the runtime at which a call is interrupted


class Stop(BaseException):
    """An interrupt, which is not an Exception, as KeyboardInterrupt."""


def run_to(call: Callable[[], Any], at: int) -> int:
    """Run a call until the at-th line of the runtime, or to its end. Return the number of lines
    that it passed.

    Lines that use the session's guard are not counted: an interrupt can occur only after a
    function call, and these lines are written for that.
    """
    passed = 0

    def line(frame: FrameType, event: str, argument: Any) -> Any:
        nonlocal passed
        if event == "line" and "guard." not in linecache.getline(
            frame.f_code.co_filename, frame.f_lineno
        ):
            passed += 1
            if passed == at:
                raise Stop
        return line

    def enter(frame: FrameType, event: str, argument: Any) -> Any:
        code = frame.f_code  # `alone` is the decorator `exclusive`
        traced = "posenc_export/runtime" in code.co_filename and code.co_name != "alone"
        return line if traced else None

    before = sys.gettrace()
    sys.settrace(enter)
    try:
        call()
    except Stop:
        pass
    finally:
        sys.settrace(before)
    return passed


def broken_off(base: Session, call: str, points: int) -> Iterator[tuple[Session, int]]:
    """Yield sessions in which the call was interrupted, at about `points` lines spread over the
    call, and the number of the line.
    """

    def ready() -> Session:
        session = base.fork()
        if call == "rewind of steps":  # needs a bound step, which a fork does not have
            session.step(texts()[range(3), session.length])
        return session

    counted = ready()
    count = run_to(lambda: CALLS[call](counted), 0)
    for at in range(1, count + 1, max(1, count // points)):
        session = ready()
        assert run_to(lambda here=session: CALLS[call](here), at) == at  # type: ignore[misc]
        yield session, at


CALLS: dict[str, Callable[[Session], Any]] = {
    "prefill": lambda s: s.prefill(
        [row[a : a + 5] for row, a in zip(texts(), LENGTHS, strict=False)], chunk=2
    ),
    "step": lambda s: s.step(texts()[range(3), s.length]),
    "rewind": lambda s: s.rewind([3, 0, 2]),
    "rewind of steps": lambda s: s.rewind(1),
    "fork": lambda s: s.fork(),
    "admit": lambda s: s.admit(texts()[3:, :5], chunk=2),
    "retire": lambda s: s.retire(0),
}


def begun(kind: str, target: str, signature: str) -> Session:
    session = model(kind, target, signature).session(capacity=CAPACITY)
    session.prefill([row[:n] for row, n in zip(texts(), LENGTHS, strict=False)])
    session.step(texts()[range(3), LENGTHS])
    session.rewind(1)
    return session


def order_of(session: Session, call: str) -> list[int]:
    """Return the index of the sequence of each row after a call, which may have been completed
    or not.
    """
    return [2, 1] if call == "retire" and session.batch == 2 else list(range(session.batch))


CASES = [(kind, target, "positions") for kind in KINDS for target in TARGETS] + [
    ("rope", "ort", "mask"),
    ("fox", "onnx-static", "mask"),
]
QUICK = (  # cases of `make test`; `onnx-static` has the buffers of `ort`
    *(("fox", target, "positions") for target in ("onnx", "ort")),
    ("rope", "torchscript", "positions"),
    ("rope", "ort", "mask"),
)
EACH = [
    pytest.param(
        *case,
        marks=[
            pytest.mark.xdist_group("rope"),
            *([] if case in QUICK else [pytest.mark.exhaustive]),
        ],
    )
    for case in CASES
]


@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize(("kind", "target", "signature"), EACH)
def test_a_call_broken_off_anywhere_leaves_a_session_that_goes_on_rightly(
    kind: str, target: str, signature: str, call: str
) -> None:
    base = begun(kind, target, signature)
    if call in ("admit", "retire") and base.manifest.layout == "columns":
        with pytest.raises(
            ValueError, match=f"expected rows with cache slots of their own for {call}"
        ):
            CALLS[call](base)
        return
    for session, at in broken_off(base, call, POINTS):
        if call == "step":  # by a step, before a call that takes another way
            session.step(texts()[range(3), session.length])
            session.rewind(1)
        assert worst_ahead(session, kind, order_of(session, call)) <= 1, f"broken off at line {at}"


@pytest.mark.parametrize("call", ["prefill", "step", "rewind"])
@pytest.mark.parametrize(("kind", "target", "signature"), EACH)
def test_reset_heals_whatever_was_broken_off(
    kind: str, target: str, signature: str, call: str
) -> None:
    base = begun(kind, target, signature)
    for session, _ in broken_off(base, call, 8):
        session.reset()
        assert session.batch == 0
        assert excess(session.prefill(texts()[:3, :6]), full(kind)[:3, :6]) <= 1


@pytest.mark.xdist_group("rope")
@pytest.mark.parametrize("target", TARGETS)
def test_a_signal_that_raises_leaves_a_session_that_goes_on_rightly(
    target: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Python drops an exception of a signal handler while an object is being freed, or in
    # hypothesis' callback at garbage collection.
    monkeypatch.setattr(sys, "unraisablehook", lambda dropped: None)
    armed = [False]

    def stop(number: int, frame: Any) -> None:
        if armed[0]:
            raise Stop

    random = np.random.default_rng(0)
    session, before = begun("rope", target, "positions"), signal.signal(signal.SIGALRM, stop)
    try:
        for _ in range(40):
            try:
                armed[0] = True
                # Repeat the signal, since an exception may be dropped.
                signal.setitimer(signal.ITIMER_REAL, float(random.uniform(1e-5, 2e-3)), 2e-3)
                while True:
                    if int(session.length.max()) > 25:
                        session.rewind(session.length - LENGTHS)
                    session.prefill(
                        [row[a : a + 2] for row, a in zip(texts(), session.length, strict=False)]
                    )
                    session.step(texts()[range(3), session.length])
            except Stop:
                armed[0] = False
            signal.setitimer(signal.ITIMER_REAL, 0)
            assert worst_ahead(session, "rope", range(3)) <= 1
            session.rewind(session.length - LENGTHS)
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


@pytest.mark.xdist_group("rope")
@pytest.mark.parametrize("target", TARGETS)
def test_a_graph_that_stops_is_one_line_and_the_session_goes_on(
    target: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    session = begun("rope", target, "positions")
    # Ids are not checked, so that the graph reads one outside its table.
    monkeypatch.setattr(type(session.manifest), "vocabulary", 0)
    with pytest.raises(GraphError, match="expected the graph to run, got .*") as stopped:
        session.prefill([[900]] * 3)
    assert "\n" not in str(stopped.value)
    assert worst_ahead(session, "rope", range(3)) <= 1


@pytest.mark.xdist_group("rope")
def test_the_states_of_emptied_rows_survive_a_prefill_that_fails(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    session, bind = model("linear", "ort").session(), OrtGraph.bind
    session.prefill(texts()[:2, :5])
    session.rewind(5)

    def fails(self: OrtGraph, *arguments: Any, **named: Any) -> Any:
        bind(self, *arguments, **named)()
        raise RuntimeError("stopped")

    monkeypatch.setattr(OrtGraph, "bind", fails)
    with pytest.raises(GraphError):
        session.prefill(texts()[2:4, :6])
    monkeypatch.undo()
    assert excess(session.step(texts()[:2, 0]), full("linear")[:2, 0]) <= 1
