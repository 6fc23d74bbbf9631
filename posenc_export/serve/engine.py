"""The engine: a thread that owns the session, takes requests and delivers their tokens."""

import logging
import threading
from collections import deque
from typing import Callable, Iterable, Sequence

from posenc_export.runtime.session.errors import GraphError
from posenc_export.runtime.session.model import Model
from posenc_export.serve.batch import Batch
from posenc_export.serve.requests import FAILED, Limits, Request, Token, check_model, refused
from posenc_export.shared.tables import counted

LOG = logging.getLogger(__name__)
ENDED = "engine: expected the graph to run, got %s (%s); the engine has ended, start it again"


class Engine:
    """Decodes many requests together. All methods are thread-safe. Raises ValueError if the model
    cannot be served or a row does not fit the memory, GraphError if the graph cannot run.

    Args:
        model: a decoder whose target supports admit and retire.
        deliver: called on the engine's thread with the tokens of each turn, in the order in which
            they were generated. A cancelled row ends without a token.
        failed: called on the engine's thread if it ends unexpectedly, after the failed tokens of
            all requests were delivered.

    Attributes:
        state: "ready"; "stopping" after `close`; "failed" if the thread has ended unexpectedly.
        batch, waiting: the rows of running requests, and the requests in the queue.
    """

    def __init__(
        self,
        model: Model,
        limits: Limits,
        deliver: Callable[[list[Token]], object],
        failed: Callable[[], object] = lambda: None,
    ) -> None:
        check_model(model.manifest, limits)
        self.limits = limits
        self.deliver, self.failed = deliver, failed
        self.batch = Batch(model, limits)
        self.waiting: deque[Request] = deque()
        self._cancelled: set[Request] = set()
        self.state = "ready"
        self._changed = threading.Condition()
        self._thread = threading.Thread(target=self._run, name="posenc engine", daemon=True)
        self._thread.start()

    def submit(self, requests: Sequence[Request]) -> None:
        """Queue all of the requests, which check_request accepts, or none: raise Refused without
        room at the moment, or if the engine accepts no more.
        """
        with self._changed:
            if self.state != "ready":
                remedy = "send the request to another server"
                raise refused("engine", "to be ready", self.state, remedy, 503)
            if len(self.waiting) + len(requests) > self.limits.queue:
                got = f"{len(self.waiting)} of {self.limits.queue} waiting"
                rule = f"room for {len(requests)} more"
                raise refused("queue", rule, got, "try again later", 429)
            self.waiting.extend(requests)
            self._changed.notify()

    def waits(self, requests: Iterable[Request]) -> bool:
        """Whether one of these requests waits for a row."""
        with self._changed:
            return not set(self.waiting).isdisjoint(requests)

    def cancel(self, requests: Sequence[Request]) -> None:
        """Cancel requests before the next turn. Requests that have ended are ignored."""
        with self._changed:
            self._cancelled.update(requests)
            self._changed.notify()

    def close(self) -> None:
        """Accept no more requests, finish all waiting and running ones, and end the thread."""
        with self._changed:
            self.state = "stopping" if self.state == "ready" else self.state
            self._changed.notify()
        self._thread.join()

    def _run(self) -> None:
        try:
            while self._prepare():
                self._run_once()
        except (GraphError, MemoryError) as error:
            LOG.critical(ENDED, type(error).__name__, error)
        finally:  # if it ends unexpectedly, the remaining requests fail, so that no client waits
            with self._changed:
                done = self.state == "stopping" and not self.waiting and not self.batch.rows
                self.state = self.state if done else "failed"
                remaining = [*(row.request for row in self.batch.rows), *self.waiting]
                self.waiting.clear()
            if remaining:
                self.deliver([Token(request, -1, FAILED) for request in remaining])
            if not done:
                self.failed()

    def _prepare(self) -> bool:
        """Wait for requests and drop cancelled ones. Return False if the engine must end."""
        with self._changed:
            while not self.waiting and not self.batch.rows and self.state == "ready":
                self._cancelled.clear()
                self._changed.wait()
            cancelled, self._cancelled = self._cancelled, set()
            for request in [request for request in self.waiting if request in cancelled]:
                self.waiting.remove(request)
        self.batch.leave(list(cancelled))
        return bool(self.waiting or self.batch.rows or self.state == "ready")

    def _run_once(self) -> None:
        try:
            failed = self._delivered(self.batch.read(self.waiting))
            if self.batch.rows:
                failed += self._delivered(self.batch.step())
        except GraphError as error:
            LOG.error("%s; %s ended", error, counted(len(self.batch.rows), "row"))
            failed = self._delivered(self.batch.fail())
        if failed and not self.batch.rows:
            # A prompt can fail alone; a graph that runs no more ends the engine.
            self.batch.probe(1)

    def _delivered(self, tokens: list[Token]) -> int:
        """Deliver tokens. Return the number of failed rows among them."""
        if tokens:
            self.deliver(tokens)
        return sum(token.ended == FAILED for token in tokens)
