"""Artefacts of target ort-native beside those of ort, for bench.native: prompts, steps of one row
and of 16, passes of 4 tokens, text with drafts that are looked up in it, and rows of a server that
wait while it reads a long prompt.
"""

import inspect
import textwrap
from collections import deque
from functools import partial
from pathlib import Path
from typing import Any, Callable, Dict, Iterator, List, Sequence

import numpy as np

from bench.timing import CLOCKS, in_turn, seconds, spread
from posenc_export.runtime import Model, load
from posenc_export.runtime.artefact.tokenizer import codec
from posenc_export.serve.batch import Batch
from posenc_export.serve.requests import Limits, Request

CONTEXTS = (16, 512, 1024, 4096)
ROWS, OF_ROWS = 16, 512  # rows of a step, and their cached tokens
ROUNDS, TOKENS = 36, 4  # of a pass
TEXTS, IDS = 5, 64  # rounds of decoding, and the ids of each
RUNNING, SHORT, LONG = 4, 40, 4000  # running rows, tokens of their prompts and of the long one
STEADY, ARRIVALS = 24, 3  # steps before a long prompt arrives, and how many arrive


def measured(folders: Sequence[Path], threads: int) -> Iterator[Dict[str, Any]]:
    """Yield the times of two artefacts that take turns."""
    models = {path.name: load(path, provider="cpu", threads=threads) for path in folders}
    clock = CLOCKS[threads > 1]
    named = {"artefacts": [*models], "threads": threads}
    for cached in CONTEXTS:
        yield from (named | row for row in of_calls(models, 1, cached, clock))
    yield from (named | row for row in of_calls(models, ROWS, OF_ROWS, clock))
    yield named | of_copies(models, folders[0], clock)
    yield named | of_waiting(models, clock)


def of_calls(
    models: Dict[str, Model], rows: int, cached: int, clock: Callable[[], float]
) -> Iterator[Dict[str, Any]]:
    """Yield times of a prompt, of a step and of a pass of TOKENS after it."""
    sessions = {name: model.session() for name, model in models.items()}
    prompt = np.random.default_rng(0).integers(100, size=(rows, cached))

    def timed(session: Any, work: Callable[[], Any], back: int) -> float:
        time_taken = seconds(work, clock)
        session.rewind(back)
        return time_taken

    works: Dict[str, Any] = {
        "prompt": (lambda s: s.prefill(prompt, logits_to_keep=1), 0, 1),
        "step": (lambda s: s.step(prompt[:, -1]), 1, ROUNDS),
        f"{TOKENS} tokens": (lambda s: s.prefill(prompt[:, :TOKENS]), TOKENS, ROUNDS),
    }
    for what, (work, back, rounds) in works.items():
        calls = {
            name: partial(timed, session, partial(work, session), back)
            for name, session in sessions.items()
        }
        times = in_turn(calls, rounds, warm=6 if back else 0)
        first, second = times.values()
        ms = {name: round(float(np.median(t)) * 1e3, 2) for name, t in times.items()}
        what_of = {"call": what, "rows": rows, "cached": cached}
        yield {**what_of, "milliseconds": ms, "ratio": spread(second, first)}


def of_copies(models: Dict[str, Model], folder: Path, clock: Callable[[], float]) -> Dict[str, Any]:
    """Return how many times as fast text is written with look-ups: the rest of a function that
    stands in the prompt twice. "equal" is the number of ids before the artefacts write different
    text, of which look-ups may know less.
    """
    source = "".join(inspect.getsource(textwrap.indent).split('"""')[::2])
    begun = "".join(source.splitlines(keepends=True)[: len(source.splitlines()) // 2])
    ids = codec(folder, next(iter(models.values())).manifest).encode(f"{source}\n{source}\n{begun}")

    def decoded(session: Any, **how: Any) -> float:
        base = int(session.length[0])
        text = session.generate([ids[-1:]], IDS, stop=(), before=[ids[:-1]], **how)
        next(text)
        taken = seconds(lambda: texts.append([int(i) for (i,) in text]), clock)
        session.rewind(int(session.length[0]) - base)
        return taken

    calls: Dict[str, Callable[[], float]] = {}
    texts: List[List[int]] = []  # without their first id
    for name, model in models.items():
        session = model.session()
        session.prefill(np.array([ids[:-1]]), logits_to_keep=1)
        calls[name] = partial(decoded, session)
        calls[f"{name} with look-ups"] = partial(decoded, session, speculate="lookup")
    times = in_turn(calls, TEXTS, warm=2)
    gains = {name: spread(times[name], times[f"{name} with look-ups"]) for name in models}
    ms = {name: round(float(np.median(t)) / (IDS - 1) * 1e3, 2) for name, t in times.items()}
    other = np.not_equal(texts[0], texts[-2])
    equal = 1 + int(other.argmax() if other.any() else IDS - 1)
    return {"call": "copied text", "equal": equal, "milliseconds": ms, "gains": gains}


def of_waiting(models: Dict[str, Model], clock: Callable[[], float]) -> Dict[str, Any]:
    """Return how long running rows wait for a token while a prompt of LONG tokens is read, over a
    step before: the medians and the longest of each arrival.
    """
    calls = {name: partial(_arrival, model, clock) for name, model in models.items()}
    times = in_turn(calls, ARRIVALS, warm=0)
    waits = {
        name: {
            what: [round(value, 2) for value in np.quantile(values, (0, 0.5, 1)).tolist()]
            for what, values in zip(("median", "longest"), zip(*pairs, strict=True), strict=True)
        }
        for name, pairs in times.items()
    }
    return {"call": f"rows that wait for a prompt of {LONG}", "waits": waits}


def _arrival(model: Model, clock: Callable[[], float]) -> List[float]:
    limits = Limits(rows=RUNNING + 1, context=LONG + 8, prompt=LONG, tokens=LONG)
    batch, random = Batch(model, limits), np.random.default_rng(0)

    def request(size: int, tokens: int) -> Request:
        return Request(tuple(random.integers(100, size=size).tolist()), tokens)

    queue = deque(request(SHORT, LONG - SHORT) for _ in range(RUNNING))

    def turn() -> None:
        batch.read(queue)
        batch.step()

    while queue or not all(row.generated for row in batch.rows):
        turn()
    steady = float(np.median([seconds(turn, clock) for _ in range(STEADY)][STEADY // 2 :]))
    queue.append(request(LONG, 1))
    waits = []
    while queue or len(batch.rows) > RUNNING:
        waits.append(seconds(turn, clock))
    return [float(np.median(waits)) / steady, max(waits) / steady]
