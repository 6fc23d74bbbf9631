"""Speculative decoding (Leviathan et al. 2023; Chen et al. 2023): read drafted tokens together with
the last one, and keep those that the model chooses itself.

Every token is chosen from the logits of the model with the random number of its place, as without
drafts, and a drafted token is kept if it is the chosen one. Tokens are therefore those of plain
decoding with the same seed, whatever is drafted, up to rounding: the logits of a pass of several
tokens differ from those of steps by rounding errors, within the bound of the certificate, so that
two tokens which are that close may be exchanged. In formats that round activations these errors are
large. For a draft that is not random, which a look-up is, this accepts as many tokens as rejection
sampling: each with the probability that the model gives it. A draft model chooses with the same
random numbers as the model (Daliri et al. 2024, Coupling without communication).
"""

import statistics
import time
from collections import deque
from dataclasses import dataclass, field
from typing import Any, Callable, Collection, Deque, List, NamedTuple, Optional, Sequence

import numpy as np

from posenc_export.runtime.artefact.manifest import Manifest
from posenc_export.runtime.session import errors
from posenc_export.runtime.session.argument_arrays import short_repr
from posenc_export.runtime.session.drafts import (
    COUNTS,
    DRAFTED,
    SAMPLES,
    Acceptance,
    DraftModel,
    Drafts,
    Lookup,
    best_count,
    common,
)

LOOKUP = "lookup"
MOST = COUNTS[-1]  # largest number of drafted tokens
LEAST_REWIND = 4 * MOST  # a row may be that many tokens ahead of what is returned
Speculate = Any  # None, LOOKUP, or the Model that drafts


@dataclass
class Reader:
    """A row that is decoded."""

    # Token chosen from logits [V], as the row's generated token of this index
    choose: Callable[[int, np.ndarray], int]
    stops: Collection[int]  # ids that end the row
    most: int  # largest number of tokens to generate
    drafts: Optional[Drafts]  # drafts of the row, or None
    unread: List[int] = field(default_factory=list)  # tokens to read before a token can be chosen
    count: int = 0  # number of tokens generated
    done: bool = False  # whether the row has ended

    def guess(self, ahead: int, logits: np.ndarray) -> int:
        """Return the token that would be chosen from these logits as the next token but `ahead`."""
        return self.choose(self.count + ahead, logits)

    def take(self, logits: np.ndarray) -> int:
        """Choose the next token, which is read by the next pass unless the row has ended."""
        token = self.choose(self.count, logits)
        self.count += 1
        self.unread = [token]
        self.done = token in self.stops or self.count >= self.most
        return token


class Proposal(NamedTuple):
    """What could be drafted for a row."""

    tokens: List[int]  # of a draft that costs nothing
    source: Optional[int]  # a key of drafts.LIKELY; None without a draft


class Speculator:
    """Reads the rows of a session that passes `check`, with drafts where they gain time.

    Attributes:
        passes, drafts, drafted, kept: number of passes, of rows that read drafted tokens in them,
            of these tokens, and of those that were kept.
    """

    def __init__(self, session: Any) -> None:
        self._session, self._acceptance = session, Acceptance()
        # Latest seconds of drafting a token for all rows.
        self._drafting: Deque[float] = deque(maxlen=SAMPLES)
        self.passes = self.drafts = self.drafted = self.kept = 0

    def read(self, readers: Sequence[Optional[Reader]]) -> List[List[int]]:
        """Read the unread tokens of each row, None for one that does not read, in one pass. Return
        the tokens that are chosen after them: at least one for each row that reads. Raise as
        Session.step.
        """
        proposals = [_proposal(reader) for reader in readers]
        drafts = self._drafts(readers, proposals)
        begun = time.perf_counter()
        pairs = list(zip(readers, drafts, strict=True))
        rows = [[*reader.unread, *draft] if reader else [] for reader, draft in pairs]
        lengths = {len(row) for row in rows}
        if lengths == {1}:
            outputs = self._session.step(np.array(rows)[:, 0], copy=False)[:, None]
        else:  # [B,S,V], logits of a row first
            outputs = self._session.prefill(np.array(rows) if len(lengths) == 1 else rows)
        chosen = [
            _kept(reader, draft, outputs[row, : len(rows[row])]) if reader else []
            for row, (reader, draft) in enumerate(pairs)
        ]
        both = zip(drafts, chosen, strict=True)
        back = [len(draft) + 1 - len(tokens) if draft else 0 for draft, tokens in both]
        if any(back):
            self._session.rewind(back)
        seconds = time.perf_counter() - begun
        self._session.pass_costs.record([len(row) for row in rows if row], seconds)
        for (reader, draft), proposal, tokens in zip(pairs, proposals, chosen, strict=True):
            if reader and reader.drafts:
                self._learn(proposal, draft, tokens)
                reader.drafts.extend(tokens)
        self.passes += 1
        return chosen

    def _drafts(
        self, readers: Sequence[Optional[Reader]], proposals: Sequence[Proposal]
    ) -> List[List[int]]:
        drafts: List[List[int]] = [[] for _ in readers]
        if all(proposal.source is None for proposal in proposals):
            return drafts
        room, costs = self._session.room.tolist(), self._session.pass_costs
        limits = [
            min(MOST, reader.most - reader.count - 1, free - len(reader.unread)) if reader else 0
            for reader, free in zip(readers, room, strict=True)
        ]
        reading = [row for row, reader in enumerate(readers) if reader]
        sources, most = [proposals[row].source for row in reading], [limits[row] for row in reading]
        per_token = statistics.median(self._drafting) if self._drafting else 0.0
        per_token /= costs.step(len(reading))
        count = best_count(costs, self._acceptance, sources, most, per_token)
        if not count:
            return drafts
        begun = time.perf_counter()
        for row in reading:
            reader, proposal, width = readers[row], proposals[row], min(count, limits[row])
            if reader and reader.drafts and proposal.source is not None and width > 0:
                drafts[row] = proposal.tokens[:width]
                if not reader.drafts.free:
                    drafts[row] = reader.drafts.propose(width, reader.guess)[0]
        if self.drafts:  # a draft model reads the whole text before its first draft
            self._drafting.append((time.perf_counter() - begun) / count)
        return drafts

    def _learn(self, proposal: Proposal, draft: List[int], chosen: List[int]) -> None:
        """Compare the drafted or proposed tokens with those that were chosen."""
        compared = draft or proposal.tokens[:1]
        if proposal.source is None:
            return
        if not compared:
            self._acceptance.skip(proposal.source)
            return
        right = common(compared, chosen)
        self._acceptance.record(proposal.source, right, min(right + 1, len(compared), len(chosen)))
        self.drafts += bool(draft)
        self.drafted += len(draft)
        self.kept += len(chosen) - 1


def drafts_of(speculate: Speculate, text: Sequence[int]) -> Drafts:
    """Return the drafts of a row with this text."""
    return Lookup(text) if speculate == LOOKUP else DraftModel(speculate.session(), text)


def check(session: Any, speculate: Speculate) -> None:
    """Raise ValueError if the session cannot take back drafted tokens or the draft does not fit."""
    manifest: Manifest = session.manifest
    replaces = any(state.replaced for state in manifest.states)
    limited = replaces or any(state.window for state in manifest.states)
    if limited and session.rewindable < LEAST_REWIND:
        kept = "states that each call replaces" if replaces else "caches of windows"
        rule = f"rewind of at least {LEAST_REWIND} for speculate with {kept}"
        remedy = f"open the session with rewind={LEAST_REWIND}"
        raise errors.expected(rule, session.rewindable, remedy)
    if speculate == LOOKUP:
        return
    if not hasattr(speculate, "manifest"):
        rule = f'speculate to be "{LOOKUP}" or a loaded decoder'
        raise errors.expected(rule, short_repr(speculate), "leave it out for plain decoding")
    draft: Manifest = speculate.manifest
    decodes = draft.decodes and draft.states and not draft.encoder
    if not decodes or draft.vocabulary != manifest.vocabulary:
        reads = " that reads an encoder" if draft.encoder else ""
        rule = f"a draft model that is a decoder of {manifest.vocabulary} ids"
        got = f"kind {draft.kind} of {draft.vocabulary} ids{reads}"
        raise errors.expected(rule, got, "use a smaller model of the same family")


def _proposal(reader: Optional[Reader]) -> Proposal:
    if reader is None or reader.drafts is None:
        return Proposal([], None)
    if not reader.drafts.free:
        return Proposal([], DRAFTED)
    tokens, source = reader.drafts.propose(MOST, reader.guess)
    return Proposal(tokens, source if tokens else None)


def _kept(reader: Reader, draft: List[int], logits: np.ndarray) -> List[int]:
    """Choose tokens from logits [S,V] of a row as long as the drafted ones are those chosen."""
    chosen: List[int] = []
    last = logits[len(logits) - len(draft) - 1 :]
    for drafted, token_logits in zip([*draft, None], last, strict=True):
        chosen.append(reader.take(token_logits))
        if reader.done or chosen[-1] != drafted:
            break
    return chosen
