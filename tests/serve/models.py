"""Tiny byte-level decoders for the tests of the server."""

import functools
import time
from pathlib import Path
from typing import Dict, List, Sequence

import numpy as np
import pytest

from posenc_export.export import export
from posenc_export.models.short_forms import decoder_config
from posenc_export.runtime import load
from posenc_export.runtime.session.model import Model
from posenc_export.serve.batch import Batch
from posenc_export.serve.requests import Request
from tests.tiny import block
from tests.traces import sources

CONFIG = decoder_config(vocabulary=256, layers=1, hidden=40, block=block("rope"))


@functools.cache
def artefact(folder: Path, target: str) -> Path:
    """Return the folder of a seeded decoder, exported once per process."""
    export(sources(CONFIG), target, folder / f"serve-{target}", verify=False)
    return folder / f"serve-{target}"


def opened(folder: Path) -> Model:
    return load(folder, provider="cpu", threads=1)


def prompts(count: int, longest: int, seed: int = 0) -> List[List[int]]:
    """Return random prompts of letters, of different lengths."""
    random = np.random.default_rng(seed)
    return [
        random.integers(97, 123, random.integers(1, longest + 1)).tolist() for _ in range(count)
    ]


def alone(model: Model, requests: Sequence[Request]) -> Dict[Request, List[int]]:
    """Return the tokens that a separate session generates for each request."""
    found = {}
    for each in requests:
        made = model.session().generate(
            [list(each.prompt)],
            each.max_tokens,
            each.temperature,
            each.top_k,
            each.top_p,
            each.seed,
            each.stop_ids,
        )
        found[each] = [int(token[0]) for token in made]
    return found


@pytest.fixture
def slow(monkeypatch: pytest.MonkeyPatch) -> None:
    """Delay steps by 10 ms, so that rows are still running when the test continues."""
    step = Batch.step
    monkeypatch.setattr(Batch, "step", lambda batch: time.sleep(0.01) or step(batch))
