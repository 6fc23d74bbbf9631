"""Generate tokens with a session: prefill a prompt, then choose a token from the logits and feed
it, one at a time.
"""

import math
from dataclasses import dataclass
from typing import Any, Callable, Generator, Iterator, List, Optional, Sequence

import numpy as np

from posenc_export.runtime.session.arguments import Rows, array_of, at_least, short_repr
from posenc_export.runtime.session.first_tokens import First, feed
from posenc_export.runtime.session.speculation import (
    MOST,
    Reader,
    Speculate,
    Speculator,
    check,
    drafts_of,
)
from posenc_export.runtime.session.token_rules import TokenRules

ENDED = -1  # id that is given for a row that has ended


@dataclass(frozen=True)
class Sampling:
    """How a token is chosen from logits; the arguments of `choose`."""

    temperature: float
    top_k: int
    top_p: float


class Draws:
    """The numbers of a random generator by index, so that a draft can use the number of a token
    before the model does.
    """

    def __init__(self, random: "np.random.Generator") -> None:
        self._random, self._known = random, np.zeros(0)

    def random(self, index: int) -> float:
        """Return the number that the generator gives as its call of this index."""
        if index >= len(self._known):
            self._known = np.concatenate(
                (self._known, self._random.random(max(index + 1 - len(self._known), 64)))
            )
        return float(self._known[index])


def generate(
    session: Any,
    first: First,
    max_tokens: int,
    sampling: Sampling,
    seed: int,
    stop: Optional[Sequence[int]],
    speculate: Speculate,
    before: Optional[Rows],
) -> Generator[np.ndarray, None, None]:
    """Implement Session.generate, which documents the arguments."""
    manifest = session.manifest
    if manifest.kind != "decoder" and not (
        manifest.kind == "module" and manifest.outputs[0].axes[-1] == manifest.vocabulary
    ):
        own = (
            f"an own module with {manifest.outputs[0].axes[-1]} outputs for "
            f"{manifest.vocabulary or 'no'} token ids"
        )
        found = own if manifest.kind == "module" else f"kind {manifest.kind}"
        raise ValueError(
            "session: expected a decoder, or an own module with an output for each token "
            f"id, for generate, got {found}; call prefill"
        )
    at_least("max_tokens", max_tokens, 1)
    check_sampling(sampling.temperature, sampling.top_k, sampling.top_p)
    stops = array_of("stop", list(manifest.stop_ids if stop is None else stop))
    if stops.size and stops.dtype.kind not in "iu":
        raise ValueError(
            f"session: expected stop to be token ids, got {short_repr(stop)}; leave it out "
            "for those of the artefact"
        )
    random = np.random.default_rng(at_least("seed", seed, 0))
    if speculate is not None:
        check(session, speculate)
    earlier = None if before is None else _earlier(before, first.rows)
    logits = feed(session, first)
    rules = TokenRules(manifest.generation, session.length)
    if speculate is None:
        yield from _stepped(session, rules, logits, max_tokens, sampling, random, stops)
        return
    none: List[List[int]] = [[]] * len(logits)
    prompt = none if first.prompt is None else first.prompt
    texts = [[*start, *row] for start, row in zip(earlier or none, prompt, strict=True)]
    draws = Draws(random)
    readers = [
        _reader(row, rules, texts, max_tokens, sampling, draws, stops.tolist(), speculate)
        for row in range(len(texts))
    ]
    yield from _drafted(session, logits, readers)


def _earlier(before: Rows, rows: int) -> List[List[int]]:
    """Return the ids that each row has read before the prompt. Raise ValueError for other rows."""
    ids = [array_of("a row of before", row) for row in before] if np.iterable(before) else []
    if len(ids) != rows or any(
        row.ndim != 1 or (row.size and row.dtype.kind not in "iu") for row in ids
    ):
        raise ValueError(
            f"session: expected before to be a list of token ids for each of {rows} rows, "
            f"got {short_repr(before)}; give [] for a row that has read none"
        )
    return [row.tolist() for row in ids]


def _stepped(
    session: Any,
    rules: TokenRules,
    logits: np.ndarray,
    max_tokens: int,
    sampling: Sampling,
    random: "np.random.Generator",
    stops: np.ndarray,
) -> Iterator[np.ndarray]:
    """Yield the ids of `generate` without drafts, from the logits [B,V] after the prompt."""
    running = np.ones(len(logits), bool)
    for index in range(max_tokens):
        chosen = np.where(
            running,
            choose(
                rules.applied(logits, index),
                sampling.temperature,
                sampling.top_k,
                sampling.top_p,
                random,
            ),
            ENDED,
        )
        yield chosen
        running = running & ~np.isin(chosen, stops)
        if index + 1 == max_tokens or not running.any():
            return
        if running.all():
            logits = session.step(chosen)
        else:  # rows that have ended read no more tokens
            output = session.prefill(
                [
                    [token] if more else []
                    for token, more in zip(chosen.tolist(), running, strict=True)
                ]
            )
            logits = np.where(running[:, None], output[:, 0], logits)


def _drafted(session: Any, logits: np.ndarray, readers: List[Reader]) -> Iterator[np.ndarray]:
    """Yield the ids of `generate` with drafts. Between two of them, the session may hold tokens
    that were not yielded yet; in the end it holds those that it would hold without drafts.
    """
    held, speculator = session.length, Speculator(session)
    chosen = [[reader.take(row)] for reader, row in zip(readers, logits, strict=True)]
    for reader, tokens in zip(readers, chosen, strict=True):
        assert reader.drafts is not None
        reader.drafts.extend(tokens)
    index = 0
    try:
        while not all(reader.done for reader in readers) or index < max(map(len, chosen)):
            while any(
                not reader.done and len(tokens) <= index
                for reader, tokens in zip(readers, chosen, strict=True)
            ):
                reading = [
                    None if reader.done or len(tokens) > index + MOST else reader
                    for reader, tokens in zip(readers, chosen, strict=True)
                ]
                for tokens, more in zip(chosen, speculator.read(reading), strict=True):
                    tokens += more
            index += 1
            yield np.array(
                [tokens[index - 1] if len(tokens) >= index else ENDED for tokens in chosen],
                np.int64,
            )
    finally:
        yielded = np.array([min(index, len(tokens)) for tokens in chosen])
        session.rewind(np.maximum(session.length - (held + np.maximum(yielded - 1, 0)), 0))


def _reader(
    row: int,
    rules: TokenRules,
    texts: List[List[int]],
    max_tokens: int,
    sampling: Sampling,
    draws: Draws,
    stops: List[int],
    speculate: Speculate,
) -> Reader:
    """Return a reader that chooses as `_stepped` does: with the random numbers of its row, where
    all rows draw one for each index.
    """

    def chosen(index: int, logits: np.ndarray) -> int:
        return choose_one(
            rules.applied(logits[None], index, [row])[0],
            sampling,
            lambda: draws.random(index * len(texts) + row),
        )

    return Reader(chosen, stops, max_tokens, drafts_of(speculate, texts[row]))


def choose(
    logits: np.ndarray, temperature: float, top_k: int, top_p: float, random: "np.random.Generator"
) -> np.ndarray:
    """Choose token ids [B] int64 from logits [B,V]: the largest logit at temperature 0, otherwise a
    float64 sample. Ties go to the lower id.

    Args:
        temperature: divides the logits; 0 is greedy.
        top_k: keep the k most probable tokens; 0 keeps all.
        top_p: keep the smallest set of most probable tokens whose probabilities sum to at least p
            (nucleus sampling, Holtzman et al. 2019); 1 keeps all.

    Raises:
        ValueError: an argument is outside its range.
    """
    check_sampling(temperature, top_k, top_p)
    if temperature == 0:
        return logits.argmax(-1).astype(np.int64)
    return np.array(
        [
            _sample(row.astype(np.float64), temperature, top_k, top_p, random.random())
            for row in logits
        ],
        np.int64,
    )


def choose_one(logits: np.ndarray, sampling: Sampling, draw: Callable[[], float]) -> int:
    """Choose a token id from logits [V] as `choose` does. `draw` gives a random number, and is
    not called at temperature 0.
    """
    if sampling.temperature == 0:
        return int(logits.argmax())
    return _sample(
        logits.astype(np.float64), sampling.temperature, sampling.top_k, sampling.top_p, draw()
    )


def check_sampling(temperature: Any, top_k: Any, top_p: Any) -> None:
    """Raise ValueError if an argument of `choose` is outside its range."""
    if not (_is_number(temperature) and 0 <= temperature < math.inf):
        raise ValueError(
            "session: expected temperature to be a finite number of at least 0, got "
            f"{short_repr(temperature)}; 0 chooses the most probable token"
        )
    at_least("top_k", top_k, 0)
    if not (_is_number(top_p) and 0 < top_p <= 1):
        raise ValueError(
            "session: expected top_p to be a number above 0 and at most 1, got "
            f"{short_repr(top_p)}; 1 keeps all tokens"
        )


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float, np.integer, np.floating)) and not isinstance(value, bool)


def _sample(scores: np.ndarray, temperature: float, top_k: int, top_p: float, number: float) -> int:
    order = np.argsort(-scores, kind="stable")[: top_k or None]
    order = order[: max(1, np.isfinite(scores[order]).sum())]  # without tokens that are forbidden
    with np.errstate(
        over="ignore"
    ):  # near temperature 0, all differences but that of the largest logit are infinite
        probabilities = np.exp((scores[order] - scores[order[0]]) / temperature)
    probabilities /= probabilities.sum()
    # The set includes the token with which the sum reaches p. Rounding can leave the sum of all
    # tokens below p, and below the number.
    nucleus = min(int(np.searchsorted(np.cumsum(probabilities), top_p)) + 1, len(order))
    probabilities = probabilities[:nucleus] / probabilities[:nucleus].sum()
    place = int(np.searchsorted(np.cumsum(probabilities), number, side="right"))
    return int(order[min(place, nucleus - 1)])
