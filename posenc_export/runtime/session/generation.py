"""Generate tokens with a session: feed the first tokens of a text, with those that an artefact
forces, choose a token from the logits, feed it, and so on.

Speculative decoding (Leviathan et al. 2023; Chen et al. 2023) reads drafted tokens together with
the last one, and keeps those that the model chooses itself. They are looked up in the text.

Every token is chosen from the logits of the model with the random number of its place, as without
drafts, and a drafted token is kept if it is the chosen one. Tokens are therefore those of plain
decoding with the same seed, whatever is drafted, up to rounding: the logits of a pass of several
tokens differ from those of steps by rounding errors, within the bound of the certificate, so that
two tokens which are that close may be exchanged. In formats that round activations these errors are
large. As a look-up is not random, this accepts as many tokens as rejection sampling: each with the
probability that the model gives it.
"""

import functools
import math
from dataclasses import InitVar, dataclass, field, replace
from typing import Any, Callable, Generator, Sequence

import numpy as np

from posenc_export.runtime.artefact.manifest import Manifest
from posenc_export.runtime.session import arguments
from posenc_export.runtime.session.arguments import Inputs, array_of, at_least, short_repr
from posenc_export.runtime.session.errors import expected
from posenc_export.shared.refusal import refusal
from posenc_export.shared.tables import counted

ENDED = -1  # id that is given for a row that has ended
SIZES = (8, 4, 2)  # tokens of an n-gram that a look-up searches, the most reliable first
MOST = 15  # largest number of drafted tokens
LOOKUP = "lookup"
LEAST_REWIND = 4 * MOST  # a row may be that many tokens ahead of what is returned
Speculate = str | None  # None or LOOKUP


def _feed(session: Any, prompt: Inputs | None, encoder: Inputs | None, rows: int) -> Any:
    """Feed the prompt, or the first tokens of a decoder that reads an encoder. Return the logits
    after them [B,V]. Raise ValueError as Session.generate does.
    """
    if prompt is None:
        prompt = [[start_token(session.manifest)]] * rows
    counts = arguments.padded_rows(prompt, session.manifest.inputs[0])[1]
    arguments.check_every_row(counts, "row of the prompt")
    return session.prefill(prompt, encoder=encoder, logits_to_keep=1)[:, -1]


def start_token(manifest: Manifest) -> int:
    """Return the start token. Raise ValueError for a model that has none."""
    if not manifest.encoder or not manifest.start_ids:
        got = "one that reads none" if not manifest.encoder else "one without start_ids"
        rule = "a decoder that reads an encoder and has start_ids"
        raise refusal("generate", rule, got, "give a prompt, and no encoder")
    return manifest.start_ids[0]


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
    stop: Sequence[int] | None = None

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


class Lookup:
    """The continuation of the last earlier occurrence of the latest tokens (Saxena 2023, Prompt
    Lookup Decoding), of the longest n-gram of SIZES that occurs in the text of the row.

    Attributes:
        count: number of tokens to draft next.
    """

    def __init__(self, text: Sequence[int]) -> None:
        self.count = 1
        self._text: list[int] = []
        # By n-gram: index of the token after its last occurrence.
        self._following: dict[tuple[int, ...], int] = {}
        self.extend(text)

    def extend(self, tokens: Sequence[int]) -> None:
        """Append tokens to the text of the row."""
        text = self._text
        for token in tokens:
            for size in SIZES:  # the n-grams that end before this token
                if len(text) >= size:
                    self._following[tuple(text[-size:])] = len(text)
            text.append(int(token))

    def propose(self) -> list[int]:
        """Return `count` tokens that may follow, at least one; none if no n-gram occurs before."""
        text = self._text
        for size in SIZES:
            begin = self._following.get(tuple(text[-size:])) if len(text) >= size else None
            if begin is not None:
                period = len(text) - begin  # past its end, the text is taken to repeat
                return [text[begin + index % period] for index in range(max(self.count, 1))]
        return []


def next_count(count: int, right: bool) -> int:
    """Return how many tokens to draft after `count`: 0, 1, 3, 7 or 15, read in passes of 2, 4, 8 or
    16. right: whether all drafted tokens were chosen; after 0, whether the first would have been.
    """
    return min(2 * count + 1, MOST) if right else count // 2


@dataclass(eq=False)
class Reader:
    """A row that is decoded after a prompt of `length` tokens. row: its index."""

    manifest: Manifest
    length: InitVar[int]
    sampling: Sampling  # checked
    row: int = 0
    drafts: Lookup | None = None  # None for plain decoding
    unread: list[int] = field(default_factory=list)  # tokens to read before a token can be chosen
    tokens: list[int] = field(default_factory=list)  # those generated
    done: bool = False  # whether the row has ended

    def __post_init__(self, length: int) -> None:
        self._rules = self.manifest.generation
        # Whether the first token is forced
        self._forces = length == 1 and getattr(self._rules, "forced_first", None) is not None

    @functools.cached_property
    def _random(self) -> "np.random.Generator":  # its import takes 0.02 s
        return np.random.default_rng((self.sampling.seed, self.row))

    def take(self, logits: np.ndarray) -> int:
        """Choose the next token from logits [V]. It is read by the next pass unless the row has
        ended.
        """
        token = self.sampling.choose(self._allowed(logits), lambda: self._random.random())
        self.tokens.append(token)
        if self.drafts:
            self.drafts.extend([token])
        self.unread = [token]
        full = len(self.tokens) >= self.sampling.max_tokens
        self.done = full or token in (self.sampling.stop or ())
        return token

    def _allowed(self, logits: np.ndarray) -> np.ndarray:
        """Return logits [V] with -inf for tokens that the artefact forbids here."""
        rules = self._rules
        if rules is None:
            return logits
        logits = logits.copy()
        if not self.tokens and self._forces:
            logits[:] = -math.inf
            logits[rules.forced_first] = 0.0
        logits[list(rules.suppressed)] = -math.inf
        if len(self.tokens) == int(self._forces):  # the first token that is not forced
            logits[list(rules.suppressed_first)] = -math.inf
        return logits

    def keep(self, draft: list[int], logits: np.ndarray) -> list[int]:
        """Choose tokens from logits [S,V] until one differs from the draft. Return them."""
        chosen: list[int] = []
        for drafted, of_token in zip([*draft, None], logits[-len(draft) - 1 :], strict=True):
            chosen.append(self.take(of_token))
            if self.done or chosen[-1] != drafted:
                break
        return chosen


def generate(
    session: Any,
    prompt: Inputs | None,
    sampling: Sampling,
    encoder: Inputs | None = None,
    speculate: Speculate = None,
    before: Inputs | None = None,
) -> Generator[np.ndarray, None, None]:
    """Implement Session.generate, which documents the arguments. With drafts, the session may hold
    tokens in between that were not yielded; in the end it holds those of plain decoding.
    """
    manifest = session.manifest
    check_generates(manifest)
    sampling = sampling.checked(manifest.stop_ids)
    if speculate is not None:
        check_speculate(session, speculate)
    given = encoder if prompt is None else prompt
    rows = 1 if given is None else len(given)
    none: list[list[int]] = [[]] * rows
    earlier = none if before is None else _earlier(before, rows)
    logits = _feed(session, prompt, encoder, rows)
    begin, read = session.length, none if prompt is None else prompt
    texts = [Lookup([*earlier[row], *read[row]]) if speculate else None for row in range(rows)]
    most = [min(sampling.max_tokens, room + 1) for room in session.room.tolist()]  # last: not fed
    readers = [
        Reader(manifest, int(begin[row]), replace(sampling, max_tokens=most[row]), row, drafts)
        for row, drafts in enumerate(texts)
    ]
    for reader, row in zip(readers, logits, strict=True):
        reader.take(row)
    chosen, index = [reader.tokens for reader in readers], 0
    try:
        while not all(reader.done for reader in readers) or index < max(map(len, chosen)):
            while any(not reader.done and len(reader.tokens) <= index for reader in readers):
                ahead = index + MOST
                _read(session, [None if r.done or len(r.tokens) > ahead else r for r in readers])
            index += 1
            ids = [tokens[index - 1] if len(tokens) >= index else ENDED for tokens in chosen]
            yield np.array(ids, np.int64)
    finally:
        yielded = np.array([min(index, len(tokens)) for tokens in chosen])
        excess = session.length - begin - np.maximum(yielded - 1, 0)
        if (excess > 0).any():
            session.rewind(np.maximum(excess, 0))


def _read(session: Any, readers: Sequence[Reader | None]) -> None:
    """Read the unread tokens of each row and its drafts in one pass, and choose at least one token
    after them. A row whose reader is None reads nothing. Raise as Session.step.
    """
    proposals = [r.drafts.propose() if r and r.drafts else [] for r in readers]
    drafts = _drafts(session, readers, proposals)
    pairs = list(zip(readers, drafts, strict=True))
    rows = [[*reader.unread, *draft] if reader else [] for reader, draft in pairs]
    lengths = {len(row) for row in rows}
    if lengths == {1}:
        outputs = session.step(np.array(rows)[:, 0], copy=False)[:, None]
    else:  # [B,S,V], logits of a row first
        outputs = session.prefill(np.array(rows) if len(lengths) == 1 else rows)
    chosen = [
        reader.keep(draft, outputs[row, : len(rows[row])]) if reader else []
        for row, (reader, draft) in enumerate(pairs)
    ]
    both = zip(drafts, chosen, strict=True)
    back = [len(draft) + 1 - len(tokens) if draft else 0 for draft, tokens in both]
    if any(back):
        session.rewind(back)
    for (reader, draft), proposal, tokens in zip(pairs, proposals, chosen, strict=True):
        if reader and reader.drafts and proposal:
            compared = draft or proposal[:1]
            right = compared == tokens[: len(compared)]
            reader.drafts.count = next_count(reader.drafts.count, right)


def _drafts(
    session: Any, readers: Sequence[Reader | None], proposals: Sequence[list[int]]
) -> list[list[int]]:
    """Return the proposed tokens for which rows have room and runs of the graph are saved."""
    drafts, room = [], session.room.tolist()
    # Rows that are read one by one take as many runs of the graph as one step has rows.
    separate = session.manifest.continuation_rows == 1
    least = sum(map(bool, readers)) if separate else 1
    for reader, proposal, free in zip(readers, proposals, room, strict=True):
        most = 0
        if reader and reader.drafts and reader.drafts.count >= least:
            left = reader.sampling.max_tokens - len(reader.tokens) - 1
            most = max(min(left, free - len(reader.unread)), 0)
        drafts.append(proposal[:most])
    return drafts


def check_generates(manifest: Manifest) -> None:
    """Raise ValueError unless a model has an output for each token id."""
    last, ids = manifest.outputs[0].axes[-1], manifest.vocabulary
    if not manifest.decodes:
        of_module = f"a module with {last} outputs for {ids or 'no'} token ids"
        got = of_module if manifest.kind == "module" else f"kind {manifest.kind}"
        rule = "a decoder, or a module with an output for each token id, for generate"
        raise expected(rule, got, "call prefill, or use posenc inspect --runtime")


def _earlier(before: Inputs, rows: int) -> list[list[int]]:
    """Return the ids that each row has read before the prompt. Raise ValueError for other rows."""
    ids = [array_of("a row of before", row) for row in before] if np.iterable(before) else []
    whole = all(row.ndim == 1 and (not row.size or row.dtype.kind in "iu") for row in ids)
    if len(ids) != rows or not whole:
        rule = f"before to be a list of token ids for each of {counted(rows, 'row')}"
        raise expected(rule, short_repr(before), "give [] for a row that has read none")
    return [row.tolist() for row in ids]


def check_speculate(session: Any, speculate: Speculate) -> None:
    """Raise ValueError for another draft, or if the session cannot take back drafted tokens."""
    manifest: Manifest = session.manifest
    if speculate != LOOKUP:
        rule = f'speculate to be "{LOOKUP}"'
        raise expected(rule, short_repr(speculate), "leave it out for plain decoding")
    replaces = any(state.replaced for state in manifest.states)
    limited = replaces or any(state.window for state in manifest.states)
    if limited and session.rewindable < LEAST_REWIND:
        kept = "states that each call replaces" if replaces else "caches of windows"
        rule = f"rewind of at least {LEAST_REWIND} for speculate with {kept}"
        remedy = f"open the session with rewind={LEAST_REWIND}"
        raise expected(rule, session.rewindable, remedy)


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float, np.integer, np.floating)) and not isinstance(value, bool)
