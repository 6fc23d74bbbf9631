"""The thread that owns the session: takes requests from a queue and hands out their tokens."""

import logging
import threading
from collections import deque
from typing import Callable, Deque, List, Sequence, Set

from posenc_export.runtime.errors import GraphError
from posenc_export.runtime.model import Model
from posenc_export.serve.batch import Batch
from posenc_export.serve.requests import FAILED, Full, Limits, Refused, Request, Stopping, Token, check_model, check_request

LOG = logging.getLogger(__name__)


class Engine:
    """Decodes requests together; every call may come from any thread.

    Args:
        model: a decoder whose rows come and go.
        limits: of requests, rows and the queue.
        deliver: called on the thread of the engine with the tokens of a turn, in the order in which rows made them. A row that is cancelled ends without a token.

    Attributes:
        state: "ready", "stopping" after `close`, "failed" where the thread ended before.

    Raises:
        ValueError: a model that cannot be served.
    """

    def __init__(self, model: Model, limits: Limits, deliver: Callable[[List[Token]], object]) -> None:
        check_model(model.manifest, limits)
        self.manifest, self.limits, self.deliver = model.manifest, limits, deliver
        self._batch = Batch(model, limits)
        self._waiting: Deque[Request] = deque()
        self._cancelled: Set[Request] = set()
        self.state = "ready"
        self._changed = threading.Condition()
        self._thread = threading.Thread(target=self._run, name="posenc engine", daemon=True)
        self._thread.start()

    @property
    def running(self) -> int:
        """Requests that have a row."""
        return len(self._batch.rows)

    @property
    def waiting(self) -> int:
        """Requests in the queue."""
        return len(self._waiting)

    def submit(self, requests: Sequence[Request]) -> None:
        """Queue requests, all of them or none.

        Raises:
            Refused: a request that no row can take, more requests than the queue holds.
            Full: the queue has no room now.
            Stopping: the engine takes no more requests.
        """
        for request in requests:
            check_request(request, self.manifest, self.limits)
        if len(requests) > self.limits.queue:
            raise Refused(f"prompt: expected at most {self.limits.queue} continuations in a request, got {len(requests)}")
        with self._changed:
            if self.state != "ready":
                raise Stopping(f"engine: expected to be ready, got {self.state}; send the request to another server")
            if len(self._waiting) + len(requests) > self.limits.queue:
                raise Full(f"queue: expected room for {len(requests)} more, got {len(self._waiting)} of {self.limits.queue} waiting; try again later")
            self._waiting.extend(requests)
            self._changed.notify()

    def cancel(self, requests: Sequence[Request]) -> None:
        """End requests before the next turn; those that have ended are left out."""
        with self._changed:
            self._cancelled.update(requests)
            self._changed.notify()

    def close(self) -> None:
        """Take no more requests, finish those that wait and run, and end the thread."""
        with self._changed:
            self.state = "stopping"
            self._changed.notify()
        self._thread.join()

    def _run(self) -> None:
        try:
            while self._prepare():
                self._turn()
        finally:  # whatever ended the thread: nobody waits for a row for ever
            with self._changed:
                self.state = "failed" if self.state == "ready" else self.state
                left = [*(row.request for row in self._batch.rows), *self._waiting]
                self._waiting.clear()
            if left:
                self.deliver([Token(request, -1, FAILED) for request in left])

    def _prepare(self) -> bool:
        """Wait for something to do and drop what was cancelled; False where the engine ends."""
        with self._changed:
            while not self._waiting and not self._batch.rows and self.state == "ready":
                self._cancelled.clear()
                self._changed.wait()
            cancelled, self._cancelled = self._cancelled, set()
            for request in [request for request in self._waiting if request in cancelled]:
                self._waiting.remove(request)
        self._batch.leave(list(cancelled))
        return bool(self._waiting or self._batch.rows or self.state == "ready")

    def _turn(self) -> None:
        try:
            self._hand_out(self._batch.read(self._waiting))
            if self._batch.rows:
                self._hand_out(self._batch.step())
        except GraphError as error:
            LOG.error("%s; %d rows ended", error, len(self._batch.rows))
            self._hand_out(self._batch.fail())

    def _hand_out(self, made: List[Token]) -> None:
        if made:
            self.deliver(made)
