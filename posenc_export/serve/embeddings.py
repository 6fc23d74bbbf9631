"""/v1/embeddings of an encoder with sentence embeddings, as in OpenAI's API."""

import asyncio
import base64
from typing import Annotated, Any, Literal

import numpy as np
from fastapi import APIRouter, FastAPI, Request, Response
from fastapi.responses import JSONResponse
from pydantic import Field

from posenc_export.runtime.session import errors
from posenc_export.runtime.session.model import Model, check_embeds, embed, rows_of
from posenc_export.serve import http
from posenc_export.serve.access import Access
from posenc_export.serve.protocol import Fields, Ids
from posenc_export.serve.requests import Limits, refused

SEVERAL = Field(min_length=1, max_length=2048, fail_fast=True)  # as in OpenAI's API
Tokens = Annotated[Ids, Field(min_length=1)]


class EmbeddingRequest(Fields):
    """Body of a request. Unsupported fields of OpenAI's API accept only their neutral value."""

    model: str | None = Field(None, description="Name of the served model; others are refused.")
    input: str | Annotated[list[str], SEVERAL] | Tokens | Annotated[list[Ids], SEVERAL] = Field(
        description="Text or token ids, or a list of these."
    )
    encoding_format: Literal["float", "base64"] = Field(
        "float", description="base64: the bytes of float32 numbers, little-endian."
    )
    dimensions: int | None = Field(
        None, description="Size of an embedding; only that of the model is accepted."
    )
    user: str | None = None
    prompt_name: str | None = Field(
        None, description="Name of a prompt of the checkpoint to put before each text."
    )


class Embedder:
    """A model that computes sentence embeddings, for one request at a time: a graph uses all
    threads. Raises ValueError for a model without the output sentence_embedding.
    """

    def __init__(self, name: str, model: Model, limits: Limits) -> None:
        check_embeds(model.manifest)
        self.name, self.model, self.limits = name, model, limits
        self.waiting = 0
        self._turn = asyncio.Lock()

    async def embed(self, request: Request) -> Response:
        """Handle POST /v1/embeddings."""
        try:
            async with asyncio.timeout(self.limits.seconds):
                asked = http.parsed(await http.read_body(request), EmbeddingRequest)
                http.check_model(asked.model, self.name)
                if self.waiting >= self.limits.queue:
                    rule = f"at most {self.limits.queue} requests that wait"
                    raise refused("queue", rule, "one more", "try again later", 429)
                self.waiting += 1
                try:
                    async with self._turn:
                        rows, embeddings = await asyncio.to_thread(self._embedded, asked)
                finally:
                    self.waiting -= 1
        except TimeoutError:
            rule = f"the response within {self.limits.seconds} seconds"
            raise refused("server", rule, "a longer one", "send fewer texts", 504) from None
        except errors.GraphError:
            rule = "the graph to run"
            raise refused("server", rule, "an error", "send fewer texts", 500) from None
        tokens = sum(len(row) for row in rows)
        # In base64, or as the shortest numbers that give the same float32.
        vectors = [
            base64.b64encode(row.astype("<f4").tobytes()).decode()
            if asked.encoding_format == "base64"
            else [float(str(number)) for number in row]
            for row in embeddings
        ]
        pairs = enumerate(vectors)
        data = [{"object": "embedding", "index": at, "embedding": vector} for at, vector in pairs]
        usage = {"prompt_tokens": tokens, "total_tokens": tokens}
        return JSONResponse({"object": "list", "data": data, "model": self.name, "usage": usage})

    def _embedded(self, asked: EmbeddingRequest) -> tuple[list[np.ndarray], np.ndarray]:
        inputs: Any = asked.input
        if isinstance(inputs, str) or isinstance(inputs[0], int):
            inputs = [inputs]
        size = self.model.manifest.outputs[-1].axes[-1]
        if asked.dimensions not in (None, size):
            rule = f"{size}, the size of the model"
            raise refused("dimensions", rule, asked.dimensions, "leave it out")
        if isinstance(inputs[0], str):
            rows = rows_of(self.model, inputs, asked.prompt_name)
        else:
            rows = [np.array(ids, np.int64) for ids in inputs]
        return rows, embed(self.model, rows)


def application(name: str, model: Model, limits: Limits, access: Access = Access()) -> FastAPI:
    """Create the application. Raise ValueError as Embedder."""
    embedder, routes = Embedder(name, model, limits), APIRouter()
    body = http.described(EmbeddingRequest)

    @routes.post("/v1/embeddings", openapi_extra=body, summary="Embed texts")
    async def embeddings(request: Request) -> Response:
        return await embedder.embed(request)

    longest = model.cutting_tokenizer.most or int(model.manifest.max_positions)
    http.add_models(routes, name, longest, model.manifest)
    title = f"Embeddings of {name}, as in OpenAI's API."
    remedy = f"POST /v1/embeddings embeds texts, since {name} is an encoder"
    return http.application(title, access, routes, remedy)
