"""One call at a time on a session, and a settled state before each."""

import functools
from typing import Any, Callable, List, TypeVar

Method = TypeVar("Method", bound=Callable[..., Any])


class Turn:
    """The calls that are inside a session. The first one runs, every other one is refused; nobody waits."""

    def __init__(self) -> None:
        self.calls: List[object] = []
        self.settled = True  # False from the start of a call to its success: what an exception leaves is looked at by the next call


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
        call, turn = object(), self._turn
        # append and remove are one step of the interpreter each: an interrupt falls before or behind them, never between check and change.
        try:
            turn.calls.append(call)
            if turn.calls[0] is not call:
                raise RuntimeError("session: expected one call at a time, got another while one runs; open a session for each thread with model.session()")
            if settles:
                if not turn.settled:
                    self._settle()
                turn.settled = False
            result = method(self, *arguments, **named)
            turn.settled = True
            return result
        finally:
            turn.calls.remove(call)

    return alone  # type: ignore[return-value]
