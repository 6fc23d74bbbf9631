"""The HTTP application of the engine: completions, chat completions, models, health and metrics."""

import asyncio
import contextlib
from typing import Any, AsyncIterator, Callable, Dict, Optional

from fastapi import APIRouter, Depends, FastAPI, Request, Response
from fastapi.responses import JSONResponse
from prometheus_client import CONTENT_TYPE_LATEST
from starlette.exceptions import HTTPException

from posenc_export.runtime.artefact.chat_template import ChatCodec
from posenc_export.runtime.artefact.tokenizer import Codec
from posenc_export.runtime.session.model import Model
from posenc_export.serve import protocol
from posenc_export.serve.access import Access
from posenc_export.serve.http import card, message_of
from posenc_export.serve.requests import (
    Limits,
)
from posenc_export.serve.service import Service
from posenc_export.shared.version import VERSION


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

    summary = f"Completions of {name}, as in OpenAI's API."
    app = FastAPI(
        title="posenc",
        version=VERSION,
        summary=summary,
        lifespan=lifespan,
        dependencies=[Depends(access.check_origin)],
    )
    app.state.service = service
    app.include_router(
        _routes(service), dependencies=[Depends(access.check_key)] if access.key else []
    )
    access.protect(app)

    @app.get("/health", summary="200 if the server accepts requests, otherwise 503")
    async def health() -> Response:
        state = service.engine.state
        return JSONResponse({"status": state}, 200 if state == "ready" else 503)

    @app.exception_handler(HTTPException)
    async def refused(request: Request, error: HTTPException) -> Response:
        return service.refuse(
            error.status_code,
            message_of(request, error, "POST /v1/completions completes a text"),
            error.headers,
        )

    return app


def _routes(service: Service) -> APIRouter:
    """Return the routes that need the key of the server, if it has one."""
    routes = APIRouter()

    @routes.post(
        "/v1/completions",
        openapi_extra=_described(service.completions),
        summary="Continue a prompt",
    )
    async def completions(request: Request) -> Response:
        return await service.complete(request, service.completions)

    @routes.post(
        "/v1/chat/completions",
        openapi_extra=_described(service.chat),
        summary="Reply to a conversation",
    )
    async def chat(request: Request) -> Response:
        return await service.complete(request, service.chat)

    @routes.get("/v1/models", summary="List the served model")
    async def models() -> Dict[str, Any]:
        return card(service.name, service.created, service.limits.context, service.manifest)

    @routes.get("/metrics", summary="Counters in Prometheus's text format")
    async def metrics() -> Response:
        return Response(service.metrics.text(), media_type=CONTENT_TYPE_LATEST)

    return routes


def _described(format: protocol.Format) -> Dict[str, Any]:
    """Return the description of the body of a route's requests."""
    return {
        "requestBody": {
            "required": True,
            "content": {"application/json": {"schema": format.request.model_json_schema()}},
        }
    }
