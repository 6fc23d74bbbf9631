"""Tiny byte-level decoders for the tests of the server."""

import time
from pathlib import Path
from typing import Sequence

import numpy as np
import pytest

from posenc_export.models.short_forms import decoder_config
from posenc_export.runtime import load
from posenc_export.runtime.session.model import Model
from posenc_export.serve.batch import Batch
from posenc_export.serve.requests import Request
from tests import traces
from tests.tiny import block

CONFIG = decoder_config(vocabulary=256, layers=1, hidden=40, block=block("rope"))


def artefact(target: str) -> Path:
    """Return the folder of a seeded decoder, exported once per process."""
    return traces.artefact(CONFIG, target)


def opened(folder: Path) -> Model:
    return load(folder, provider="cpu", threads=1)


def prompts(count: int, longest: int, seed: int = 0) -> list[list[int]]:
    """Return random prompts of letters, of different lengths."""
    random = np.random.default_rng(seed)
    return [
        random.integers(97, 123, random.integers(1, longest + 1)).tolist() for _ in range(count)
    ]


def alone(model: Model, requests: Sequence[Request]) -> dict[Request, list[int]]:
    """Return the tokens that a separate session generates for each request."""
    tokens = {}
    for request in requests:
        how = (request.temperature, request.top_k, request.top_p, request.seed, request.stop_ids)
        ids = model.session().generate([list(request.prompt)], request.max_tokens, *how)
        tokens[request] = [int(token[0]) for token in ids]
    return tokens


@pytest.fixture
def slow(monkeypatch: pytest.MonkeyPatch) -> None:
    """Delay steps by 10 ms, so that rows are still running when the test continues."""
    step = Batch.step
    monkeypatch.setattr(Batch, "step", lambda batch: time.sleep(0.01) or step(batch))
