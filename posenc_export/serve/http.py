"""What all HTTP applications share: bodies, errors, common routes, and streams of events."""

import asyncio
import contextlib
import functools
import json
import re
import time
from typing import Any, AsyncIterator, Callable, TypeVar

from fastapi import APIRouter, Depends, FastAPI, Request, Response
from fastapi.responses import JSONResponse, StreamingResponse
from pydantic import BaseModel, ValidationError
from pydantic_core import from_json
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect

from posenc_export.runtime.artefact.manifest import Manifest
from posenc_export.serve.access import Access
from posenc_export.serve.requests import Refused, refused
from posenc_export.shared.suggestion import suggestion
from posenc_export.shared.version import VERSION

MOST_BYTES = 1 << 20  # limit for the body of a request
SENDING = 10.0  # seconds in which a body must arrive
GONE = 499  # the client has closed the connection; this status appears only in the server's log
KIND = {429: "rate_limit_error", 500: "server_error", 503: "server_error", 504: "server_error"}
HEADERS = {
    429: {"Retry-After": "1"},
    503: {"Retry-After": "1"},
    401: {"WWW-Authenticate": "Bearer"},
}
SHOULD = re.compile(r"^\w+ should (be|have)")  # with which messages of pydantic begin
OTHER = re.compile("_type$|^missing$")  # its errors for values of another kind
LONGEST_SHOWN = 80  # most characters of a request that a message quotes
Asked = TypeVar("Asked", bound=BaseModel)
START = "http.response.start"
LATE = "server: expected time to finish the request, got the end of the server"
STOPPED = f"{LATE}; send the request to another server"


def failed(status: int, message: str) -> Response:
    """Return the response with an error message."""
    content = failure(message, KIND.get(status, "invalid_request_error"))
    return JSONResponse(content, status, HEADERS.get(status))


def application(
    title: str,
    access: Access,
    routes: APIRouter,
    remedy: str,
    state: Callable[[], str] = lambda: "ready",
    answer: Callable[[int, str], Response] = failed,
    **settings: Any,
) -> FastAPI:
    """Create an application, which answers a ValueError with its status, or with 400.

    Args:
        routes: routes that need the key of the server, if it has one.
        remedy: what to do instead of a request that has no route.
        state: returns "ready" if the server accepts requests.
        answer: returns the response for status and message of an error.
        settings: further arguments of FastAPI.
    """
    about: dict[str, Any] = {"title": "posenc", "version": VERSION, "summary": title}
    # The pages of FastAPI load scripts from another server: /openapi.json is the description.
    app = FastAPI(**about, docs_url=None, redoc_url=None, **settings)
    app.include_router(routes, dependencies=[Depends(access.check_key)] if access.key else [])
    access.protect(app)

    @app.get("/health", summary="200 if the server accepts requests, otherwise 503")
    async def health() -> Response:
        return JSONResponse({"status": state()}, 200 if state() == "ready" else 503)

    @app.exception_handler(ValueError)
    async def refuse(request: Request, error: ValueError) -> Response:
        return answer(error.status if isinstance(error, Refused) else 400, str(error))

    @app.exception_handler(HTTPException)  # of the router, whose messages name no path
    async def unknown(request: Request, error: HTTPException) -> Response:
        got = cut(f"{request.method} {request.url.path}")
        said = refused("request", "a method and path that /openapi.json lists", got, remedy)
        response = answer(error.status_code, str(said))
        response.headers.update(error.headers or {})
        return response

    @app.exception_handler(ClientDisconnect)
    async def gone(request: Request, error: ClientDisconnect) -> Response:
        return Response(status_code=GONE)

    return app


def described(request: type[BaseModel]) -> dict[str, Any]:
    """Return the description of the body of a route's requests."""
    content = {"application/json": {"schema": request.model_json_schema()}}
    return {"requestBody": {"required": True, "content": content}}


async def read_body(request: Request) -> bytearray:
    """Read the body of a request. Raise Refused if it is not JSON, too large or too slow,
    ClientDisconnect if the client leaves.
    """
    kind = request.headers.get("content-type", "")
    # Browsers send other types to other servers without asking them first.
    if kind.partition(";")[0].strip().lower() != "application/json":
        rule, got = "Content-Type application/json", cut(kind) or "none"
        raise refused("body", rule, got, "send the header", 415)
    body = bytearray()
    try:
        async with asyncio.timeout(SENDING):
            async for part in request.stream():
                body += part
                if len(body) > MOST_BYTES:
                    rule, remedy = f"at most {MOST_BYTES} bytes", "send fewer prompts at a time"
                    raise refused("body", rule, "more", remedy, 413)
    except TimeoutError:
        rule = f"it within {SENDING:.0f} seconds"
        raise refused("body", rule, "only a part", "send it faster", 408) from None
    return body


def parsed(body: bytes | bytearray, kind: type[Asked]) -> Asked:
    """Parse the body of a request. Raise Refused if it is not JSON or has a wrong field."""
    try:
        return kind.model_validate_json(body)
    except ValidationError as error:
        errors, remedy = error.errors(include_url=False), "/openapi.json lists the fields"
        if errors[0]["type"] == "json_invalid":
            got = f"{cut(body.decode(errors='replace'))} ({errors[0]['ctx']['error']})"
            raise refused("body", "JSON", got, remedy) from None
        content: Any = from_json(body)
        # Of the errors of all kinds that a value may be, one of the kind that it is, and the one
        # that is deepest in the body. A field is missing if its name is misspelled.
        places = [(_where(content, e), e) for e in errors]
        where, first = max(places, key=lambda e: (not OTHER.search(e[1]["type"]), len(e[0])))
        rule = SHOULD.sub("expected", first["msg"]).partition(" after validation")[0]
        got = cut(repr(first["input"]))
        if first["type"] == "missing":
            rule = "expected a value"
            holder = functools.reduce(lambda inside, at: inside[at], where[:-1], content)
            got = "null" if where[-1] in holder else "none"
        if first["type"] == "extra_forbidden":
            rule = "expected no such field"
            near = suggestion(where[-1], kind.model_fields, "") if len(where) == 1 else ""
            remedy = f"{near} {remedy}".strip()
        path = "".join(f"[{at}]" if isinstance(at, int) else f".{cut(at)}" for at in where)
        said = f"{path[1:] or 'body'}: {rule[0].lower()}{rule[1:]}, got {got}"
        raise Refused(f"{said}; {remedy}") from None


def _where(content: Any, error: Any) -> list[str | int]:
    """Return the place of an error in a body: keys and indices, without names of types."""
    place: list[str | int] = []
    for part in error["loc"]:
        inside = isinstance(content, list) and isinstance(part, int) and part < len(content)
        if inside or (isinstance(content, dict) and part in content):
            content = content[part]
            place.append(part)
        elif error["type"] == "missing" and part == error["loc"][-1]:
            place.append(part)
    return place


def check_model(asked: str | None, name: str) -> None:
    """Raise Refused if a request names another model than the served one."""
    if asked not in (None, name):
        raise refused("model", name, cut(str(asked)), "/v1/models lists what is served", 404)


def add_models(routes: APIRouter, name: str, longest: int, manifest: Manifest) -> None:
    """Add the routes of the served model. longest: most tokens of a request."""
    model = {"id": name, "object": "model", "created": int(time.time()), "owned_by": "posenc"}
    model |= {"max_model_len": longest, "target": manifest.target, "digest": manifest.digest}

    @routes.get("/v1/models", summary="List the served model")
    async def models() -> dict[str, Any]:
        return {"object": "list", "data": [model]}

    @routes.get("/v1/models/{asked:path}", summary="Describe the served model")
    async def one_model(asked: str) -> dict[str, Any]:
        check_model(asked, name)
        return model


def failure(message: str, kind: str = "invalid_request_error") -> dict[str, Any]:
    """Format the body of an error response."""
    return {"error": {"message": message, "type": kind, "param": None, "code": None}}


def cut(text: str) -> str:
    """Return a text of a request as a message shows it: one line of at most LONGEST_SHOWN."""
    line = text if text.isprintable() else repr(text)
    return line if len(line) <= LONGEST_SHOWN else f"{line[: LONGEST_SHOWN - 3]}..."


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
    """End a stream with an error. Wait at most one second for a client that does not read."""
    body = event(failure(message, "server_error")).encode()
    with contextlib.suppress(TimeoutError, asyncio.CancelledError):
        async with asyncio.timeout(1):
            await send({"type": "http.response.body", "body": body, "more_body": False})


def event(content: dict[str, Any]) -> str:
    """Format one event."""
    return f"data: {json.dumps(content, ensure_ascii=False, separators=(',', ':'))}\n\n"
