"""Continuous batching: requests join and leave the rows of one session between steps."""

import logging
from collections import deque
from typing import Any, Deque, List, Sequence, Tuple

import numpy as np

from posenc_export.runtime.session.errors import GraphError
from posenc_export.runtime.session.generation import choose
from posenc_export.runtime.session.model import Model
from posenc_export.runtime.session.session import Session
from posenc_export.serve.requests import FAILED, LENGTH, STOP, Limits, Request, Token

LOG = logging.getLogger(__name__)


class Row:
    """A request with a row of the session.

    Attributes:
        unread: tokens that were not fed yet: the rest of the prompt, later the last generated token.
        generated: number of generated tokens.
    """

    def __init__(self, request: Request) -> None:
        self.request = request
        self.unread: Deque[int] = deque(request.prompt)
        self.generated = 0
        self.random = np.random.default_rng(request.seed)

    def take(self, count: int) -> List[int]:
        """Remove and return the next `count` tokens to feed."""
        return [self.unread.popleft() for _ in range(min(count, len(self.unread)))]


class Batch:
    """The rows of one session, driven by alternating calls of `read` and `step`. Must be used by one thread at a time.

    A prompt longer than `limits.chunk` is fed over several turns, so that running rows wait for at most one chunk. In the steps in between, its row feeds the
    next token of the prompt, so that every step is one call of the graph.

    Args:
        model: a model that passes requests.check_model.
        limits: number of rows, context and chunk.

    Raises:
        ValueError: the caches of all rows do not fit the memory.
        GraphError: the graph cannot run.
    """

    def __init__(self, model: Model, limits: Limits) -> None:
        self.limits = limits
        self.rows: List[Row] = []

        def opened(rows: int, slots: int) -> Any:
            caches = model.graph.open(rows, slots)
            caches.touch()
            return caches

        try:
            if model.manifest.capacity_bucket:
                opened(limits.rows, limits.context)  # a trial, since these caches begin smaller
            self.session = Session(opened, model.manifest, limits.rows, limits.context, 1, model.provider)
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
        room, tokens = self.limits.chunk, []
        for index, row in enumerate(self.rows):
            room -= self._continue_prompt(index, row, room)
        while room > 0 and waiting and len(self.rows) < self.limits.rows:
            row = Row(waiting[0])
            part = row.take(room)
            room -= len(part)
            tokens += self._enter(row, part)
            waiting.popleft()  # last, so that the request is in the queue or has a row whatever is raised
        return tokens

    def step(self) -> List[Token]:
        """Feed one token of every row. Return the generated tokens. After a GraphError, call `fail`."""
        logits = self.session.step(np.array([row.unread.popleft() for row in self.rows], np.int64), copy=False)
        likeliest = logits.argmax(-1).tolist()
        tokens = [self._next(row, likeliest[index], logits[index : index + 1]) for index, row in enumerate(self.rows) if not row.unread]
        self.leave([token.request for token in tokens if token.ended])
        return tokens

    def leave(self, requests: Sequence[Request]) -> None:
        """Retire the rows of these requests, as far as they have one. The last row takes the index of a retired row, as in the session."""
        for index in reversed([index for index, row in enumerate(self.rows) if row.request in requests]):
            self.session.retire(index)
            self.rows[index] = self.rows[-1]
            self.rows.pop()

    def fail(self) -> List[Token]:
        """Remove all rows. Return a failed token for each."""
        failed = [Token(row.request, -1, FAILED) for row in self.rows]
        self.rows.clear()
        self.session.reset()
        return failed

    def _enter(self, row: Row, part: List[int]) -> List[Token]:
        """Admit a row with the first part of its prompt. Return its first generated token if that is the whole prompt."""
        try:
            logits = self.session.admit([part])[:, -1]
        except GraphError as error:  # the row was not admitted; the other rows are not affected
            LOG.error("%s; a prompt of %d tokens was not read", error, len(row.request.prompt))
            return [Token(row.request, -1, FAILED)]
        self.rows.append(row)
        tokens = [] if row.unread else [self._next(row, int(logits[0].argmax()), logits)]
        self.leave([token.request for token in tokens if token.ended])
        return tokens

    def _continue_prompt(self, index: int, row: Row, room: int) -> int:
        """Feed up to `room` more tokens of a row's prompt, except the last unread token, which the next step feeds. Return the number of tokens fed."""
        part = row.take(max(0, min(room, len(row.unread) - 1)))
        if part:
            empty: List[int] = []
            self.session.prefill([part if other == index else empty for other in range(len(self.rows))])
        return len(part)

    def _next(self, row: Row, likeliest: int, logits: np.ndarray) -> Token:
        """Choose the next token of a row from its logits [1,V]. The next step feeds it."""
        request = row.request
        token = likeliest if request.temperature == 0 else int(choose(logits, request.temperature, request.top_k, request.top_p, row.random)[0])
        row.generated += 1
        row.unread.append(token)
        ended = STOP if token in request.stop_ids else LENGTH if row.generated == request.max_tokens else ""
        return Token(request, token, ended, () if request.logprobs is None else log_probabilities(logits[0], token, request.logprobs))


def log_probabilities(logits: np.ndarray, token: int, count: int) -> Tuple[Tuple[int, float], ...]:
    """Return id and logarithm of the probability (softmax of logits [V], before temperature and sampling) of a token, then of the `count` most probable ones."""
    shifted = logits.astype(np.float64) - logits.max()
    logarithms = shifted - np.log(np.exp(shifted).sum())
    return tuple((int(one), float(logarithms[one])) for one in (token, *np.argsort(-logarithms, kind="stable")[:count]))
