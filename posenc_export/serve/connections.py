"""Connections of the server: how many at a time, and how long each may take."""

import functools
import socket
from typing import Any, Optional, Set, Tuple

from uvicorn.protocols.http.h11_impl import H11Protocol

from posenc_export.shared.refusal import refusal

CONNECTIONS = 512  # default of the largest number of connections
SENDING = 10.0  # seconds for a request to arrive, and for the end of a response to be read
PATIENCE = 0.05  # seconds in which a request must arrive while all connections are in use
# Connections beyond the limit that are accepted, so that their requests are answered with 503.
OVER = 16
FILES = 32  # open files of the process that are not connections
FEWEST = 8


def settings(connections: int, seconds: float) -> Any:
    """Return the arguments of uvicorn.Config that limit connections; `seconds` as in Limits."""
    protocol = functools.partial(Connection, seconds=seconds)
    # Other event loops do not accept through Listener, and other protocols have no Connection.
    return {"http": protocol, "loop": "asyncio", "ws": "none", "limit_concurrency": connections}


def most_connections(asked: Optional[int]) -> int:
    """Return the largest number of connections: `asked`, or CONNECTIONS as far as the limit of open
    files allows. Raise that limit if needed, or ValueError if the system does not allow it.
    """
    if asked is not None and asked < FEWEST:
        remedy = "give a larger number"
        raise refusal("serve", f"at least {FEWEST} connections", asked, remedy)
    needed = (asked or CONNECTIONS) + OVER + FILES
    allowed, least = _files(needed), needed if asked else FEWEST + OVER + FILES
    if allowed < least:
        remedy = "raise the limit (ulimit -n) or give fewer --connections"
        raise refusal("serve", f"at least {least} open files to be allowed", allowed, remedy)
    return min(needed, allowed) - OVER - FILES


def _files(needed: int) -> int:
    """Return the limit of open files, raised to `needed` if it is lower."""
    try:
        import resource
    except ModuleNotFoundError:  # Windows has no such limit
        return needed
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    soft, hard = (needed if limit == resource.RLIM_INFINITY else limit for limit in limits)
    if soft < needed and soft < hard:
        soft = min(needed, hard)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, limits[1]))
    return soft


class Listener(socket.socket):
    """A listening socket, in place of `listening`, that closes connections beyond `most` at once,
    so that the process never runs out of files.
    """

    def __init__(self, listening: socket.socket, most: int) -> None:
        super().__init__(fileno=listening.detach())
        self.most = most
        self._open: Set[socket.socket] = set()

    def accept(self) -> Tuple[socket.socket, Any]:
        """Accept a connection. Raise ConnectionAbortedError if too many are open."""
        connection, address = super().accept()
        self._open = {opened for opened in self._open if opened.fileno() >= 0}
        if len(self._open) >= self.most:
            connection.close()
            raise ConnectionAbortedError
        self._open.add(connection)
        return connection, address


class Connection(H11Protocol):
    """A connection with a limit of time: `seconds` for a response of the application. If all are in
    use, a new one takes the place of one that has waited for a request.

    Attributes:
        since: time of the event loop at which the connection began to wait for its current request.
    """

    def __init__(self, seconds: float, **arguments: Any) -> None:
        super().__init__(**arguments)
        self.seconds = seconds

    @property
    def receiving(self) -> bool:
        """Whether the server waits for a request or for the end of one."""
        return self.cycle is None or self.cycle.response_complete or self.cycle.more_body

    def connection_made(self, transport: Any) -> None:
        super().connection_made(transport)
        self.since = self.loop.time()
        self._watch()
        self._make_room()

    def on_response_complete(self) -> None:
        self.since = self.loop.time()
        super().on_response_complete()

    def connection_lost(self, exc: Optional[Exception]) -> None:
        self._timer.cancel()
        super().connection_lost(exc)

    def _make_room(self) -> None:
        connections: Set[Any] = self.connections
        used = [other for other in connections if not other.transport.is_closing()]
        surplus = len(used) - (self.limit_concurrency or len(used) + 1) + 1
        if surplus > 0:
            end = self.since - PATIENCE
            waiting = [other for other in used if other.receiving and other.since < end]
            for other in sorted(waiting, key=lambda other: other.since)[:surplus]:
                other.transport.abort()

    def _watch(self) -> None:
        """Close the connection if its time is over; otherwise look again."""
        now, end = self.loop.time(), self.since + SENDING
        if not self.receiving:
            end += self.seconds + SENDING
        if now >= end:
            self.transport.abort()
        else:
            self._timer = self.loop.call_at(min(end, now + SENDING), self._watch)
