"""A guard for session methods: one call at a time, and a consistent state before each call."""

import functools
from typing import Any, Callable, List, TypeVar

Method = TypeVar("Method", bound=Callable[..., Any])
BUSY = (
    "session: expected one call at a time, got another while one runs; open a session for each "
    "thread with model.session()"
)


class CallGuard:
    """The running calls of a session, and whether the last call succeeded."""

    __slots__ = ("calls", "completed")

    def __init__(self) -> None:
        # One entry per running call: appending and removing are atomic in CPython, so that an
        # interrupt cannot split them.
        self.calls: List[None] = []
        # False from the start of a call until it succeeds; the next call then restores a state.
        self.completed = True


def exclusive(method: Method, restores: bool = True) -> Method:
    """Decorate a method of a session (`_guard`, `_complete_changes`): raise RuntimeError while
    another call on it runs, in this thread or another, and restore a consistent state first if the
    last call raised. With `restores` False, for a method that discards the state, nothing is
    restored.
    """

    @functools.wraps(method)
    def alone(self: Any, *arguments: Any, **named: Any) -> Any:
        guard = self._guard
        try:
            guard.calls.append(None)
            if len(guard.calls) > 1:
                raise RuntimeError(BUSY)
            if restores:
                if not guard.completed:
                    self._complete_changes()
                guard.completed = False
            result = method(self, *arguments, **named)
            guard.completed = True
            return result
        finally:
            guard.calls.pop()

    return alone  # type: ignore[return-value]
