"""What the HTTP applications of decoders and encoders share: bodies, the entry of /v1/models,
and refusals.
"""

import asyncio
from http import HTTPStatus
from typing import Any, Dict, Optional

from fastapi import Request
from starlette.exceptions import HTTPException

from posenc_export.runtime.artefact.manifest import Manifest
from posenc_export.serve import protocol

MOST_BYTES = 1 << 20  # limit for the body of a request
SENDING = 10.0  # seconds in which a body must arrive
GONE = 499  # the client has closed the connection; this status appears only in the server's log
KIND = {429: "rate_limit_error", 500: "server_error", 503: "server_error", 504: "server_error"}


async def read_body(request: Request) -> bytearray:
    """Read the body of a request. Raise HTTPException if it is not declared as JSON, too large
    or too slow, ClientDisconnect if the client leaves before its end.
    """
    kind = request.headers.get("content-type", "")
    if (
        kind.partition(";")[0].strip().lower() != "application/json"
    ):  # browsers send other types to other servers without asking them first
        raise HTTPException(
            415,
            "body: expected Content-Type application/json, got "
            f"{protocol.cut(kind) or 'none'}; send the header",
        )
    body = bytearray()
    try:
        async with asyncio.timeout(SENDING):
            async for part in request.stream():
                body += part
                if len(body) > MOST_BYTES:
                    raise HTTPException(
                        413,
                        f"body: expected at most {MOST_BYTES} bytes, got more; send fewer "
                        "prompts at a time",
                    )
    except TimeoutError:
        raise HTTPException(
            408, f"body: expected it within {SENDING:.0f} seconds, got only a part; send it faster"
        ) from None
    return body


def check_model(asked: Optional[str], name: str) -> None:
    """Raise HTTPException if a request names another model than the served one."""
    if asked not in (None, name):
        raise HTTPException(
            404,
            f"model: expected {name}, got {protocol.cut(str(asked))}; /v1/models lists what "
            "is served",
        )


def card(name: str, created: int, longest: int, manifest: Manifest) -> Dict[str, Any]:
    """Return the answer of /v1/models. longest: most tokens of a request."""
    posenc = {"max_model_len": longest, "target": manifest.target, "digest": manifest.digest}
    return {
        "object": "list",
        "data": [
            {"id": name, "object": "model", "created": created, "owned_by": "posenc", **posenc}
        ],
    }


def message_of(request: Request, error: HTTPException, remedy: str) -> str:
    """Return the message of an error. Those of the router name no path: they are replaced by one
    that names method and path, and ends with `remedy`.
    """
    if error.detail not in (HTTPStatus.NOT_FOUND.phrase, HTTPStatus.METHOD_NOT_ALLOWED.phrase):
        return error.detail
    return (
        "request: expected a method and path that /docs lists, got "
        f"{protocol.cut(f'{request.method} {request.url.path}')}; {remedy}"
    )
