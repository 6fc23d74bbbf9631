"""Rows are admitted by the memory that they may need."""

import threading
from collections import deque
from pathlib import Path

import numpy as np
import pytest

from posenc_export.runtime.session.caches import INITIAL_SLOTS
from posenc_export.runtime.session.model import Model
from posenc_export.serve.batch import Batch
from posenc_export.serve.memory import available_memory, longest_row, most_needed, rows_memory
from posenc_export.serve.requests import Limits, Request
from tests.serve.models import alone, artefact, opened, prompts
from tests.serve.test_engine import Gathered

pytestmark = pytest.mark.xdist_group("serve")
TEXT = (97, 98, 99)


@pytest.fixture(scope="module")
def model() -> Model:
    return opened(artefact("ort"))


def limits(model: Model, rows: int, tokens: int) -> Limits:
    """Return limits with just the memory for that many rows."""
    memory = most_needed(model.session(batch=8), rows, tokens, 16)
    return Limits(rows=8, context=300, chunk=16, memory=memory)


def test_the_memory_of_a_session_is_that_of_its_tokens(model: Model) -> None:
    session, slot = model.session(), model.manifest.slot_bytes
    assert session.memory == 0
    session.admit([list(TEXT)])
    assert session.memory == 3 * slot
    session.admit([list(TEXT)] * 2)
    assert session.memory == 9 * slot <= session.memory_of(4, 3) == 4 * (3 + INITIAL_SLOTS) * slot
    session.prefill([[], [97] * 300, []])
    assert session.memory == 309 * slot
    for _ in range(3):
        session.retire(0)
    assert session.memory == 0


def test_caches_that_are_not_lazy_have_memory_for_all_rows_and_the_longest_of_them() -> None:
    model = opened(artefact("onnx-static"))
    session, slot = model.session(), model.manifest.slot_bytes
    bucket = model.manifest.capacity_bucket
    session.admit([list(TEXT)])
    assert session.memory == slot * bucket == session.memory_of(1, 3)
    assert session.memory_of(2, 3) == 3 * slot * bucket  # while rows are moved
    session.admit([list(TEXT)] * 2)
    assert session.memory == 4 * slot * bucket == session.memory_of(4, bucket)


def test_a_row_that_grows_is_not_moved_and_its_memory_can_be_given_back(model: Model) -> None:
    session, text = model.session(batch=2), [97] * 600
    session.admit([list(TEXT)])
    places = [buffer.address for buffer in session._state.caches.buffers]
    session.admit([text])
    session.step(np.array([97, 97]))
    assert [buffer.address for buffer in session._state.caches.buffers] == places
    session.retire(0)
    content = session._state.caches.buffers[0].array
    assert content[1, :, 300].any() and session.memory >= 2 * 600 * model.manifest.slot_bytes
    session.trim()
    assert session.memory == 601 * model.manifest.slot_bytes
    assert not content[1, :, 300].any()
    whole = model.session().prefill([[*text, 97, 98]])[0, -1]
    assert np.allclose(session.step(np.array([98]))[0], whole, atol=1e-4)


def test_a_row_waits_until_there_is_memory_for_its_last_token(model: Model) -> None:
    batch = Batch(model, limits(model, 2, 100))
    waiting = [Request(TEXT, 90) for _ in range(3)]
    queue = deque(waiting)
    batch.read(queue)
    assert len(batch.rows) == 2 and list(queue) == waiting[2:]
    batch.leave(waiting[:1])
    batch.read(queue)
    assert [row.request for row in batch.rows] == waiting[1:] and not queue


def test_tokens_are_those_of_a_session_while_rows_wait_and_caches_grow(model: Model) -> None:
    gathered = Gathered(model, limits(model, 3, 290))
    requests = [Request(tuple(prompt), 90 + 10 * (index % 3)) for index, prompt in
                enumerate(prompts(9, 190, seed=7))]  # fmt: skip
    highest = [0]
    done = threading.Event()

    def watch() -> None:
        while not done.wait(0.001):
            highest[0] = max(highest[0], gathered.engine.batch.session.memory)

    watcher = threading.Thread(target=watch)
    watcher.start()
    gathered.engine.submit(requests)
    gathered.engine.close()
    done.set()
    watcher.join()
    assert gathered.made == alone(model, requests)
    assert 0 < highest[0] <= gathered.engine.limits.memory


def test_a_context_of_which_no_row_fits_is_refused_with_the_one_that_fits(model: Model) -> None:
    memory = most_needed(model.session(), 1, 256, 16)
    assert longest_row(model.session(capacity=300), memory, 300, 16) == 256
    with pytest.raises(ValueError, match="caches of a row of 300 tokens, .* at most 256"):
        Batch(model, Limits(context=300, chunk=16, memory=memory))


def test_more_memory_than_is_available_is_refused() -> None:
    assert rows_memory(3 * 10**9, 10**9, 4 * 10**9) == 3 * 10**9
    with pytest.raises(ValueError, match="memory for caches of 4.0 GB, .* got 3.9 GB; give a"):
        rows_memory(3 * 10**9, 10**9, 39 * 10**8)
    assert rows_memory(None, 10**9, 6 * 10**9) == 2 * 10**9


def test_the_available_memory_is_known_on_linux() -> None:
    assert not Path("/proc/meminfo").is_file() or (available_memory() or 0) > 1 << 20


@pytest.mark.parametrize("lengths", [(250, 3), (3, 250)])
def test_rows_of_different_lengths_keep_their_tokens_when_caches_grow(
    model: Model, lengths: tuple[int, int]
) -> None:
    texts = np.random.default_rng(0).integers(0, 256, (2, 300))
    grown = model.session()
    for text, length in zip(texts, lengths, strict=True):
        grown.admit([text[:length]])
    for session in (grown, grown.fork()):
        session.rewind([1, 2])
        session.prefill([text[n - back : n] for text, n, back in zip(texts, lengths, (1, 2),
                         strict=True)])  # fmt: skip
        outputs = [session.step(texts[range(2), session.length]) for _ in range(40)]
        for row, (text, length) in enumerate(zip(texts, lengths, strict=True)):
            whole = model.session().prefill(text[None, : length + 40])[0, length:]
            assert np.allclose(whole, [output[row] for output in outputs], atol=1e-4)
