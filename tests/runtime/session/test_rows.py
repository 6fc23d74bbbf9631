"""Adding and removing rows, and the history that a session keeps for rewinds."""

from typing import Any

import numpy as np
import pytest

from posenc_export.runtime import Session
from posenc_export.runtime.session.rows import RowHistory
from posenc_export.runtime.session.runner import Runner
from tests.runtime.sequences import CAPACITY, KINDS, LENGTH, excess, full, model, texts, worst_ahead

pytestmark = pytest.mark.xdist_group("rope")  # one worker, which exports for them once


def read(session: Session, kind: str, order: list[int]) -> None:
    """Step every row and check the outputs."""
    at = session.length
    assert excess(session.step(texts()[order, at]), full(kind)[order, at]) <= 1


@pytest.mark.parametrize("kind", KINDS)
def test_rows_come_and_go_in_any_order(kind: str) -> None:
    random = np.random.default_rng(1)
    session, order = model(kind, "ort").session(batch=2, capacity=CAPACITY), []
    for _ in range(60):
        if not order or (len(order) < 5 and random.random() < 0.5):
            more = random.integers(4, size=int(random.integers(1, 3))).tolist()
            parts = [texts()[row, : random.integers(1, 6)] for row in more]
            result = session.admit(parts)
            order += more
            assert all(
                excess(result[index, : len(part)], full(kind)[row, : len(part)]) <= 1
                for index, (row, part) in enumerate(zip(more, parts, strict=True))
            )
        elif random.random() < 0.5 or session.length.max() > LENGTH - 4:
            gone = int(random.integers(len(order)))
            session.retire(gone)
            order[gone] = order[-1]
            order.pop()
        assert session.batch == len(order)
        if order:
            session.rewind(np.minimum(random.integers(3, size=len(order)), session.length - 1))
            read(session, kind, order)


@pytest.mark.parametrize("kind", ["rope", "linear"])
def test_neighbours_that_read_a_token_each_are_read_in_one_call(
    kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    session, order, calls = model(kind, "ort").session(batch=6), [0, 1, 2, 3, 0, 1], []
    session.prefill([texts()[row, : 2 + index] for index, row in enumerate(order)])
    right = Runner.split

    def noted(*arguments: Any) -> Any:
        result = right(*arguments)
        calls.append([(part.rows.start, *part.x.shape) for part in result])
        return result

    monkeypatch.setattr(Runner, "split", noted)
    counts = [1, 1, 0, 1, 3, 1]
    outputs = session.prefill(
        [
            texts()[row, 2 + index : 2 + index + count]
            for index, (row, count) in enumerate(zip(order, counts, strict=True))
        ]
    )
    for index, (row, count) in enumerate(zip(order, counts, strict=True)):
        assert (
            not count
            or excess(outputs[index, :count], full(kind)[row, 2 + index : 2 + index + count]) <= 1
        )
    read(session, kind, order)
    if kind == "rope":
        assert calls[0] == [(0, 2, 1), (3, 1, 1), (4, 1, 3), (5, 1, 1)]


def test_rows_without_tokens_before_and_after_others_are_not_part_of_a_call(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    session, calls = model("rope", "onnx-static").session(), []
    session.prefill(texts()[:4, :3])
    right = Runner.split

    def noted(*arguments: Any) -> Any:
        result = right(*arguments)
        calls.extend((part.rows.start, *part.x.shape) for part in result)
        return result

    monkeypatch.setattr(Runner, "split", noted)
    outputs = session.prefill([[], texts()[1, 3:8], texts()[2, 3:4], []])
    assert excess(outputs[1], full("rope")[1, 3:8]) <= 1
    assert calls == [(1, 2, 5)] and session.length.tolist() == [3, 8, 4, 3]
    assert worst_ahead(session, "rope", [0, 1, 2, 3]) <= 1


def test_an_admitted_row_starts_where_it_is_told() -> None:
    session = model("rope", "ort").session()
    session.prefill(texts()[:1, :5])
    session.admit(texts()[1:3, :4], start=[7, 3])
    assert session.position.tolist() == [5, 11, 7] and session.length.tolist() == [5, 4, 4]
    alone = model("rope", "ort").session()
    alone.prefill(texts()[1:2, :4], start=7)
    assert excess(session.step(texts()[:3, 6])[1:2], alone.step(texts()[1:2, 6])) <= 1


def test_a_fork_and_its_origin_go_on_when_the_others_rows_change() -> None:
    session = model("rope", "ort").session()
    session.prefill(texts()[:3, :6])
    other = session.fork()
    session.retire(0)
    other.admit(texts()[3:, :4])
    assert worst_ahead(session, "rope", [2, 1]) <= 1
    assert worst_ahead(other, "rope", [0, 1, 2, 3]) <= 1


def test_admit_and_retire_refuse_what_makes_no_sense() -> None:
    session = model("rope", "ort").session()
    session.prefill(texts()[:2, :3])
    for call, message in [
        (lambda: model("rope", "ort").session().retire(0), "expected a prefill before a call on a"),
        (lambda: session.retire(2), "expected a row index 0 .. 1, got 2"),
        (lambda: session.retire(-1), "expected a row index 0 .. 1, got -1"),
        (lambda: session.admit([texts()[0, :0]]), "expected at least one token in every new row"),
        (lambda: session.admit(texts()[:1, :3], start=1098), "expected positions 0 .."),
        (lambda: session.admit(texts()[:1, :3] + 100), "expected token ids 0 .."),
    ]:
        with pytest.raises(ValueError, match=message):
            call()
    assert session.batch == 2 and worst_ahead(session, "rope", [0, 1]) <= 1


def test_a_target_whose_rows_share_columns_refuses_rows_that_come_and_go() -> None:
    session = model("rope", "onnx").session()
    session.prefill(texts()[:2, :3])
    for call in (lambda: session.admit(texts()[:1, :3]), lambda: session.retire(0)):
        with pytest.raises(
            ValueError,
            match="whose rows share columns; export target ort, onnx-static or torchscript with "
            "signature positions",
        ):
            call()


@pytest.mark.parametrize("target", ["ort", "torchscript"])
def test_states_that_calls_replace_are_kept_for_a_declared_number_of_tokens(target: str) -> None:
    session = model("linear", target).session(rewind=10)
    session.prefill(texts()[:2, :5])
    for _ in range(30):
        read(session, "linear", [0, 1])
    assert all(len(history.states) <= 3 for history in session._state.histories)
    with pytest.raises(
        ValueError, match="kept for the last 10 tokens, got .*; open the session with rewind=N"
    ):
        session.rewind(35)
    session.rewind([10, 3])
    assert session.length.tolist() == [25, 32]
    read(session, "linear", [0, 1])
    session.rewind([0, 2])
    read(session, "linear", [0, 1])


def test_the_history_of_a_row_reaches_back_as_many_tokens_as_it_declares() -> None:
    history = RowHistory()
    for length in range(0, 40, 2):
        history = history.recorded(8, length, [(np.zeros(1), None)] * 2, lambda: [np.zeros(1)])
        assert min(length + 2, 8) <= length + 2 - history.reach(length + 2) <= 8 + 2
