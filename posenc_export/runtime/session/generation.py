"""Generate tokens with a session: feed the first tokens of a text, with those that an artefact
forces, choose a token from the logits, feed it, and so on.
"""

import math
from dataclasses import dataclass, replace
from typing import Any, Callable, Generator, Iterator, List, Optional, Sequence

import numpy as np

from posenc_export.runtime.artefact.manifest import Manifest
from posenc_export.runtime.artefact.records import Generation
from posenc_export.runtime.session import arguments, speculation
from posenc_export.runtime.session.arguments import Inputs, array_of, at_least, short_repr
from posenc_export.runtime.session.errors import expected
from posenc_export.runtime.session.speculation import Reader, Speculate, Speculator
from posenc_export.shared.refusal import refusal

ENDED = -1  # id that is given for a row that has ended


def _feed(session: Any, prompt: Optional[Inputs], encoder: Optional[Inputs], rows: int) -> Any:
    """Feed the prompt, or the first tokens of a decoder that reads an encoder. Return the logits
    after them [B,V]. Raise ValueError as Session.generate does.
    """
    if prompt is None:
        prompt = [[start_token(session.manifest)]] * rows
    counts = np.array([len(row) for row in prompt])
    arguments.check_every_row(counts, "row of the prompt")
    return session.prefill(prompt, encoder=encoder, logits_to_keep=1)[:, -1]


def start_token(manifest: Manifest) -> int:
    """Return the start token. Raise ValueError for a model that has none."""
    if not manifest.encoder or not manifest.start_ids:
        got = "one that reads none" if not manifest.encoder else "one without start_ids"
        rule = "a decoder that reads an encoder and has start_ids"
        raise refusal("generate", rule, got, "give a prompt, and no encoder")
    return manifest.start_ids[0]


class TokenRules:
    """The rules for tokens after a prompt of `length` tokens, from those of the artefact."""

    def __init__(self, known: Optional[Generation], length: int) -> None:
        self._known = known
        # Whether the first token is forced
        self._forces = length == 1 and known is not None and known.forced_first is not None

    def applied(self, logits: np.ndarray, index: int) -> np.ndarray:
        """Return logits [V] after `index` tokens, with -inf for forbidden ones."""
        known = self._known
        if known is None:
            return logits
        logits = logits.copy()
        if index == 0 and self._forces:
            logits[:] = -math.inf
            logits[known.forced_first] = 0.0
        logits[list(known.suppressed)] = -math.inf
        if index == int(self._forces):  # the first token that is not forced
            logits[list(known.suppressed_first)] = -math.inf
        return logits


@dataclass(frozen=True)
class Sampling:
    """How tokens are chosen, and when a row ends.

    Args:
        temperature: divides the logits; 0 chooses the largest logit.
        top_k: keep the k most probable tokens; 0 keeps all.
        top_p: keep the smallest set of most probable tokens whose probabilities sum to at least p
            (nucleus sampling, Holtzman et al. 2019); 1 keeps all.
        seed, max_tokens, stop: as for Session.generate.
    """

    temperature: float
    top_k: int
    top_p: float
    seed: int = 0
    max_tokens: int = 1
    stop: Optional[Sequence[int]] = None

    def checked(self, stop_ids: Sequence[int]) -> "Sampling":
        """Return the arguments with a list of ids as `stop`, by default stop_ids. Raise ValueError
        if an argument is outside its range.
        """
        at_least("max_tokens", self.max_tokens, 1)
        if not (_is_number(self.temperature) and 0 <= self.temperature < math.inf):
            rule, remedy = "a finite number of at least 0", "0 chooses the most probable token"
            raise expected(f"temperature to be {rule}", short_repr(self.temperature), remedy)
        at_least("top_k", self.top_k, 0)
        if not (_is_number(self.top_p) and 0 < self.top_p <= 1):
            rule = "top_p to be a number above 0 and at most 1"
            raise expected(rule, short_repr(self.top_p), "1 keeps all tokens")
        at_least("seed", self.seed, 0)
        stops = array_of("stop", list(stop_ids if self.stop is None else self.stop))
        if stops.size and stops.dtype.kind not in "iu":
            remedy = "leave it out for those of the artefact"
            raise expected("stop to be token ids", short_repr(self.stop), remedy)
        return replace(self, stop=stops.tolist())

    def choose(self, logits: np.ndarray, draw: Callable[[], float]) -> int:
        """Choose a token id from logits [V], in float64; ties go to the lower id. draw: gives a
        random number.
        """
        if self.temperature == 0:
            return int(logits.argmax())
        scores = logits.astype(np.float64)
        order = np.argsort(-scores, kind="stable")[: self.top_k or None]
        # Without tokens that are forbidden.
        order = order[: max(1, np.isfinite(scores[order]).sum())]
        # Near temperature 0, all differences but that of the largest logit are infinite.
        with np.errstate(over="ignore"):
            probabilities = np.exp((scores[order] - scores[order[0]]) / self.temperature)
        probabilities /= probabilities.sum()
        # The set includes the token with which the sum reaches p. Rounding can leave the sum of all
        # tokens below p, and below the number.
        nucleus = min(int(np.searchsorted(np.cumsum(probabilities), self.top_p)) + 1, len(order))
        probabilities = probabilities[:nucleus] / probabilities[:nucleus].sum()
        place = int(np.searchsorted(np.cumsum(probabilities), draw(), side="right"))
        return int(order[min(place, nucleus - 1)])


class Draws:
    """The numbers of a random generator by index, which a draft can use before the model does."""

    def __init__(self, random: "np.random.Generator") -> None:
        self._random, self._known = random, np.zeros(0)

    def random(self, index: int) -> float:
        """Return the number that the generator gives as its call of this index."""
        if index >= len(self._known):
            more = self._random.random(max(index + 1 - len(self._known), 64))
            self._known = np.concatenate((self._known, more))
        return float(self._known[index])


def generate(
    session: Any,
    prompt: Optional[Inputs],
    sampling: Sampling,
    encoder: Optional[Inputs] = None,
    speculate: Speculate = None,
    before: Optional[Inputs] = None,
) -> Generator[np.ndarray, None, None]:
    """Implement Session.generate, which documents the arguments."""
    manifest = session.manifest
    check_generates(manifest)
    sampling = sampling.checked(manifest.stop_ids)
    if speculate is not None:
        speculation.check_speculate(session, speculate)
    given = encoder if prompt is None else prompt
    rows = 1 if given is None else len(given)
    none: List[List[int]] = [[]] * rows
    earlier = none if before is None else _earlier(before, rows)
    logits = _feed(session, prompt, encoder, rows)
    lengths, read = session.length.tolist(), none if prompt is None else prompt
    draws = Draws(np.random.default_rng(sampling.seed))

    def reader(row: int) -> Reader:
        """Return a reader that uses the random numbers of its row, whatever is drafted."""
        rules = TokenRules(manifest.generation, lengths[row])

        def chosen(index: int, logits: np.ndarray) -> int:
            allowed = rules.applied(logits, index)
            return sampling.choose(allowed, lambda: draws.random(index * rows + row))

        drafts = speculation.Lookup([*earlier[row], *read[row]]) if speculate else None
        return Reader(chosen, sampling.stop or (), sampling.max_tokens, drafts)

    yield from _read(session, logits, [reader(row) for row in range(rows)])


def check_generates(manifest: Manifest) -> None:
    """Raise ValueError unless a model has an output for each token id."""
    last, ids = manifest.outputs[0].axes[-1], manifest.vocabulary
    if not manifest.decodes:
        of_module = f"a module with {last} outputs for {ids or 'no'} token ids"
        got = of_module if manifest.kind == "module" else f"kind {manifest.kind}"
        rule = "a decoder, or a module with an output for each token id, for generate"
        raise expected(rule, got, "call prefill")


def _earlier(before: Inputs, rows: int) -> List[List[int]]:
    """Return the ids that each row has read before the prompt. Raise ValueError for other rows."""
    ids = [array_of("a row of before", row) for row in before] if np.iterable(before) else []
    whole = all(row.ndim == 1 and (not row.size or row.dtype.kind in "iu") for row in ids)
    if len(ids) != rows or not whole:
        rule = f"before to be a list of token ids for each of {rows} rows"
        raise expected(rule, short_repr(before), "give [] for a row that has read none")
    return [row.tolist() for row in ids]


def _read(session: Any, logits: np.ndarray, readers: List[Reader]) -> Iterator[np.ndarray]:
    """Yield the ids of `generate`. With drafts, the session may hold tokens in between that were
    not yielded; in the end it holds those of plain decoding.
    """
    begin, speculator = session.length, Speculator(session)
    chosen = [[reader.take(row)] for reader, row in zip(readers, logits, strict=True)]
    index, rows = 0, list(zip(readers, chosen, strict=True))
    try:
        while not all(reader.done for reader in readers) or index < max(map(len, chosen)):
            while any(not reader.done and len(tokens) <= index for reader, tokens in rows):
                ahead = index + speculation.MOST
                reading = [None if r.done or len(tokens) > ahead else r for r, tokens in rows]
                for tokens, more in zip(chosen, speculator.read(reading), strict=True):
                    tokens += more
            index += 1
            ids = [tokens[index - 1] if len(tokens) >= index else ENDED for tokens in chosen]
            yield np.array(ids, np.int64)
    finally:
        yielded = np.array([min(index, len(tokens)) for tokens in chosen])
        ahead = session.length - begin - np.maximum(yielded - 1, 0)
        if (ahead > 0).any():
            session.rewind(np.maximum(ahead, 0))


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float, np.integer, np.floating)) and not isinstance(value, bool)
