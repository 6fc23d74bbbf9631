"""A guard for session methods: one call at a time."""

import functools
from typing import Any, Callable, TypeVar

Method = TypeVar("Method", bound=Callable[..., Any])
BUSY = (
    "session: expected one call at a time, got another while one runs; open a session for each "
    "thread with model.session()"
)


def exclusive(method: Method) -> Method:
    """Decorate a method of a session: raise RuntimeError while another call on it runs, in this
    thread or another. `_guard` of the session has an entry per running call: appending and removing
    are atomic in CPython, so that an interrupt cannot split them.
    """

    @functools.wraps(method)
    def alone(self: Any, *arguments: Any, **named: Any) -> Any:
        guard = self._guard
        try:
            guard.append(None)
            if len(guard) > 1:
                raise RuntimeError(BUSY)
            return method(self, *arguments, **named)
        finally:
            guard.pop()

    return alone  # type: ignore[return-value]
