"""Thread safety: one thread per session, any number of sessions per model. Returned arrays
belong to the caller.
"""

import concurrent.futures
import threading

import numpy as np
import pytest

from posenc_export.runtime import Session
from tests.runtime.sequences import model, texts

pytestmark = pytest.mark.xdist_group("rope")  # one worker, which exports for them once
TARGETS = ["onnx", "onnx-static", "ort", "torchscript"]


def run(session: Session, seed: int) -> list[np.ndarray]:
    """Run a session on a random sequence and return its outputs."""
    tokens = np.random.default_rng(seed).integers(61, size=(1 + seed % 3, 30))
    outputs = [session.prefill(tokens[:, :7])]
    for index in range(7, 20):
        outputs.append(session.step(tokens[:, index]))
    session.rewind(4)
    outputs.append(session.prefill(tokens[:, 20:], chunk=3))
    return outputs


@pytest.mark.parametrize("target", TARGETS)
def test_sessions_of_one_model_in_many_threads_give_the_bits_that_each_gives_alone(
    target: str,
) -> None:
    loaded = model("rope", target)
    run(loaded.session(), 0)  # torch optimises a script in its first calls
    run(loaded.session(), 1)
    alone = [run(loaded.session(), seed) for seed in range(16)]
    with concurrent.futures.ThreadPoolExecutor(8) as pool:
        together = list(pool.map(lambda seed: run(loaded.session(), seed), range(16)))
    assert all(
        np.array_equal(a, b)
        for one, other in zip(alone, together, strict=True)
        for a, b in zip(one, other, strict=True)
    )


def test_a_call_during_another_one_is_refused_and_does_no_harm(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    session = model("rope", "ort").session()
    session.prefill(texts()[:1, :5])
    inside, leave = threading.Event(), threading.Event()
    right = session._runner.run_chunk

    def waits(*arguments: object) -> object:
        inside.set()
        leave.wait()
        return right(*arguments)  # type: ignore[arg-type]

    monkeypatch.setattr(session._runner, "run_chunk", waits)
    with concurrent.futures.ThreadPoolExecutor(1) as pool:
        running = pool.submit(session.prefill, texts()[:1, 5:8])
        inside.wait()
        try:
            for call in (
                lambda: session.step(texts()[:1, 5]),
                lambda: session.rewind(1),
                lambda: session.fork(),
                session.reset,
            ):
                with pytest.raises(
                    RuntimeError,
                    match=r"expected one call at a time, got another while one runs; open a "
                    r"session for each thread",
                ):
                    call()
        finally:
            leave.set()
        running.result()
    assert session.length.tolist() == [8]
    session.step(texts()[:1, 8])


@pytest.mark.parametrize("target", TARGETS)
def test_arrays_that_calls_return_are_never_written_again(target: str) -> None:
    session = model("rope", target).session()
    outputs = [
        session.prefill(texts()[:2, :5]),
        *(session.step(texts()[:2, index]) for index in range(5, 9)),
        session.length,
        session.position,
    ]
    kept = [output.copy() for output in outputs]
    session.rewind(3)
    session.prefill(texts()[:2, 9:12])
    session.step(texts()[:2, 12])
    assert all(np.array_equal(a, b) for a, b in zip(outputs, kept, strict=True))
    outputs[-2][...] = 0  # writing to returned arrays must not change the session
    assert session.length.tolist() == [10, 10]


def test_a_step_without_a_copy_gives_the_array_that_the_next_one_writes() -> None:
    session = model("rope", "ort").session()
    session.prefill(texts()[:1, :5])
    first = session.step(texts()[:1, 5], copy=False)
    kept = first.copy()
    second = session.step(texts()[:1, 6], copy=False)
    assert second.base is first.base and not np.array_equal(first, kept)
