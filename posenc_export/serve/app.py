"""The HTTP application of the engine: completions, chat completions, models, health and metrics."""

import asyncio
import contextlib
from typing import Any, AsyncIterator, Callable, Dict, Optional

from fastapi import APIRouter, FastAPI, Request, Response
from prometheus_client import CONTENT_TYPE_LATEST

from posenc_export.runtime.artefact.chat_template import ChatCodec
from posenc_export.runtime.artefact.tokenizer import Codec
from posenc_export.runtime.session.model import Model
from posenc_export.serve import http
from posenc_export.serve.access import Access
from posenc_export.serve.requests import Limits
from posenc_export.serve.service import Service


def application(
    name: str,
    model: Model,
    codec: Codec,
    limits: Limits,
    access: Access = Access(),
    chat: Optional[ChatCodec] = None,
    failed: Callable[[], object] = lambda: None,
) -> FastAPI:
    """Create the application, with its engine ready. The end of the application also ends the
    engine.

    Args:
        access: who may send requests.
        name, model, codec, limits, chat, failed: as for Service.

    Raises:
        ValueError, GraphError: as for Engine.
    """
    service = Service(name, model, codec, limits, chat, failed)

    @contextlib.asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        service.loop = asyncio.get_running_loop()
        yield
        service.long_texts.shutdown(wait=False, cancel_futures=True)
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
    """Return the routes that need the key of the server, if it has one."""
    routes = APIRouter()
    completed, replied = (http.described(f.request) for f in (service.completions, service.chat))

    @routes.post("/v1/completions", openapi_extra=completed, summary="Continue a prompt")
    async def completions(request: Request) -> Response:
        return await service.complete(request, service.completions)

    @routes.post("/v1/chat/completions", openapi_extra=replied, summary="Reply to a conversation")
    async def chat(request: Request) -> Response:
        return await service.complete(request, service.chat)

    @routes.get("/v1/models", summary="List the served model")
    async def models() -> Dict[str, Any]:
        return http.card(service.name, service.created, service.limits.context, service.manifest)

    @routes.get("/metrics", summary="Counters in Prometheus's text format")
    async def metrics() -> Response:
        return Response(service.metrics.text(), media_type=CONTENT_TYPE_LATEST)

    return routes
