"""Continuous batching: requests join and leave the rows of one session between steps."""

import logging
from collections import deque
from typing import Sequence

import numpy as np

from posenc_export.runtime.artefact.manifest import Manifest
from posenc_export.runtime.session import generation
from posenc_export.runtime.session.caches import allocates_lazily
from posenc_export.runtime.session.errors import GraphError
from posenc_export.runtime.session.model import Model
from posenc_export.runtime.session.prefixes import BLOCK, Prefixes, can_share
from posenc_export.runtime.session.session import Session
from posenc_export.serve.memory import longest_row, most_needed
from posenc_export.serve.requests import FAILED, LENGTH, STOP, Limits, Request, Token, most_tokens
from posenc_export.shared.refusal import refusal

LOG = logging.getLogger(__name__)


class Row:
    """A request with a row of the session, of whose prompt `known` tokens are not read."""

    def __init__(self, request: Request, manifest: Manifest, known: int = 0) -> None:
        self.request = request
        self.kept = known // BLOCK  # blocks of its tokens that were given to the prefixes
        # Tokens that were not fed yet: of the prompt, later the last generated one
        self.unread: deque[int] = deque(request.prompt[known:])
        sampling = generation.Sampling(
            request.temperature, request.top_k, request.top_p,
            request.seed, request.max_tokens, request.stop_ids,
        )  # fmt: skip
        self.reader = generation.Reader(manifest, len(request.prompt), sampling)
        self.generated = self.reader.tokens

    def take(self, count: int) -> list[int]:
        """Remove and return the next `count` tokens to feed."""
        return [self.unread.popleft() for _ in range(min(count, len(self.unread)))]

    def next_token(self, logits: np.ndarray) -> Token:
        """Choose the next token from its logits [V]. The next step feeds it."""
        request, token = self.request, self.reader.take(logits)
        self.unread.append(token)
        ended = LENGTH if self.reader.done else ""
        ended = STOP if token in request.stop_ids else ended
        count = request.logprobs
        logprobs = () if count is None else log_probabilities(logits, token, count)
        return Token(request, token, ended, logprobs)


def log_probabilities(logits: np.ndarray, token: int, count: int) -> tuple[tuple[int, float], ...]:
    """Return id and logarithm of the probability (softmax of logits [V], before temperature and
    sampling) of a token, then of the `count` most probable ones.
    """
    shifted = logits.astype(np.float64) - logits.max()
    logarithms = shifted - np.log(np.exp(shifted).sum())
    count = min(count, len(logarithms))
    # Sorting these alone takes a fraction of the time of sorting all.
    least = np.partition(logarithms, -count)[-count] if count else np.inf
    likely = np.flatnonzero(~(logarithms < least))
    ids = (token, *likely[np.argsort(-logarithms[likely], kind="stable")][:count].tolist())
    return tuple((id, float(logarithms[id])) for id in ids)


class Batch:
    """The rows of one session, driven by alternating calls of `read` and `step` on one thread.
    Raises ValueError if the caches of a row do not fit the memory, GraphError if the graph cannot
    run.

    A turn feeds at most a chunk of the tokens of all prompts, so that running rows wait for one
    chunk between two steps. The row of a longer prompt takes no part in the steps in between. The
    caches of all rows are kept block by block, as they are filled, for requests that begin alike.

    Attributes:
        prefixes: the kept caches; None without memory for them, or with states that calls replace.
    """

    def __init__(self, model: Model, limits: Limits) -> None:
        self.limits = limits
        self.rows: list[Row] = []
        self._left = 0  # tokens of prompts that the turn may still feed
        # Rows of lazy caches take no memory until they are used.
        rows = limits.rows if allocates_lazily(model.graph) else 1
        self.session = Session(model.graph, rows, limits.context, 1)
        blocks = 0
        if can_share(model.manifest):
            blocks = limits.prefix_memory // (model.manifest.slot_bytes * BLOCK)
        self.prefixes = Prefixes(model.graph, blocks) if blocks else None
        self.probe(1)
        most = longest_row(self.session, limits.memory, limits.context, limits.chunk)
        if most < limits.context:
            rule = f"memory for caches of a row of {limits.context} tokens"
            remedy = f"give more --memory or a --context of at most {most}"
            raise refusal("serve", rule, f"{limits.memory / 1e9:.1f} GB", remedy)

    def probe(self, rows: int) -> None:
        """Feed two tokens to each of `rows` new rows, and remove them, to try the graph."""
        self.session.admit([[0]] * rows)
        self.session.step(np.zeros(rows, np.int64))
        self.session.reset()

    def read(self, waiting: deque[Request]) -> list[Token]:
        """Feed at most a chunk of prompt tokens. Free rows are given to the first requests in
        `waiting`. Return the first generated token of each request whose prompt is complete. After
        a GraphError, call `fail`.
        """
        self._left, tokens = self.limits.chunk, list[Token]()
        for index, row in enumerate(self.rows):
            if not row.generated and (part := row.take(self._left)):
                parts: list[list[int]] = [[] for _ in self.rows]
                parts[index] = part
                logits = self.session.prefill(parts, logits_to_keep=1)[index]
                tokens += self._read_part(index, row, len(part), logits)
        self._leave_ended(tokens)
        while waiting and self._left and self._has_room_for(waiting[0]):
            tokens += self._enter(waiting[0])
            # Last, so that the request is in the queue or has a row whatever is raised.
            waiting.popleft()
        return tokens

    def _has_room_for(self, request: Request) -> bool:
        """Whether there is a row for a request, and memory up to the last token of each row."""
        rows = len(self.rows) + 1
        tokens = max(most_tokens(other) for other in (request, *(row.request for row in self.rows)))
        needed = most_needed(self.session, rows, tokens, self.limits.chunk)
        if self.session.memory + needed > self.limits.memory:
            self.session.trim()
        return rows <= self.limits.rows and needed <= self.limits.memory

    def step(self) -> list[Token]:
        """Feed one token of every row whose prompt was read. Return the generated tokens. After a
        GraphError, call `fail`.
        """
        running = [index for index, row in enumerate(self.rows) if row.generated]
        if not running:
            return []
        logits = self._stepped(len(running) == len(self.rows))
        tokens = [self.rows[i].next_token(logits[i]) for i in running]
        for index in running:
            self._share(index)
        self._leave_ended(tokens)
        return tokens

    def _stepped(self, all_run: bool) -> np.ndarray:
        """Feed the last generated token of each row that has one. Return the logits [B,V]."""
        if all_run:
            ids = np.array([row.unread.popleft() for row in self.rows], np.int64)
            return self.session.step(ids, copy=False)
        rows = [row.take(1) if row.generated else [] for row in self.rows]
        return self.session.prefill(rows, logits_to_keep=1)[:, 0]

    def leave(self, requests: Sequence[Request]) -> None:
        """Retire the rows of these requests. The last row takes the index of a retired one."""
        indices = [index for index, row in enumerate(self.rows) if row.request in requests]
        for index in reversed(indices):
            self._share(index)
            self.session.retire(index)
            self.rows[index] = self.rows[-1]
            self.rows.pop()

    def _leave_ended(self, tokens: Sequence[Token]) -> None:
        self.leave([token.request for token in tokens if token.ended])

    def fail(self) -> list[Token]:
        """Remove all rows. Return a failed token for each."""
        failed = [Token(row.request, -1, FAILED) for row in self.rows]
        self.rows.clear()
        self.session.reset()
        return failed

    def _enter(self, request: Request) -> list[Token]:
        """Admit a row with the known tokens of its prompt and as many more as the turn allows."""
        row, prefix = Row(request, self.session.manifest), None
        if self.prefixes:
            prefix = self.prefixes.find(request.prompt, request.sharing)
        if prefix:
            row = Row(request, self.session.manifest, prefix.length)
        part = row.take(self._left)
        try:
            logits = self.session.admit([part], logits_to_keep=1, prefix=prefix)[0]
        except GraphError as error:  # the row was not admitted; the other rows are not affected
            LOG.error("%s; a prompt of %d tokens was not read", error, len(request.prompt))
            return [Token(request, -1, FAILED)]
        self.rows.append(row)
        tokens = self._read_part(len(self.rows) - 1, row, len(part), logits)
        self._leave_ended(tokens)
        return tokens

    def _read_part(self, index: int, row: Row, count: int, logits: np.ndarray) -> list[Token]:
        """Count tokens that were read. Return the first generated token, from logits [1,V], after
        the last.
        """
        self._left -= count
        self._share(index)
        return [] if row.unread else [row.next_token(logits[-1])]

    def _share(self, index: int) -> None:
        """Keep the caches of what a row has read, if a block was filled."""
        row = self.rows[index]
        read = len(row.request.prompt) + len(row.generated) - len(row.unread)
        if self.prefixes is not None and read // BLOCK > row.kept:
            row.kept = read // BLOCK
            tokens = [*row.request.prompt, *row.generated][:read]
            self.session.share(index, tokens, self.prefixes, row.request.sharing)
