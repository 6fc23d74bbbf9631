"""Shared prefixes in the server: the same tokens as alone, whatever is kept, replaced or
cancelled; and how much of a prompt is read between steps.
"""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from posenc_export.models.short_forms import decoder_config
from posenc_export.runtime.session.model import Model
from posenc_export.runtime.session.prefixes import BLOCK
from posenc_export.serve.requests import Limits, Request
from tests.serve.models import alone, artefact, opened, prompts, slow  # noqa: F401
from tests.serve.test_engine import Gathered
from tests.tiny import block
from tests.traces import exported

pytestmark = pytest.mark.xdist_group("serve")
COMMON = tuple(np.random.default_rng(7).integers(97, 123, 3 * BLOCK).tolist())


@pytest.fixture(scope="module")
def models() -> dict[str, Model]:
    return {target: opened(artefact(target)) for target in ("ort", "onnx-static")}


def _limits(model: Model, blocks: int) -> Limits:
    memory = blocks * BLOCK * model.manifest.slot_bytes
    return Limits(rows=5, queue=64, context=300, chunk=48, prefix_memory=memory)


def _requests(count: int, tokens: int = 12) -> list[Request]:
    """Return requests that begin with 0 .. 3 blocks of the same tokens."""
    return [
        Request((*COMMON[: BLOCK * (index % 4)], *prompt), tokens)
        for index, prompt in enumerate(prompts(count, 70, seed=3))
    ]


@pytest.mark.parametrize("blocks", [2, 5, 200])
@pytest.mark.parametrize("target", ["ort", "onnx-static"])
def test_requests_that_share_prefixes_get_the_tokens_that_they_get_alone(
    target: str, blocks: int, models: dict[str, Model]
) -> None:
    model, requests = models[target], _requests(24)
    gathered = Gathered(model, _limits(model, blocks))
    for first in range(0, len(requests), 4):
        gathered.engine.submit(requests[first : first + 4])
    gathered.engine.close()
    prefixes = gathered.engine.batch.prefixes
    assert prefixes is not None
    assert 0 < prefixes.used <= blocks
    assert prefixes.hits > 5 or blocks < 200
    assert gathered.made == alone(model, requests)


@pytest.mark.usefixtures("slow")
def test_what_a_cancelled_request_has_read_serves_others(models: dict[str, Model]) -> None:
    model, requests = models["ort"], [Request((*COMMON, 97 + index), 40) for index in range(10)]
    gathered = Gathered(model, _limits(model, 50))
    gathered.engine.submit(requests[:1])
    assert gathered.some.wait(30)
    gathered.engine.cancel(requests[:1])
    gathered.engine.submit(requests[1:])
    gathered.engine.close()
    assert gathered.engine.batch.prefixes is not None and gathered.engine.batch.prefixes.hits == 9
    expected = alone(model, requests)
    assert all(gathered.made[request] == expected[request] for request in requests[1:])


def test_a_conversation_is_continued_from_its_reply(models: dict[str, Model]) -> None:
    model, first = models["ort"], Request(COMMON[:40], 60)
    gathered = Gathered(model, _limits(model, 50))
    gathered.engine.submit([first])
    while not gathered.ended:
        gathered.some.wait(30)
    second = Request((*first.prompt, *gathered.made[first], 97), 5)
    gathered.engine.submit([second])
    gathered.engine.close()
    assert gathered.engine.batch.prefixes is not None
    assert gathered.engine.batch.prefixes.tokens == (40 + 59) // BLOCK * BLOCK
    assert gathered.made[second] == alone(model, [second])[second]


def test_requests_of_different_users_share_nothing(models: dict[str, Model]) -> None:
    model = models["ort"]
    gathered = Gathered(model, _limits(model, 50))
    for user in ("a", "b", "", "a"):
        gathered.engine.submit([Request(COMMON, 2, sharing=user)])
    gathered.engine.close()
    assert gathered.engine.batch.prefixes is not None
    assert (gathered.engine.batch.prefixes.hits, gathered.engine.batch.prefixes.used) == (1, 9)


@pytest.mark.exhaustive  # its export takes seconds
def test_a_model_whose_states_are_replaced_is_served_without_sharing(tmp_path: Path) -> None:
    config = decoder_config(
        vocabulary=256, layers=1, hidden=40, block=block("rope", mechanism="linear", kv_heads=6)
    )
    exported(tmp_path / "a", config, "ort")
    model, requests = opened(tmp_path / "a"), _requests(6)
    gathered = Gathered(model, Limits(rows=3, context=300, chunk=16, prefix_memory=10**7))
    gathered.engine.submit(requests)
    gathered.engine.close()
    assert gathered.engine.batch.prefixes is None and gathered.made == alone(model, requests)


@pytest.mark.usefixtures("slow")
def test_running_rows_wait_for_one_chunk_at_most(
    models: dict[str, Model], monkeypatch: pytest.MonkeyPatch
) -> None:
    model, fed = models["ort"], [0]
    gathered = Gathered(model, Limits(rows=3, context=300, chunk=16))
    batch = gathered.engine.batch
    step, read = batch.step, batch._read_part

    def counted(index: int, row: Any, count: int, logits: np.ndarray) -> Any:
        fed[-1] += count
        return read(index, row, count, logits)

    monkeypatch.setattr(batch, "step", lambda: fed.append(0) or step())
    monkeypatch.setattr(batch, "_read_part", counted)
    running: Any = Request((97,), 60)
    gathered.engine.submit([running])
    while not gathered.made[running]:
        assert gathered.some.wait(30)
    long = Request(COMMON, 3)
    gathered.engine.submit([long])
    gathered.engine.close()
    assert len(gathered.made[running]) == 60 and gathered.made == alone(model, [running, long])
    assert max(fed) == 16 and sum(fed) == len(COMMON) + 1


@pytest.mark.usefixtures("slow")
def test_what_running_rows_write_is_kept_as_soon_as_a_block_is_full(
    models: dict[str, Model], monkeypatch: pytest.MonkeyPatch
) -> None:
    model, copied = models["ort"], []
    gathered = Gathered(model, _limits(model, 50))
    session = gathered.engine.batch.session
    monkeypatch.setattr(
        session,
        "share",
        lambda row, tokens, *given, share=session.share: (
            copied.append(len(tokens)),
            share(row, tokens, *given),
        ),
    )
    request = Request(COMMON[:40], 60)
    gathered.engine.submit([request])
    gathered.engine.close()
    assert copied == [40, 2 * BLOCK, 3 * BLOCK] and gathered.made == alone(model, [request])
