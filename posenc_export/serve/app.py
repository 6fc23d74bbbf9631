"""The HTTP application of the engine: completions, chat completions, models, health and metrics."""

import asyncio
import contextlib
import secrets
import time
from typing import Any, AsyncIterator, Callable

from fastapi import APIRouter, FastAPI, Request, Response
from fastapi.responses import JSONResponse
from prometheus_client import CONTENT_TYPE_LATEST

from posenc_export.runtime.artefact.chat_template import ChatCodec
from posenc_export.runtime.session.model import Model
from posenc_export.serve import http
from posenc_export.serve.access import Access
from posenc_export.serve.completion import Completion, Part
from posenc_export.serve.engine import Engine
from posenc_export.serve.formats import Asked, Chat, Completions, Format, entry, rows
from posenc_export.serve.http import STOPPED, Stream, event
from posenc_export.serve.metrics import Metrics
from posenc_export.serve.requests import FAILED, Limits, Refused, Token, check_request, refused

WANTED = "engine: expected every token to be computed and decoded, got an error"
FAILURE = f"{WANTED}; the server's log has its message"


class Service:
    """One model served over HTTP. Raises ValueError and GraphError as Engine.

    Args:
        model, limits: a decoder whose target supports admit and retire, and limits.
        chat: converts conversations to token ids; None for a model without a chat template.
        failed: called on another thread if the engine ends unexpectedly.

    Attributes:
        loop: the event loop that serves it, set before the first request.
    """

    loop: asyncio.AbstractEventLoop

    def __init__(
        self,
        name: str,
        model: Model,
        limits: Limits,
        chat: ChatCodec | None,
        failed: Callable[[], object],
    ) -> None:
        self.name, self.manifest, self.limits = name, model.manifest, limits
        self.completions = Completions(model.tokenizer, self.manifest.stop_ids)
        self.chat = Chat(chat)
        self.open: dict[Any, Completion] = {}  # running completions by request of the engine

        def deliver(tokens: list[Token]) -> None:
            self.loop.call_soon_threadsafe(self._dispatch, tokens)

        self.engine = Engine(model, limits, deliver, failed)
        self.metrics = Metrics(name, model.manifest, self.engine)

    async def complete(self, request: Request, format: Format) -> Response:
        """Handle a POST of completions in the format of its route."""
        deadline, waits = self.loop.time() + self.limits.seconds, False
        try:
            async with asyncio.timeout_at(deadline):
                body = await http.read_body(request)
                asked, completion = await asyncio.to_thread(self._built, body, format)
                # Tokens arrive on the event loop, so none before the next line.
                self.engine.submit(list(completion.choices))
                self.open.update(dict.fromkeys(completion.choices, completion))
                if asked.stream:
                    events = self._events(asked, completion, format)
                    return Stream(events, lambda: self._end(completion), deadline, self._late())
                try:
                    return await self._whole(asked, completion, request, format)
                finally:
                    waits = self.engine.waits(completion.choices)
                    self._end(completion)
        except TimeoutError:
            if not waits:
                raise Refused(self._late(), 504) from None
            rule = f"a row and its memory within {self.limits.seconds} seconds"
            remedy = "try again later, or reduce max_tokens"
            raise refused("engine", rule, "none", remedy, 429) from None
        except asyncio.CancelledError:  # the server ends before the request
            return self.refuse(503, STOPPED)

    def _built(self, body: bytearray, format: Format) -> tuple[Asked, Completion]:
        """Read a request and its prompts. Nothing is queued before everything has succeeded."""
        asked: Any = http.parsed(body, format.request)
        http.check_model(asked.model, self.name)
        requests = rows(asked, format, self.limits)
        for row in requests:
            check_request(row, self.manifest, self.limits)
        how = (self.completions.codec, asked.stops, self.metrics)
        return asked, Completion(self.engine, requests, asked.n, *how)

    def _late(self) -> str:
        rule = f"the response within {self.limits.seconds} seconds, got a longer one"
        return f"server: expected {rule}; reduce max_tokens, or start the server with --timeout"

    def refuse(self, status: int, message: str) -> Response:
        """Count a refused request and return the response with the error message."""
        self.metrics.refused.labels(str(status)).inc()
        return http.failed(status, message)

    async def _whole(
        self, asked: Asked, completion: Completion, request: Request, format: Format
    ) -> Response:
        collecting = asyncio.ensure_future(_collected(completion))
        # After the body, the only further message is the disconnection.
        disconnected = asyncio.ensure_future(request.receive())
        try:
            await asyncio.wait({collecting, disconnected}, return_when=asyncio.FIRST_COMPLETED)
            if not collecting.done():
                return Response(status_code=http.GONE)
            parts = collecting.result()
        finally:
            collecting.cancel()
            disconnected.cancel()
        if any(part.ended == FAILED for part in parts):
            raise Refused(FAILURE, 500)
        choices = [entry(format, part, asked) for part in parts]
        head = self._head(format, format.whole)
        return JSONResponse({**head, "choices": choices, "usage": _usage(completion)})

    async def _events(
        self, asked: Asked, completion: Completion, format: Format
    ) -> AsyncIterator[str]:
        """Yield an event per piece of a choice, the counts if requested, [DONE]; or an error."""
        head, options = self._head(format, format.part), asked.stream_options
        counts = options is not None and options.include_usage
        without_counts, begun = {"usage": None} if counts else {}, set()
        async for part in completion.parts():
            if part.ended == FAILED:
                yield event(http.failure(FAILURE, "server_error"))
                return
            of_tokens = asked.return_token_ids or asked.likeliest is not None
            if part.text or part.ended or of_tokens:
                piece = entry(format, part, asked, begins=part.choice not in begun)
                begun.add(part.choice)
                yield event({**head, "choices": [piece], **without_counts})
        if counts:
            yield event({**head, "choices": [], "usage": _usage(completion)})
        yield "data: [DONE]\n\n"

    def _head(self, format: Format, kind: str) -> dict[str, Any]:
        head: dict[str, Any] = {"id": f"{format.prefix}-{secrets.token_hex(12)}", "object": kind}
        head |= {"created": int(time.time()), "model": self.name}
        return {**head, "system_fingerprint": self.manifest.digest[:16]}

    def _dispatch(self, tokens: list[Token]) -> None:
        """Pass the tokens of a turn to their completions, as far as these have not ended."""
        for token in tokens:
            if token.request in self.open:
                self.open[token.request].tokens.put_nowait(token)

    def _end(self, completion: Completion) -> None:
        completion.end()
        for request in completion.choices:
            del self.open[request]


def _usage(completion: Completion) -> dict[str, int]:
    prompt, new = completion.prompt_tokens, completion.completion_tokens
    return {"prompt_tokens": prompt, "completion_tokens": new, "total_tokens": prompt + new}


async def _collected(completion: Completion) -> list[Part]:
    wholes = [Part(index, "", [], [], "") for index in range(len(completion.choices))]
    async for part in completion.parts():
        wholes[part.choice] = wholes[part.choice].joined(part)
    return wholes


def application(
    name: str,
    model: Model,
    limits: Limits,
    access: Access = Access(),
    chat: ChatCodec | None = None,
    failed: Callable[[], object] = lambda: None,
) -> FastAPI:
    """Create the application, whose end also ends its engine. Arguments, errors as for Service."""
    service = Service(name, model, limits, chat, failed)

    @contextlib.asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        service.loop = asyncio.get_running_loop()
        yield
        await asyncio.to_thread(service.engine.close)

    title = f"Completions of {name}, as in OpenAI's API."
    remedy = "POST /v1/completions completes a text"
    routes, engine = _routes(service), service.engine
    app = http.application(
        title, access, routes, remedy, lambda: engine.state, service.refuse, lifespan=lifespan
    )
    app.state.service = service
    return app


def _routes(service: Service) -> APIRouter:
    routes = APIRouter()
    completed, replied = (http.described(f.request) for f in (service.completions, service.chat))

    @routes.post("/v1/completions", openapi_extra=completed, summary="Continue a prompt")
    async def completions(request: Request) -> Response:
        return await service.complete(request, service.completions)

    @routes.post("/v1/chat/completions", openapi_extra=replied, summary="Reply to a conversation")
    async def chat(request: Request) -> Response:
        return await service.complete(request, service.chat)

    http.add_models(routes, service.name, service.limits.context, service.manifest)

    @routes.get("/metrics", summary="Counters in Prometheus's text format")
    async def metrics() -> Response:
        return Response(service.metrics.text(), media_type=CONTENT_TYPE_LATEST)

    return routes
