"""Caches of windows, which keep the last tokens of a row only: on both sides of every length at
which they give tokens up, outputs are those of the eager module, and a call that would read other
tokens is refused.
"""

import functools
from typing import Any

import msgspec
import numpy as np
import pytest
from msgspec.structs import replace

from posenc_export.export.expected import eager_session
from posenc_export.models.config import StackConfig
from posenc_export.runtime import Model, Session, load
from posenc_export.runtime.session.buffers import Buffer
from posenc_export.runtime.session.caches import WINDOW_ROOM as NEW
from posenc_export.runtime.session.caches import Window
from posenc_export.runtime.session.prefixes import Prefixes
from posenc_export.shared.numerics import tolerance, worst_error
from tests import traces
from tests.cases import choice
from tests.runtime.session.test_exceptions import run_to
from tests.tiny import decoder

pytestmark = pytest.mark.xdist_group("windows")  # one worker, which exports for them once
WINDOW, RANGE, REWIND, ROWS = 24, 1024, 8, 3
SLOTS = WINDOW - 1 + REWIND + NEW
# Lengths after which a call gives tokens up for the first and the second time, if it can.
FULL = (SLOTS, SLOTS + NEW)
EDGES = sorted({edge + near for edge in (WINDOW, *FULL) for near in (-1, 0, 1)})
LENGTH = FULL[1] + 40
KINDS: dict[str, dict[str, Any]] = {
    "rope": {},
    "rope_dynamic": {},  # rotates before the node
    "rope-sinks": {"sinks": True},
    "rope-native": {},
    "alibi-native": {},  # a bias by distance
    "rope_dynamic-native": {},  # turns keys by distance
    "rope-static": {},
    **{name: {} for name in ("rope-chunk", "rope-chunk-native", "xpos-chunk-static")},
}
COPIED = ("rope", "rope-static")  # without and with slots that are read behind the tokens of a row


def config(kind: str) -> StackConfig:
    variant, overrides = kind.partition("-")[0], KINDS[kind]
    whole = decoder(variant)
    layer = whole.kinds[0]
    layer = replace(layer, attention=replace(layer.attention, **overrides))
    sees = {"name": "chunk" if "chunk" in kind else "window", "size": WINDOW}
    near = replace(layer, attention=replace(layer.attention, sees=sees))
    kinds = {"near": near, "all": layer}
    return replace(whole, layers=kinds, order=("near", "all"), max_positions=RANGE)


@functools.cache
def model(kind: str) -> Model:
    ends = {"native": "ort-native", "static": "onnx-static"}
    target = ends.get(kind.rpartition("-")[2], "ort")
    return load(traces.artefact(config(kind), target), provider="cpu", threads=1)


@functools.cache
def texts() -> np.ndarray:
    """Return token sequences [ROWS,LENGTH], which repeat themselves."""
    return np.tile(np.random.default_rng(0).integers(61, size=(ROWS, 50)), LENGTH // 50 + 1)[
        :, :LENGTH
    ]


@functools.cache
def full(kind: str) -> np.ndarray:
    """Return the outputs of the eager module over `texts` [ROWS,LENGTH,V]."""
    session = eager_session(traces.sources(config(kind)).model)
    return session.prefill(texts(), chunk=LENGTH)


def excess(outputs: np.ndarray, row: Any, first: int, kind: str = "rope") -> float:
    """Return the worst error of outputs [S,V] of a row, relative to the tolerance."""
    expected = full(kind)[row, first : first + len(outputs)]
    return worst_error(outputs, expected) / tolerance("float32", 2, 48)


def opened(kind: str = "rope", rewind: int = REWIND, **options: Any) -> Session:
    return model(kind).session(rewind=rewind, **options)


def at(length: int, kind: str = "rope", rewind: int = REWIND) -> Session:
    """Return a session whose row has read this many tokens of the first text."""
    session = opened(kind, rewind)
    session.prefill(texts()[:1, :length])
    return session


def start(session: Session) -> list[int]:
    """Return the first token that caches of windows hold of each row."""
    starts: list[int] = session._state.first_kept.tolist()
    return starts


def goes_on(session: Session, length: int, kind: str = "rope") -> bool:
    """Whether a step and a call of 3 tokens behind `length` of the first text are right."""
    step = session.step(texts()[:1, length])
    calls = session.prefill(texts()[:1, length + 1 : length + 4])[0]
    return max(excess(step, 0, length, kind), excess(calls, 0, length + 1, kind)) <= 1


@pytest.mark.parametrize("kind", ["rope", "alibi-native", "rope-chunk-native", "xpos-chunk-static"])
def test_only_layers_with_a_window_have_shorter_caches(kind: str) -> None:
    caches = at(LENGTH, kind)._state.caches
    states = [(memory.state, memory.buffers[0]) for memory in caches.states]
    layers = {state.past.split(".")[1]: state.window for state, _ in states if state.axis == 2}
    assert layers == {"0": WINDOW, "1": 0}
    assert model(kind).manifest.input("window_start") is not None
    sizes, whole = [past.shape[2] for state, past in states if state.axis == 2], caches.extent
    assert whole >= LENGTH and sizes == [SLOTS, SLOTS, whole, whole]


def test_a_short_range_needs_no_shorter_caches() -> None:
    short = replace(config("rope"), max_positions=WINDOW + 2 * NEW)
    manifest = load(traces.artefact(short, "ort"), threads=1).manifest
    assert manifest.input("window_start") is None
    assert not any("window" in state for state in manifest.to_json()["states"])


CHUNKS = [*((chunk, kind) for kind in KINDS for chunk in (NEW, LENGTH)), (7, "rope")]


@pytest.mark.parametrize(("chunk", "kind"), choice(CHUNKS, [*CHUNKS[::2], (LENGTH, "rope")]))
def test_a_prompt_in_chunks_gives_the_outputs_of_one_pass(kind: str, chunk: int) -> None:
    outputs = opened(kind).prefill(texts(), chunk=chunk)
    assert max(excess(outputs[row], row, 0, kind) for row in range(ROWS)) <= 1


AT = [(length, kind) for kind in KINDS for length in EDGES]


# Every edge where slots are copied, and for each other kind the tokens around one.
@pytest.mark.parametrize(
    ("length", "kind"), choice(AT, [at for at in AT if at[1] in COPIED or at[0] in EDGES[3:6]])
)
def test_steps_and_calls_around_an_edge_are_right(kind: str, length: int) -> None:
    assert goes_on(at(length, kind), length, kind)


def test_steps_give_tokens_up_when_the_caches_are_full_and_keep_those_to_rewind() -> None:
    session, starts, worst = at(FULL[0] - 3), [], 0.0
    for length in range(FULL[0] - 3, FULL[1] + 3):
        worst = max(worst, excess(session.step(texts()[:1, length]), 0, length))
        starts += start(session)
    kept = WINDOW - 1 + REWIND
    assert worst <= 1
    assert starts == [0] * 3 + [FULL[0] - kept] * NEW + [FULL[1] - kept] * 3


@pytest.mark.parametrize("kind", ["rope", "rope-native", "alibi-native", "rope-static"])
def test_rows_of_different_lengths_give_tokens_up_one_by_one(kind: str) -> None:
    session, lengths = opened(kind), np.array([FULL[0] + 30, 5, FULL[0] - 20])
    session.prefill([texts()[row, :length] for row, length in enumerate(lengths)])
    padded = kind.endswith("static")  # a row keeps room for its padding
    assert start(session)[1] == 0 and start(session)[0] > 0
    assert (start(session)[2] > 0) == padded
    for _ in range(30):
        outputs = session.step(texts()[range(ROWS), lengths])
        errors = [excess(outputs[row : row + 1], row, lengths[row], kind) for row in range(ROWS)]
        assert max(errors) <= 1
        lengths += 1
    assert start(session)[1] == 0 and start(session)[2] > 0


@pytest.mark.parametrize("kind", COPIED)
def test_rows_come_and_go(kind: str) -> None:
    session = opened(kind)
    session.admit([texts()[0, : FULL[0] + 5], texts()[1, :9], texts()[2, : FULL[1] + 5]])
    session.retire(0)  # the last row takes its place
    session.admit([texts()[0, :40]])
    order, lengths = [2, 1, 0], session.length
    assert lengths.tolist() == [FULL[1] + 5, 9, 40]
    outputs = session.step(texts()[order, lengths])
    assert max(excess(outputs[n : n + 1], order[n], lengths[n]) for n in range(ROWS)) <= 1
    assert start(session) == [start(session)[0], 0, 0] and start(session)[0] > NEW


@pytest.mark.parametrize("kind", COPIED)
@pytest.mark.parametrize("length", EDGES)
def test_as_many_tokens_as_the_session_keeps_can_be_taken_back(length: int, kind: str) -> None:
    for back in (1, REWIND - 1, REWIND):
        for way in ("step", "call"):
            session = at(length - 1, kind) if way == "step" else at(length - 5, kind)
            if way == "step":
                session.step(texts()[:1, length - 1])
            else:
                session.prefill(texts()[:1, length - 5 : length])
            session.rewind(back)
            assert goes_on(session, length - back, kind)


@pytest.mark.parametrize("kind", COPIED)
def test_a_rewind_to_given_up_tokens_is_refused_by_name_and_changes_nothing(kind: str) -> None:
    length = FULL[0] + 1
    session = at(length - 1, kind)
    session.step(texts()[:1, length - 1])
    least = start(session)[0] + WINDOW - 1
    with pytest.raises(ValueError, match=f"at least .{least}., since keys of windows are kept"):
        session.rewind(length - least + 1)
    assert goes_on(session, length)
    session.rewind(session.length[0] - least)
    assert goes_on(session, least)
    session.rewind(session.length[0])  # no tokens are left, and none are missing
    assert goes_on(session, 0)


def test_a_session_with_a_larger_rewind_goes_further_back() -> None:
    session = at(LENGTH - 4, rewind=300)
    session.rewind(290)
    assert goes_on(session, LENGTH - 294)


def test_speculation_gives_the_tokens_of_plain_decoding_across_edges() -> None:
    full = FULL[0] - REWIND + 256
    prompt = texts()[:1, : full - 30]
    plain, drafted = (
        [ids.tolist() for ids in opened(rewind=256).generate(prompt, 320, speculate=speculate)]
        for speculate in (None, "lookup")
    )
    assert plain == drafted


@pytest.mark.parametrize("kind", COPIED)
def test_a_row_begins_with_a_prefix_that_was_shared_before_or_while_tokens_were_given_up(
    kind: str,
) -> None:
    length, prefixes, session = FULL[0] + 100, Prefixes(model(kind).graph, 64), opened(kind)
    for first in range(0, length, 64):
        session.prefill(texts()[:1, first : min(first + 64, length)])
        session.share(0, texts()[0, : session.length[0]].tolist(), prefixes)
    for end in (60, FULL[0] + 70):
        prefix = prefixes.find(texts()[0, :end].tolist())
        assert prefix.length == (end - 1) // 32 * 32
        begun = opened(kind)
        begun.admit([texts()[1, :7]])
        outputs = begun.admit([texts()[0, prefix.length : end]], prefix=prefix)[0]
        assert excess(outputs, 0, prefix.length) <= 1
        step = begun.step(np.array([texts()[1, 7], texts()[0, end]]))
        assert max(excess(step[:1], 1, 7), excess(step[1:], 0, end)) <= 1


def test_given_up_tokens_are_not_shared() -> None:
    prefixes, session = Prefixes(model("rope").graph, 64), at(FULL[1])
    session.share(0, texts()[0, : FULL[1]].tolist(), prefixes)
    assert not prefixes.used


def test_a_fork_and_its_source_give_tokens_up_alone() -> None:
    session = at(FULL[0] - 1)
    fork = session.fork()
    for length in range(FULL[0] - 1, FULL[0] + 3):
        fork.step(texts()[:1, length])
    assert start(fork)[0] > 0 and start(session) == [0]
    assert goes_on(session, FULL[0] - 1) and goes_on(fork, FULL[0] + 3)


def test_slots_behind_the_tokens_of_a_row_are_empty_when_the_next_call_reads_them() -> None:
    session = opened("rope-static")
    session.admit([texts()[0, : FULL[0] - 7]])
    session.admit([texts()[1, : FULL[0] + 30]])
    session.retire(0)  # its slots are more than those of the row that takes its place
    _check_empty(session)
    session.admit([texts()[0, :250], texts()[2, :270]])
    session.rewind([7, 3, 2])
    _check_empty(session)
    for column in range(60):
        session.step(texts()[:, column])
    session.rewind(1)
    _check_empty(session)


def _check_empty(session: Session) -> None:
    caches = session._settled().caches
    for row, length in enumerate(session.length):
        for state, buffer in ((memory.state, memory.buffers[0]) for memory in caches.states):
            first = start(session)[row] if state.window else 0
            behind = (row, *[slice(None)] * (state.axis - 1), slice(length - first, None))
            assert (buffer.array[behind] == state.fill).all(), (row, state.past)


@pytest.mark.parametrize("kind", COPIED)
@pytest.mark.parametrize("way", ["step", "call"])
def test_a_session_goes_on_after_an_interrupt_at_any_point_of_a_move(way: str, kind: str) -> None:
    length, whole = FULL[0], at(FULL[0], kind)
    count = 1 if way == "step" else 9
    new = texts()[:1, length : length + count]
    total = run_to(functools.partial(whole.fork().prefill, new), -1)
    for point in range(1, total, max(total // 40, 1)):
        session = whole.fork()
        run_to(functools.partial(session.prefill, new), point)
        assert session.length[0] in (length, length + count)
        assert goes_on(session, int(session.length[0]))


def test_memory_follows_the_window_and_is_known_before() -> None:
    session = opened(rewind=256)
    known = session.memory_of(1, RANGE)
    session.prefill(texts()[:1])
    window = session._state.caches.window
    per_slot = 2 * 3 * 16 * 4  # keys and values of three heads in float32
    assert session.memory == per_slot * (int(session.length[0]) + window.slots)
    assert session.memory <= known <= 2 * session.memory


def test_another_provider_keeps_all_tokens() -> None:
    manifest = msgspec.structs.replace(model("rope").manifest)
    assert Window.of(manifest, "cuda", REWIND) == Window()
    assert Window.of(manifest, "cpu", REWIND).slots == SLOTS


@pytest.mark.parametrize("shift", [-1, 1])
def test_a_move_by_a_slot_too_many_or_few_changes_outputs(
    shift: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    right = Buffer.part

    def off(self: Buffer, row: int, slots: Any) -> Any:
        if isinstance(slots, slice) and slots.start and slots.stop:
            slots = slice(slots.start + shift, slots.stop + shift)
        return right(self, row, slots)

    monkeypatch.setattr(Buffer, "part", off)
    assert not goes_on(at(FULL[0] + 20), FULL[0] + 20)
