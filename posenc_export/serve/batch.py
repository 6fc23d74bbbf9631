"""The rows of one session, which requests enter and leave between steps."""

import logging
from collections import deque
from typing import Deque, List, Sequence

import numpy as np

from posenc_export.runtime.errors import GraphError
from posenc_export.runtime.model import Model
from posenc_export.runtime.sampling import choose
from posenc_export.serve.requests import FAILED, LENGTH, STOP, Limits, Request, Token

LOG = logging.getLogger(__name__)


class Row:
    """A request that has a row.

    Attributes:
        unread: tokens that the session has not read: the end of the prompt, then the token chosen last.
        made: tokens chosen so far.
    """

    def __init__(self, request: Request) -> None:
        self.request = request
        self.unread: Deque[int] = deque(request.prompt)
        self.made = 0
        self.random = np.random.default_rng(request.seed)

    def take(self, count: int) -> List[int]:
        """The next `count` tokens to be read."""
        return [self.unread.popleft() for _ in range(min(count, len(self.unread)))]


class Batch:
    """Drives a session, by turns of `read` and `step`; one thread at a time.

    A prompt longer than `chunk` is read over several turns, so that the rows that run wait for one chunk at most. Its row takes part in their steps, with the next
    token of its prompt: every step is one call of the graph.

    Args:
        model: checked by requests.check_model.
        limits: rows, context and chunk.
    """

    def __init__(self, model: Model, limits: Limits) -> None:
        self.limits = limits
        self.session = model.session(batch=limits.rows, capacity=limits.context, rewind=1)
        self.rows: List[Row] = []

    def read(self, waiting: Deque[Request]) -> List[Token]:
        """Read a chunk of prompts, and take requests from the front of `waiting` where rows are free; the first tokens of those whose prompt is read.

        Raises:
            GraphError: a prompt that was half read stopped; call `fail`.
        """
        room, made = self.limits.chunk, []
        for index, row in enumerate(self.rows):
            room -= self._go_on(index, row, room)
        while room > 0 and waiting and len(self.rows) < self.limits.rows:
            row = Row(waiting[0])
            part = row.take(room)
            room -= len(part)
            made += self._enter(row, part)
            waiting.popleft()  # not before: whatever is raised, a request is in the queue or has a row
        return made

    def step(self) -> List[Token]:
        """Read one token of every row; the tokens that were chosen.

        Raises:
            GraphError: the graph stopped; call `fail`.
        """
        logits = self.session.step(np.array([row.unread.popleft() for row in self.rows], np.int64), copy=False)
        likeliest = logits.argmax(-1).tolist()
        made = [self._next(row, likeliest[index], logits[index : index + 1]) for index, row in enumerate(self.rows) if not row.unread]
        self.leave([token.request for token in made if token.ended])
        return made

    def leave(self, requests: Sequence[Request]) -> None:
        """Retire the rows of requests that have one; the last row takes the index of the one that leaves, as in the session."""
        for index in reversed([index for index, row in enumerate(self.rows) if row.request in requests]):
            self.session.retire(index)
            self.rows[index] = self.rows[-1]
            self.rows.pop()

    def fail(self) -> List[Token]:
        """Give up every row; the end of each."""
        failed = [Token(row.request, -1, FAILED) for row in self.rows]
        self.rows.clear()
        self.session.reset()
        return failed

    def _enter(self, row: Row, part: List[int]) -> List[Token]:
        """A new row that reads the first part of its prompt; its first token where that was all of it."""
        try:
            logits = self.session.admit([part])[:, -1]
        except GraphError as error:  # no row was admitted: the others go on
            LOG.error("%s; a prompt of %d tokens was not read", error, len(row.request.prompt))
            return [Token(row.request, -1, FAILED)]
        self.rows.append(row)
        made = [] if row.unread else [self._next(row, int(logits[0].argmax()), logits)]
        self.leave([token.request for token in made if token.ended])
        return made

    def _go_on(self, index: int, row: Row, room: int) -> int:
        """Read up to `room` more tokens of a prompt, all but the one that the next step reads; their number."""
        part = row.take(max(0, min(room, len(row.unread) - 1)))
        if part:
            nothing: List[int] = []
            self.session.prefill([part if other == index else nothing for other in range(len(self.rows))])
        return len(part)

    def _next(self, row: Row, likeliest: int, logits: np.ndarray) -> Token:
        """The next token of a row from its logits [1,V]; its next step reads it."""
        request = row.request
        token = likeliest if request.temperature == 0 else int(choose(logits, request.temperature, request.top_k, request.top_p, row.random)[0])
        row.made += 1
        row.unread.append(token)
        return Token(request, token, STOP if token in request.stop_ids else LENGTH if row.made == request.max_tokens else "")
