"""Streams of server-sent events, which end with an error if they are cut."""

import asyncio
import contextlib
import json
from typing import Any, AsyncIterator, Callable, Dict

from fastapi.responses import StreamingResponse

from posenc_export.serve import http

START = "http.response.start"
STOPPED = (
    "server: expected time to finish the request, got the end of the server; send the request to "
    "another server"
)


class Stream(StreamingResponse):
    """A stream of server-sent events, which calls `ended` once, also if the client disconnects
    before the first event. At `deadline`, a time of the event loop, it ends with the error `late`.
    """

    def __init__(
        self, events: AsyncIterator[str], ended: Callable[[], None], deadline: float, late: str
    ) -> None:
        headers = {"Cache-Control": "no-cache", "X-Accel-Buffering": "no"}
        super().__init__(events, media_type="text/event-stream", headers=headers)
        self.ended, self.deadline, self.late = ended, deadline, late

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        start = {"type": START, "status": self.status_code, "headers": self.raw_headers}

        async def send_rest(message: Any) -> None:
            if message["type"] != START:
                await send(message)

        try:
            try:
                await send(start)
                async with asyncio.timeout_at(self.deadline):
                    await super().__call__(scope, receive, send_rest)
            finally:
                self.ended()
        except TimeoutError:
            await _cut(send, self.late)
        except asyncio.CancelledError:  # the server ends before the stream
            await _cut(send, STOPPED)


async def _cut(send: Any, message: str) -> None:
    """End a stream with an error. A client that does not read is given a second."""
    body = event(http.failure(message, "server_error")).encode()
    with contextlib.suppress(TimeoutError, asyncio.CancelledError):
        async with asyncio.timeout(1):
            await send({"type": "http.response.body", "body": body, "more_body": False})


def event(content: Dict[str, Any]) -> str:
    """Format one event."""
    return f"data: {json.dumps(content, ensure_ascii=False, separators=(',', ':'))}\n\n"
