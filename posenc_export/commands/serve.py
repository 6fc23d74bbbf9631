"""`posenc serve`: completions, conversations or embeddings over HTTP, as in OpenAI's API."""

import argparse
import json
import os
import signal
import socket
from typing import Any

from posenc_export.commands.loading import loaded, model_of
from posenc_export.commands.options import (
    PROVIDER,
    TEMPLATE,
    THREADS,
    Table,
    option,
    template_values,
)
from posenc_export.commands.terminal import FAILED_CHECK
from posenc_export.runtime.artefact.chat_template import chat_codec, needed_chat_codec
from posenc_export.serve.memory import available_memory, longest_row, rows_memory
from posenc_export.serve.requests import CHUNK, Limits
from posenc_export.shared.refusal import refusal

KEY = "POSENC_API_KEY"
MB = 1_000_000
CONNECTIONS = 512  # at a time; uvicorn answers others with status 503
OPTIONS: Table = {
    **model_of(
        "an artefact of a decoder, target ort or onnx-static with signature positions, or of an "
        "encoder with sentence_embedding"
    ),
    "--host": option("address to listen on; 0.0.0.0 for all addresses", "127.0.0.1"),
    "--port": option("port to listen on; 0 for any free port", 8000, least=0),
    "--name": option(
        "name of the model in requests (default: name of the checkpoint, or else of the folder)"
    ),
    "--rows": option("most requests that are decoded together", 16, least=1),
    "--memory": option(
        "memory in MB for the caches of rows; a request whose row does not fit waits (default: "
        "half of the available memory, less that of prefixes)",
        least=1,
        metavar="MB",
    ),
    "--queue": option(
        "requests that wait for a row; further requests are answered with 429", 64, least=1
    ),
    "--context": option(
        "largest number of tokens of prompt and continuation (default: the range of positions, as "
        "far as the memory allows)",
        least=1,
    ),
    "--chunk": option(
        "most tokens of prompts that are read between two decode steps", CHUNK, least=1
    ),
    "--prefix-memory": option(
        "memory in MB for the caches of prompts, which requests that begin alike share; 0 for none",
        256,
        least=0,
        metavar="MB",
    ),
    "--grace": option("seconds that running requests have to finish after SIGTERM", 30, least=0),
    "--timeout": option(
        "seconds from the arrival of a request to the end of its response", 600, least=1
    ),
    "--allow-origin": dict(
        action="append",
        default=[],
        metavar="ORIGIN",
        help="scheme://host:port of web pages that may send requests; may be repeated",
    ),
    "--api-key": dict(
        metavar="KEY",
        default=os.environ.get(KEY),
        help=f"key that requests need (default: the environment variable {KEY})",
    ),
    **TEMPLATE,
    **PROVIDER,
    **THREADS,
}


def run(options: argparse.Namespace) -> int:
    """Serve until SIGTERM or an interrupt. Returns 0, or FAILED_CHECK if the engine has failed."""
    import uvicorn

    from posenc_export.serve.access import access

    options.say(f"{options.folder}: loading")
    model = loaded(options, options.folder, threads=options.threads)
    limits, embeds = _limits(options, model), model.manifest.encodes
    source = model.manifest.source.get("checkpoint", options.folder.resolve().name)
    name = options.name or str(source)
    listening = listen(options.host, options.port)
    address, port = listening.getsockname()[:2]
    allowed = access(options.host, address, options.allow_origin, options.api_key)

    def stop() -> None:
        server.should_exit = True

    app = _application(options, model, name, limits, allowed, stop)
    config = uvicorn.Config(
        app,
        log_level="warning",
        use_colors=False,  # control characters are escaped
        timeout_graceful_shutdown=options.grace,
        lifespan="on",
        ws="none",
        limit_concurrency=CONNECTIONS,
    )
    server = uvicorn.Server(config)
    options.say.close()
    talks = " and /v1/chat/completions" if not embeds and app.state.service.chat.codec else ""
    of_decoder = f"completions{talks}, with /openapi.json, /health and /metrics"
    of_encoder = "embeddings, with /openapi.json and /health"
    url = f"http://{f'[{options.host}]' if ':' in options.host else options.host}:{port}"
    line = f"{name} at {url}/v1/{of_encoder if embeds else of_decoder}; stop it with Ctrl-C"
    print(json.dumps({"model": name, "url": url}) if options.json else line, flush=True)
    # uvicorn raises it again once everything is finished.
    signal.signal(signal.SIGTERM, lambda *_: None)
    server.run(sockets=[listening])
    return FAILED_CHECK if not embeds and app.state.service.engine.state == "failed" else 0


def _application(
    options: argparse.Namespace, model: Any, name: str, limits: Limits, allowed: Any, stop: Any
) -> Any:
    from posenc_export.serve import app, embeddings

    folder, manifest, values = model.folder, model.manifest, template_values(options)
    chat = needed_chat_codec(folder, manifest).given(values) if values else None
    if manifest.encodes:
        return embeddings.application(name, model, limits, allowed)
    chat = chat or chat_codec(folder, manifest)
    return app.application(name, model, limits, allowed, chat, stop)


def _limits(options: argparse.Namespace, model: Any) -> Limits:
    available = None if model.provider == "cuda" else available_memory()
    asked = None if options.memory is None else options.memory * MB
    prefixes = options.prefix_memory * MB
    memory = rows_memory(asked, prefixes, available)
    if (context := options.context) is None:
        context = longest_row(model.session(), memory, model.manifest.max_positions, options.chunk)
        context = max(context, 2)
    return Limits(
        options.rows, options.queue, context, options.chunk, options.timeout, prefixes, memory
    )


def listen(host: str, port: int) -> socket.socket:
    """Open a listening socket. Raise ValueError for an unknown address, or a port in use."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        return socket.create_server((host, port), family=family, backlog=2048)
    except (OSError, OverflowError) as error:
        rule, got = "an address to listen on", f"{host}:{port} ({error})"
        raise refusal("serve", rule, got, "give another --host or --port") from None
