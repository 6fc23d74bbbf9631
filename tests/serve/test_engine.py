"""The engine without HTTP: each request gets the same tokens as alone, whatever other requests
run.
"""

import itertools
import threading
from collections import defaultdict
from typing import Any

import numpy as np
import pytest

from posenc_export.runtime.artefact.records import Generation
from posenc_export.runtime.session.errors import GraphError
from posenc_export.runtime.session.model import Model
from posenc_export.serve.completion import Stops
from posenc_export.serve.engine import Engine
from posenc_export.serve.requests import Limits, Refused, Request, Token, check_model
from tests.serve.models import alone, artefact, opened, prompts, slow  # noqa: F401

pytestmark = pytest.mark.xdist_group("serve")
LIMITS = Limits(rows=5, queue=64, context=300, chunk=16)


class Gathered:
    """Collects the tokens that an engine delivers, by request."""

    def __init__(self, model: Model, limits: Limits = LIMITS) -> None:
        self.made: dict[Request, list[int]] = defaultdict(list)
        self.ended: dict[Request, str] = {}
        self.some, self.failed = threading.Event(), threading.Event()
        self.engine = Engine(model, limits, self.take, self.failed.set)

    def take(self, tokens: list[Token]) -> None:
        for token in tokens:
            self.made[token.request] += [token.id] if token.id >= 0 else []
            if token.ended:
                self.ended[token.request] = token.ended
        self.some.set()


@pytest.fixture(scope="module")
def models() -> dict[str, Model]:
    return {target: opened(artefact(target)) for target in ("ort", "onnx-static")}


@pytest.mark.parametrize("target", ["ort", "onnx-static"])
def test_every_request_gets_the_tokens_that_it_gets_alone(
    target: str, models: dict[str, Model]
) -> None:
    lengths = np.random.default_rng(1).integers(1, 40, 24).tolist()
    pairs = zip(prompts(24, 60), lengths, strict=True)
    requests = [Request(tuple(prompt), length) for prompt, length in pairs]
    gathered = Gathered(models[target])
    for first in range(0, len(requests), 4):
        gathered.engine.submit(requests[first : first + 4])
    gathered.engine.close()
    assert gathered.made == alone(models[target], requests)
    assert set(gathered.ended.values()) == {"length"}


def test_draws_follow_each_request_and_what_the_checkpoint_forbids_or_forces_as_in_a_session(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model = opened(artefact("ort"))
    requests = [
        Request(prompt, 20, 0.9 * (seed % 2), 30, 0.95, seed)
        for seed, prompt in enumerate([(97,), (98,), *map(tuple, prompts(6, 12))])
    ]
    free = alone(model, requests)
    suppressed = {token for tokens in free.values() for token in tokens[:3]} - {5}
    first = tuple(range(100))
    known = Generation(suppressed=tuple(sorted(suppressed)), suppressed_first=first, forced_first=5)
    monkeypatch.setattr(model.graph, "manifest", model.manifest.replace(generation=known))
    gathered = Gathered(model)
    gathered.engine.submit(requests)
    gathered.engine.close()
    expected = alone(model, requests)
    assert gathered.made == expected and expected != free
    assert all(tokens[0] == 5 for request, tokens in expected.items() if len(request.prompt) == 1)
    assert not suppressed & {token for tokens in expected.values() for token in tokens}


@pytest.mark.parametrize("error", [MemoryError("planted"), GraphError(RuntimeError("planted"))])
@pytest.mark.parametrize("breaks", ["admit", "step"])
def test_an_engine_whose_graph_runs_no_more_ends_and_leaves_nobody_waiting(
    breaks: str,
    error: Exception,
    models: dict[str, Model],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    def end(*_: Any, **__: Any) -> np.ndarray:
        raise error

    gathered = Gathered(models["ort"])
    monkeypatch.setattr(gathered.engine.batch.session, breaks, end)
    requests = [Request((97, 98), 5) for _ in range(8)]
    gathered.engine.submit(requests)
    assert gathered.failed.wait(30) and gathered.engine.state == "failed"
    assert gathered.ended == dict.fromkeys(requests, "error")
    assert "the engine has ended" in caplog.records[-1].message
    with pytest.raises(Refused, match="got failed"):
        gathered.engine.submit(requests)


@pytest.mark.parametrize(("target", "signature"), [("onnx", "positions"), ("ort", "mask")])
def test_an_artefact_whose_rows_share_columns_is_refused_by_name(
    target: str, signature: str, models: dict[str, Model]
) -> None:
    manifest = models["ort"].manifest.replace(target=target, signature=signature, layout="columns")
    got = f"got target {target} with signature {signature}; export target ort"
    with pytest.raises(ValueError, match=f"rows with cache slots of their own, {got}"):
        check_model(manifest, LIMITS)


def test_the_pieces_of_a_text_do_not_change_where_it_stops() -> None:
    random, strings = np.random.default_rng(0), ["aba", "bb", "abcab"]
    for _ in range(500):
        text = "".join(random.choice(list("abc"), random.integers(0, 24)))
        cuts = np.sort(random.integers(0, len(text) + 1, 6))
        stops = Stops(strings)
        pieces = itertools.pairwise([0, *cuts, len(text)])
        result = "".join(stops.push(text[begin:end]) for begin, end in pieces) + stops.rest()
        ends = [text.find(string) for string in strings if string in text]
        assert stops.found == bool(ends) and result == text[: min(ends, default=len(text))]
