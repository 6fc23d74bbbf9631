"""The HTTP application of an encoder with sentence embeddings: /v1/embeddings, as in OpenAI's
API.
"""

import asyncio
import base64
import time
from typing import Annotated, Any, Dict, List, Literal, Optional, Tuple, Union

import numpy as np
from fastapi import APIRouter, Depends, FastAPI, Request, Response
from fastapi.responses import JSONResponse
from pydantic import BaseModel, ConfigDict, Field, ValidationError
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect

from posenc_export.runtime.session import sentences
from posenc_export.runtime.session.errors import GraphError
from posenc_export.runtime.session.model import Model
from posenc_export.serve import protocol
from posenc_export.serve.access import Access
from posenc_export.serve.http import GONE, KIND, card, check_model, message_of, read_body
from posenc_export.serve.protocol import FAST, Ids
from posenc_export.serve.requests import Limits
from posenc_export.shared.version import VERSION

MOST_INPUTS = 2048  # as in OpenAI's API


class EmbeddingRequest(BaseModel):
    """Body of a request. Fields of OpenAI's API that this server does not support accept only
    their neutral value.
    """

    model_config = ConfigDict(extra="forbid", strict=True)
    model: Optional[str] = Field(
        None, description="Name of the served model; other names are refused."
    )
    input: Union[str, Annotated[List[str], FAST], Ids, Annotated[List[Ids], FAST]] = Field(
        description="Text or token ids, or a list of these."
    )
    encoding_format: Literal["float", "base64"] = Field(
        "float", description="base64: the bytes of float32 numbers, little-endian."
    )
    dimensions: Optional[int] = Field(
        None, description="Size of an embedding; only that of the model is accepted."
    )
    user: Optional[str] = None
    prompt_name: Optional[str] = Field(
        None, description="Name of a prompt of the checkpoint to put before each text."
    )


class Embedder:
    """A model that computes sentence embeddings, for one request at a time: a graph uses all
    threads of the server.

    Args:
        name: name of the model in requests.
        model: an encoder with the output sentence_embedding.
        limits: `queue` requests wait, `seconds` is the time that a request may take.

    Raises:
        ValueError: the model has no such output.
    """

    def __init__(self, name: str, model: Model, limits: Limits) -> None:
        sentences.check_model(model)
        self.name, self.model, self.limits, self.created = name, model, limits, int(time.time())
        self.waiting = 0
        self._turn = asyncio.Lock()

    async def embed(self, request: Request) -> Response:
        """Handle POST /v1/embeddings."""
        try:
            async with asyncio.timeout(self.limits.seconds):
                asked = parse(await read_body(request))
                check_model(asked.model, self.name)
                if self.waiting >= self.limits.queue:
                    raise HTTPException(
                        429,
                        f"queue: expected at most {self.limits.queue} requests that wait, "
                        "got one more; try again later",
                        {"Retry-After": "1"},
                    )
                self.waiting += 1
                try:
                    async with self._turn:
                        rows, embeddings = await asyncio.to_thread(self._embedded, asked)
                finally:
                    self.waiting -= 1
        except ClientDisconnect:
            return Response(status_code=GONE)
        except TimeoutError:
            raise HTTPException(
                504,
                f"server: expected the response within {self.limits.seconds} seconds, got a "
                "longer one; send fewer texts",
            ) from None
        except ValueError as error:
            raise HTTPException(400, str(error)) from None
        except GraphError:
            raise HTTPException(
                500, "server: expected the graph to run, got an error; send fewer texts"
            ) from None
        tokens = sum(len(row) for row in rows)
        data = [
            {
                "object": "embedding",
                "index": index,
                "embedding": _written(row, asked.encoding_format),
            }
            for index, row in enumerate(embeddings)
        ]
        return JSONResponse(
            {
                "object": "list",
                "data": data,
                "model": self.name,
                "usage": {"prompt_tokens": tokens, "total_tokens": tokens},
            }
        )

    def _embedded(self, asked: EmbeddingRequest) -> Tuple[List[np.ndarray], np.ndarray]:
        """Return the token ids of each input, and the embeddings."""
        given: Any = asked.input
        inputs = (
            [given] if isinstance(given, str) or not given or isinstance(given[0], int) else given
        )
        if given == []:
            raise ValueError("input: expected at least one text, got none; send one")
        size = self.model.manifest.outputs[-1].axes[-1]
        if asked.dimensions not in (None, size):
            raise ValueError(
                f"dimensions: expected {size}, the size of the model, got "
                f"{asked.dimensions}; leave it out"
            )
        if len(inputs) > MOST_INPUTS:
            raise ValueError(
                f"input: expected at most {MOST_INPUTS} texts, got {len(inputs)}; send "
                "several requests"
            )
        if isinstance(inputs[0], str):
            rows = sentences.rows_of(self.model, inputs, asked.prompt_name)
        else:
            rows = [np.array(ids, np.int64) for ids in inputs]
        return rows, sentences.embed(self.model, rows)


def parse(body: Union[bytes, bytearray]) -> EmbeddingRequest:
    """Parse the body of a request. Raise ValueError if it is not JSON, or a field is unknown, of
    a wrong type or outside its range.
    """
    try:
        return EmbeddingRequest.model_validate_json(body)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        where = "".join(protocol.cut(str(part)) for part in first["loc"][:1]) or "body"
        said = first["msg"].replace("Input should be", "expected")
        raise ValueError(
            f"{where}: {said[0].lower()}{said[1:]}, got "
            f"{protocol.cut(repr(first['input']))}; /docs lists the fields"
        ) from None


def _written(row: np.ndarray, form: str) -> Union[str, List[float]]:
    if form == "base64":
        return base64.b64encode(row.astype("<f4").tobytes()).decode()
    return [float(str(number)) for number in row]  # the shortest numbers that give the same float32


def application(name: str, model: Model, limits: Limits, access: Access = Access()) -> FastAPI:
    """Create the application. Arguments as for Embedder.

    Args:
        access: who may send requests.

    Raises:
        ValueError: as for Embedder.
    """
    embedder = Embedder(name, model, limits)
    app = FastAPI(
        title="posenc",
        version=VERSION,
        summary=f"Embeddings of {name}, as in OpenAI's API.",
        dependencies=[Depends(access.check_origin)],
    )
    routes = APIRouter()

    @routes.post("/v1/embeddings", openapi_extra=BODY, summary="Embed texts")
    async def embeddings(request: Request) -> Response:
        return await embedder.embed(request)

    @routes.get("/v1/models", summary="List the served model")
    async def models() -> Dict[str, Any]:
        return card(name, embedder.created, sentences.longest(model), model.manifest)

    app.include_router(routes, dependencies=[Depends(access.check_key)] if access.key else [])
    access.protect(app)

    @app.get("/health", summary="200 if the server accepts requests")
    async def health() -> Response:
        return JSONResponse({"status": "ready"})

    @app.exception_handler(HTTPException)
    async def refused(request: Request, error: HTTPException) -> Response:
        said = message_of(
            request, error, f"POST /v1/embeddings embeds texts, since {name} is an encoder"
        )
        return JSONResponse(
            protocol.failure(said, KIND.get(error.status_code, "invalid_request_error")),
            error.status_code,
            error.headers,
        )

    return app


BODY = {
    "requestBody": {
        "required": True,
        "content": {"application/json": {"schema": EmbeddingRequest.model_json_schema()}},
    }
}
