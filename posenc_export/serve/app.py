"""The HTTP application of the engine: completions, models, health and metrics."""

import asyncio
import json
import secrets
import time
from contextlib import asynccontextmanager
from typing import Any, AsyncIterator, Callable, Dict, List, Type

from fastapi import FastAPI, Request, Response
from fastapi.responses import JSONResponse, StreamingResponse
from prometheus_client import CONTENT_TYPE_LATEST
from starlette.requests import ClientDisconnect

from posenc_export import __version__
from posenc_export.runtime.model import Model
from posenc_export.serve import protocol
from posenc_export.serve.completion import Completion, Part
from posenc_export.serve.engine import Engine
from posenc_export.serve.metrics import Metrics
from posenc_export.serve.requests import FAILED, Full, Limits, Refused, Stopping, Token
from posenc_export.text import Codec

MOST_BYTES = 1 << 20  # limit for the body of a request
GONE = 499  # the client has closed the connection; this status appears only in the server's log
FAILURE = "engine: expected the graph to run, got an error; the server's log has its message"
BODY = {"requestBody": {"required": True, "content": {"application/json": {"schema": protocol.CompletionRequest.model_json_schema()}}}}


class NotServed(ValueError):
    """The requested model is not the one that is served."""


class TooLarge(ValueError):
    """The body of a request exceeds MOST_BYTES."""


STATUS: Dict[Type[Exception], int] = {Refused: 400, NotServed: 404, TooLarge: 413, Full: 429, Stopping: 503}
KIND = {429: "rate_limit_error", 500: "server_error", 503: "server_error"}


class Service:
    """One model served over HTTP. Must be created on the event loop that serves it.

    Args:
        name: name of the model in requests.
        model: a decoder whose target supports admit and retire.
        codec: converts between text and token ids.
        limits: limits of requests.
    """

    def __init__(self, name: str, model: Model, codec: Codec, limits: Limits) -> None:
        self.name, self.codec, self.manifest, self.limits = name, codec, model.manifest, limits
        self.created = int(time.time())
        self.open: Dict[Any, Completion] = {}  # running completions by request of the engine
        loop = asyncio.get_running_loop()
        self.engine = Engine(model, limits, lambda tokens: loop.call_soon_threadsafe(self._dispatch, tokens))
        self.metrics = Metrics(name, model.manifest, self.engine)

    async def complete(self, request: Request) -> Response:
        """Handle POST /v1/completions."""
        try:
            asked = protocol.parse(await _body(request))
            completion = self._begin(asked)
        except ClientDisconnect:
            return Response(status_code=GONE)
        except tuple(STATUS) as error:
            return self.refuse(STATUS[type(error)], str(error))
        if asked.stream:
            return _Stream(self._events(asked, completion), lambda: self._end(completion))
        try:
            return await self._whole(asked, completion, request)
        finally:
            self._end(completion)

    def _begin(self, asked: protocol.CompletionRequest) -> Completion:
        """Queue the rows of a completion. Its first tokens arrive after this method has returned to the event loop.

        Raises:
            ValueError, RuntimeError: one of the exceptions in STATUS.
        """
        if asked.model not in (None, self.name):
            raise NotServed(f"model: expected {self.name}, got {asked.model}; /v1/models lists what is served")
        rows = protocol.rows(asked, self.codec, tuple(self.manifest.stop_ids), self.limits.queue)
        self.engine.submit(rows)
        completion = Completion(self.engine, rows, asked.n, self.codec, protocol.stops(asked), self.metrics)
        self.open.update(dict.fromkeys(rows, completion))
        return completion

    def refuse(self, status: int, message: str) -> JSONResponse:
        """Count a refused request and return the response with the error message."""
        self.metrics.refused.labels(str(status)).inc()
        headers = {"Retry-After": "1"} if status in (429, 503) else {}
        return JSONResponse(protocol.failure(message, KIND.get(status, "invalid_request_error")), status, headers)

    def card(self) -> Dict[str, Any]:
        """Return the entry of /v1/models."""
        manifest, limits = self.manifest, self.limits
        return {
            "id": self.name,
            "object": "model",
            "created": self.created,
            "owned_by": "posenc",
            "max_model_len": limits.context,
            "target": manifest.target,
            "digest": manifest.digest,
        }

    async def _whole(self, asked: protocol.CompletionRequest, completion: Completion, request: Request) -> Response:
        """Return the whole completion as one JSON response, or GONE if the client disconnects first."""
        collecting = asyncio.ensure_future(_collected(completion))
        disconnected = asyncio.ensure_future(request.receive())  # after the body, the only further message is the disconnection
        try:
            await asyncio.wait({collecting, disconnected}, return_when=asyncio.FIRST_COMPLETED)
            if not collecting.done():
                return Response(status_code=GONE)
            parts = collecting.result()
        finally:
            collecting.cancel()
            disconnected.cancel()
        if any(part.ended == FAILED for part in parts):
            return self.refuse(500, FAILURE)
        choices = [protocol.choice(part.choice, part.text, part.ended, part.ids if asked.return_token_ids else None) for part in parts]
        return JSONResponse({**self._head(), "choices": choices, "usage": protocol.usage(completion.read, completion.made)})

    async def _events(self, asked: protocol.CompletionRequest, completion: Completion) -> AsyncIterator[str]:
        """Yield server-sent events: one per piece of a choice, the token counts if requested, then [DONE]."""
        head, counts = self._head(), asked.stream_options is not None and asked.stream_options.include_usage
        without_counts = {"usage": None} if counts else {}
        async for part in completion.parts():
            if part.ended == FAILED:
                yield _event(protocol.failure(FAILURE, "server_error"))
            elif part.text or part.ended or asked.return_token_ids:
                made = protocol.choice(part.choice, part.text, part.ended or None, part.ids if asked.return_token_ids else None)
                yield _event({**head, "choices": [made], **without_counts})
        if counts:
            yield _event({**head, "choices": [], "usage": protocol.usage(completion.read, completion.made)})
        yield "data: [DONE]\n\n"

    def _head(self) -> Dict[str, Any]:
        name = f"cmpl-{secrets.token_hex(12)}"
        return {"id": name, "object": "text_completion", "created": int(time.time()), "model": self.name, "system_fingerprint": self.manifest.digest[:16]}

    def _dispatch(self, tokens: List[Token]) -> None:
        """Pass the tokens of an engine turn to their completions. Tokens of completions that have ended are dropped."""
        for token in tokens:
            if token.request in self.open:
                self.open[token.request].tokens.put_nowait(token)

    def _end(self, completion: Completion) -> None:
        completion.end()
        for request in completion.choices:
            del self.open[request]


class _Stream(StreamingResponse):
    """A stream of server-sent events that calls `ended` when it ends, also if the client disconnects before the first event."""

    def __init__(self, events: AsyncIterator[str], ended: Callable[[], None]) -> None:
        super().__init__(events, media_type="text/event-stream", headers={"Cache-Control": "no-cache", "X-Accel-Buffering": "no"})
        self.ended = ended

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        try:
            await super().__call__(scope, receive, send)
        finally:
            self.ended()


def application(name: str, model: Model, codec: Codec, limits: Limits) -> FastAPI:
    """Create the application, which starts and stops the engine. Arguments as for Service."""

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        app.state.service = Service(name, model, codec, limits)
        yield
        await asyncio.to_thread(app.state.service.engine.close)

    app = FastAPI(title="posenc", version=__version__, summary=f"Completions of {name}, as in OpenAI's API.", lifespan=lifespan)

    @app.post("/v1/completions", openapi_extra=BODY, summary="Continue a prompt")
    async def completions(request: Request) -> Response:
        response: Response = await request.app.state.service.complete(request)
        return response

    @app.get("/v1/models", summary="List the served model")
    async def models(request: Request) -> Dict[str, Any]:
        return {"object": "list", "data": [request.app.state.service.card()]}

    @app.get("/health", summary="200 if the server accepts requests, otherwise 503")
    async def health(request: Request) -> Response:
        state = request.app.state.service.engine.state
        return JSONResponse({"status": state}, 200 if state == "ready" else 503)

    @app.get("/metrics", summary="Counters in Prometheus's text format")
    async def metrics(request: Request) -> Response:
        return Response(request.app.state.service.metrics.text(), media_type=CONTENT_TYPE_LATEST)

    return app


async def _body(request: Request) -> bytes:
    """Read the body of a request.

    Raises:
        TooLarge: the body exceeds MOST_BYTES.
        ClientDisconnect: the client has disconnected before the end of the body.
    """
    body = b""
    async for part in request.stream():
        body += part
        if len(body) > MOST_BYTES:
            raise TooLarge(f"body: expected at most {MOST_BYTES} bytes, got more; send fewer prompts at a time")
    return body


async def _collected(completion: Completion) -> List[Part]:
    """Collect all pieces of each choice into one."""
    found = [Part(index, "", [], "") for index in range(len(completion.choices))]
    async for index, text, ids, ended in completion.parts():
        before = found[index]
        found[index] = Part(index, before.text + text, before.ids + ids, ended)
    return found


def _event(content: Dict[str, Any]) -> str:
    return f"data: {json.dumps(content, ensure_ascii=False, separators=(',', ':'))}\n\n"
