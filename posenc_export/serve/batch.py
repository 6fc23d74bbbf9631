"""Continuous batching: requests join and leave the rows of one session between steps."""

import logging
import time
from collections import deque
from typing import Any, Deque, List, Optional, Sequence, Tuple

import numpy as np

from posenc_export.runtime.session.drafts import Drafts
from posenc_export.runtime.session.errors import GraphError
from posenc_export.runtime.session.generation import choose
from posenc_export.runtime.session.model import Model
from posenc_export.runtime.session.prefixes import BLOCK, Prefixes, can_share
from posenc_export.runtime.session.session import Session
from posenc_export.runtime.session.speculation import LEAST_REWIND, LOOKUP, Reader, Speculator, drafts_of
from posenc_export.serve.memory import bytes_per_slot
from posenc_export.serve.pace import Pace
from posenc_export.serve.requests import FAILED, LENGTH, STOP, Limits, Request, Token

LOG = logging.getLogger(__name__)


class Row:
    """A request with a row of the session.

    Args:
        request: the request.
        known: number of tokens of its prompt that are not read.

    Attributes:
        unread: tokens that were not fed yet: the rest of the prompt, later the last generated token.
        generated: the generated tokens.
        drafts: drafts of its next tokens, from its first step with drafts on.
    """

    def __init__(self, request: Request, known: int = 0) -> None:
        self.request = request
        self.unread: Deque[int] = deque(request.prompt[known:])
        self.generated: List[int] = []
        self.random = np.random.default_rng(request.seed)
        self.drafts: Optional[Drafts] = None

    def take(self, count: int) -> List[int]:
        """Remove and return the next `count` tokens to feed."""
        return [self.unread.popleft() for _ in range(min(count, len(self.unread)))]


class Batch:
    """The rows of one session, driven by alternating calls of `read` and `step`. Must be used by one thread at a time.

    A prompt longer than a chunk is fed over several turns, so that running rows wait for at most one chunk, whose length follows the time of their steps. In the
    steps in between, its row feeds the next token of the prompt, so that every step is one call of the graph. The caches of prompts, and of rows that end, are
    kept for requests that begin alike.

    Args:
        model: a model that passes requests.check_model.
        limits: number of rows, context, chunk and memory of prefixes.

    Attributes:
        speculator: reads rows with drafted tokens; None if none are drafted.
        prefixes: the kept caches; None if there is no memory for them, or the model has states that each call replaces.

    Raises:
        ValueError: the caches of all rows do not fit the memory.
        GraphError: the graph cannot run.
    """

    def __init__(self, model: Model, limits: Limits) -> None:
        self.limits = limits
        self.rows: List[Row] = []
        self.pace = Pace(limits.chunk)

        def opened(rows: int, slots: int) -> Any:
            caches = model.graph.open(rows, slots)
            caches.touch()
            return caches

        try:
            if model.manifest.capacity_bucket:
                opened(limits.rows, limits.context)  # a trial, since these caches begin smaller
            self.session = Session(opened, model.manifest, limits.rows, limits.context, LEAST_REWIND if limits.speculate else 1, model.provider)
            self.speculator = Speculator(self.session) if limits.speculate else None
            blocks = limits.prefix_memory // (bytes_per_slot(model.manifest) * BLOCK) if can_share(model.manifest) else 0
            self.prefixes = Prefixes(model.graph.open, blocks) if blocks else None
            self.probe(1)  # allocates the caches of all rows
            self.probe(limits.rows)  # and the memory that a step of all rows needs
        except (MemoryError, ValueError) as error:  # numpy raises ValueError for sizes beyond 64 bits
            rule = f"memory for caches of {limits.rows} rows of {limits.context} tokens"
            raise ValueError(f"serve: expected {rule}, got an error ({error}); give fewer --rows or a smaller --context") from None

    def probe(self, rows: int) -> None:
        """Feed two tokens to each of `rows` new rows of an empty session, and remove the rows. Raise GraphError or MemoryError if the graph cannot run at all."""
        self.session.admit([[0]] * rows)
        self.session.step(np.zeros(rows, np.int64))
        self.session.reset()

    def read(self, waiting: Deque[Request]) -> List[Token]:
        """Feed one chunk of prompt tokens. Free rows are given to the first requests in `waiting`.

        Returns:
            The first generated token of each request whose prompt is complete.

        Raises:
            GraphError: the graph failed on the rest of a prompt; call `fail`.
        """
        room, seconds = self.pace.room(any(row.generated for row in self.rows))
        tokens: List[Token] = []
        since, took = time.perf_counter(), 0.0
        for index, row in enumerate(self.rows):
            room -= self._continue_prompt(index, row, room)
        while room > 0 and waiting and len(self.rows) < self.limits.rows and (not took or time.perf_counter() - since + took <= seconds):
            began = time.perf_counter()
            entered, new = self._enter(waiting[0], room)
            waiting.popleft()  # last, so that the request is in the queue or has a row whatever is raised
            room, tokens, took = room - entered, tokens + new, time.perf_counter() - began
        return tokens

    def step(self) -> List[Token]:
        """Feed one token of every row, or drafted ones too. Return the generated tokens. After a GraphError, call `fail`."""
        since = time.perf_counter()
        if self.speculator is not None and all(row.generated for row in self.rows):
            tokens = self._read_drafts(self.speculator)
        else:
            logits = self.session.step(np.array([row.unread.popleft() for row in self.rows], np.int64), copy=False)
            likeliest = logits.argmax(-1).tolist()
            tokens = [self._next(row, likeliest[index], logits[index : index + 1]) for index, row in enumerate(self.rows) if not row.unread]
        self.leave([token.request for token in tokens if token.ended])
        self.pace.stepped(time.perf_counter() - since)
        return tokens

    def _read_drafts(self, speculator: Speculator) -> List[Token]:
        """Feed the last generated token of every row, with drafted ones after it where that is faster. Return the generated tokens."""
        tokens: List[Token] = []

        def reader(row: Row) -> Reader:
            def chosen(index: int, logits: np.ndarray) -> int:
                tokens.append(self._next(row, int(logits.argmax()), logits[None]))
                return tokens[-1].id

            request = row.request
            if row.drafts is None:
                row.drafts = drafts_of(LOOKUP, [*request.prompt, *row.generated])
            return Reader(chosen, request.stop_ids, request.max_tokens, row.drafts, [row.generated[-1]], len(row.generated))

        for row, more in zip(self.rows, speculator.read([reader(row) for row in self.rows]), strict=True):
            row.unread = deque(more[-1:])
        return tokens

    def leave(self, requests: Sequence[Request]) -> None:
        """Retire the rows of these requests, as far as they have one. The last row takes the index of a retired row, as in the session."""
        for index in reversed([index for index, row in enumerate(self.rows) if row.request in requests]):
            self._share(index)
            self.session.retire(index)
            self.rows[index] = self.rows[-1]
            self.rows.pop()

    def fail(self) -> List[Token]:
        """Remove all rows. Return a failed token for each."""
        failed = [Token(row.request, -1, FAILED) for row in self.rows]
        self.rows.clear()
        self.session.reset()
        return failed

    def _enter(self, request: Request, room: int) -> Tuple[int, List[Token]]:
        """Admit a row with the known tokens of its prompt and up to `room` more.

        Returns:
            Number of tokens fed, and the first generated token if the whole prompt was.
        """
        prefix = self.prefixes.find(request.prompt, request.sharing) if self.prefixes is not None else None
        row = Row(request, prefix.length if prefix else 0)
        part, since = row.take(room), time.perf_counter()
        try:
            logits = self.session.admit([part], logits_to_keep=1, prefix=prefix)[:, -1]
        except GraphError as error:  # the row was not admitted; the other rows are not affected
            LOG.error("%s; a prompt of %d tokens was not read", error, len(request.prompt))
            return len(part), [Token(request, -1, FAILED)]
        self.rows.append(row)
        self._share(len(self.rows) - 1)
        self.pace.read(len(part), time.perf_counter() - since)
        tokens = [] if row.unread else [self._next(row, int(logits[0].argmax()), logits)]
        self.leave([token.request for token in tokens if token.ended])
        return len(part), tokens

    def _continue_prompt(self, index: int, row: Row, room: int) -> int:
        """Feed up to `room` more tokens of a row's prompt, except the last unread token, which the next step feeds. Return the number of tokens fed."""
        part, since = row.take(max(0, min(room, len(row.unread) - 1))), time.perf_counter()
        if part:
            empty: List[int] = []
            self.session.prefill([part if other == index else empty for other in range(len(self.rows))], logits_to_keep=1)
            self._share(index)
            self.pace.read(len(part), time.perf_counter() - since)
        return len(part)

    def _share(self, index: int) -> None:
        """Keep the caches of what a row has read, for requests that begin alike."""
        if self.prefixes is not None:
            row = self.rows[index]
            tokens = [*row.request.prompt, *row.generated][: int(self.session.length[index])]
            self.session.share(index, tokens, self.prefixes, row.request.sharing)

    def _next(self, row: Row, likeliest: int, logits: np.ndarray) -> Token:
        """Choose the next token of a row from its logits [1,V]. The next step feeds it."""
        request = row.request
        token = likeliest if request.temperature == 0 else int(choose(logits, request.temperature, request.top_k, request.top_p, row.random)[0])
        row.generated.append(token)
        row.unread.append(token)
        ended = STOP if token in request.stop_ids else LENGTH if len(row.generated) == request.max_tokens else ""
        return Token(request, token, ended, () if request.logprobs is None else log_probabilities(logits[0], token, request.logprobs))


def log_probabilities(logits: np.ndarray, token: int, count: int) -> Tuple[Tuple[int, float], ...]:
    """Return id and logarithm of the probability (softmax of logits [V], before temperature and sampling) of a token, then of the `count` most probable ones."""
    shifted = logits.astype(np.float64) - logits.max()
    logarithms = shifted - np.log(np.exp(shifted).sum())
    return tuple((int(one), float(logarithms[one])) for one in (token, *np.argsort(-logarithms, kind="stable")[:count]))
