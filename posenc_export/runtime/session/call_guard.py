"""Decorators for session methods: one call at a time, and a consistent state before each call."""

import functools
from typing import Any, Callable, List, TypeVar

Method = TypeVar("Method", bound=Callable[..., Any])
BUSY = "session: expected one call at a time, got another while one runs; open a session for each thread with model.session()"


class CallGuard:
    """The running calls of a session, and whether the last call succeeded.

    A call appends an entry to `calls` when it starts and removes one when it ends. Both are atomic in CPython, so an interrupt cannot split them.
    A call that finds another one running raises; it does not wait.

    Attributes:
        calls: one entry per running call.
        settled: False from the start of a call until it succeeds. If a call raises, the next call restores a consistent state first.
    """

    __slots__ = ("calls", "settled")

    def __init__(self) -> None:
        self.calls: List[None] = []
        self.settled = True


def exclusive(method: Method) -> Method:
    """Decorate a method of a session (`_turn`, `_settle`): refuse concurrent calls, and restore a consistent state first if the last call raised.

    The method raises RuntimeError while another call on the session runs, in this thread or another.
    """
    return _alone(method, settles=True)


def exclusive_unsettled(method: Method) -> Method:
    """Decorate as `exclusive` does, without restoring the state first: for methods that discard it."""
    return _alone(method, settles=False)


def _alone(method: Method, settles: bool) -> Method:
    @functools.wraps(method)
    def alone(self: Any, *arguments: Any, **named: Any) -> Any:
        turn = self._turn
        try:
            turn.calls.append(None)
            if len(turn.calls) > 1:
                raise RuntimeError(BUSY)
            if settles:
                if not turn.settled:
                    self._settle()
                turn.settled = False
            result = method(self, *arguments, **named)
            turn.settled = True
            return result
        finally:
            turn.calls.pop()

    return alone  # type: ignore[return-value]
