"""Generate tokens with a session: prefill a prompt, then choose a token from the logits and feed it, one at a time."""

import math
from typing import Any, Iterator, Optional, Sequence

import numpy as np

from posenc_export.runtime.session.arguments import Rows, array_of, at_least, short_repr

ENDED = -1  # id that is given for a row that has ended


def generate(
    session: Any,
    prompt: Rows,
    max_tokens: int,
    temperature: float,
    top_k: int,
    top_p: float,
    seed: int,
    stop: Optional[Sequence[int]],
    encoder: Optional[Rows],
) -> Iterator[np.ndarray]:
    """Implement Session.generate, which documents the arguments."""
    manifest = session.manifest
    if manifest.kind != "decoder" and not (manifest.kind == "module" and manifest.outputs[0].axes[-1] == manifest.vocabulary):
        raise ValueError(f"session: expected a decoder for generate, got kind {manifest.kind}; call prefill")
    at_least("max_tokens", max_tokens, 1)
    check_sampling(temperature, top_k, top_p)
    counts = [len(row) for row in prompt]
    if not all(counts):
        raise ValueError(f"session: expected a prompt with a token in every row, got rows of {counts} tokens; leave empty rows out")
    stops = array_of("stop", list(manifest.stop_ids if stop is None else stop))
    if stops.size and stops.dtype.kind not in "iu":
        raise ValueError(f"session: expected stop to be token ids, got {short_repr(stop)}; leave it out for those of the artefact")
    random, running = np.random.default_rng(at_least("seed", seed, 0)), np.ones(len(counts), bool)
    logits = session.prefill(prompt, encoder=encoder, logits_to_keep=1)[:, -1]
    for index in range(max_tokens):
        chosen = np.where(running, choose(logits, temperature, top_k, top_p, random), ENDED)
        yield chosen
        running = running & ~np.isin(chosen, stops)
        if index + 1 == max_tokens or not running.any():
            return
        if running.all():
            logits = session.step(chosen)
        else:  # rows that have ended read no more tokens
            output = session.prefill([[token] if more else [] for token, more in zip(chosen.tolist(), running, strict=True)])
            logits = np.where(running[:, None], output[:, 0], logits)


def choose(logits: np.ndarray, temperature: float, top_k: int, top_p: float, random: "np.random.Generator") -> np.ndarray:
    """Choose token ids [B] int64 from logits [B,V]: the largest logit at temperature 0, otherwise a float64 sample. Ties go to the lower id.

    Args:
        temperature: divides the logits; 0 is greedy.
        top_k: keep the k most probable tokens; 0 keeps all.
        top_p: keep the smallest set of most probable tokens whose probabilities sum to at least p (nucleus sampling, Holtzman et al. 2019); 1 keeps all.

    Raises:
        ValueError: an argument is outside its range.
    """
    check_sampling(temperature, top_k, top_p)
    if temperature == 0:
        return logits.argmax(-1).astype(np.int64)
    return np.array([_sample(row.astype(np.float64), temperature, top_k, top_p, random) for row in logits], np.int64)


def check_sampling(temperature: Any, top_k: Any, top_p: Any) -> None:
    """Raise ValueError if an argument of `choose` is outside its range."""
    if not (_is_number(temperature) and 0 <= temperature < math.inf):
        raise ValueError(f"session: expected temperature to be a finite number of at least 0, got {short_repr(temperature)}; 0 chooses the most probable token")
    at_least("top_k", top_k, 0)
    if not (_is_number(top_p) and 0 < top_p <= 1):
        raise ValueError(f"session: expected top_p to be a number above 0 and at most 1, got {short_repr(top_p)}; 1 keeps all tokens")


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float, np.integer, np.floating)) and not isinstance(value, bool)


def _sample(scores: np.ndarray, temperature: float, top_k: int, top_p: float, random: "np.random.Generator") -> int:
    order = np.argsort(-scores, kind="stable")[: top_k or None]
    with np.errstate(over="ignore"):  # near temperature 0, all differences but that of the largest logit are infinite
        probabilities = np.exp((scores[order] - scores[order[0]]) / temperature)
    probabilities /= probabilities.sum()
    nucleus = int(np.searchsorted(np.cumsum(probabilities), top_p)) + 1  # the set includes the token with which the sum reaches p
    probabilities = probabilities[:nucleus] / probabilities[:nucleus].sum()
    return int(order[min(int(np.searchsorted(np.cumsum(probabilities), random.random(), side="right")), nucleus - 1)])
