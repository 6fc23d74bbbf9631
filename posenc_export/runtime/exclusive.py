"""One call at a time on a session, and a settled state before each."""

import functools
from typing import Any, Callable, List, TypeVar

Method = TypeVar("Method", bound=Callable[..., Any])
BUSY = "session: expected one call at a time, got another while one runs; open a session for each thread with model.session()"


class Turn:
    """Which calls are inside a session, and how the last one ended.

    A call enters by appending to `calls` and leaves by removing an entry, each in one step of the interpreter: an interrupt cannot fall into it.
    A call that finds another one inside is refused; nobody waits.

    Attributes:
        calls: an entry for each call inside.
        settled: False from the start of a call to its success: what an exception left is put right by the next call.
    """

    __slots__ = ("calls", "settled")

    def __init__(self) -> None:
        self.calls: List[None] = []
        self.settled = True


def exclusive(method: Method) -> Method:
    """A method of a session (`_turn`, `_settle`) that runs alone, on a session that the call before it left, or that was settled.

    Raises:
        RuntimeError: another call on the session is running, in this thread or another.
    """
    return _alone(method, settles=True)


def exclusive_as_it_is(method: Method) -> Method:
    """As `exclusive`, for a method that can do with whatever an exception left."""
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
