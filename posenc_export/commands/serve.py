"""`posenc serve`: serve completions and conversations, or embeddings, over HTTP, as in OpenAI's
API.
"""

import argparse
import json
import os
import signal
import socket
from typing import Any, Callable

from posenc_export.commands.options import (
    Table,
    add_folder,
    add_options,
    add_provider,
    add_threads,
)
from posenc_export.commands.terminal import FAILED_CHECK, note_unverified

KEY = "POSENC_API_KEY"
OPTIONS: Table = {
    "--host": dict(
        default="127.0.0.1",
        help="address to listen on; 0.0.0.0 for all addresses (default: 127.0.0.1)",
    ),
    "--port": dict(
        type=int, default=8000, help="port to listen on; 0 for any free port (default: 8000)"
    ),
    "--name": dict(
        help="name of the model in requests (default: name of the checkpoint, or else of the "
        "folder)"
    ),
    "--rows": dict(
        type=int, default=16, help="most requests that are decoded together (default: 16)"
    ),
    "--memory": dict(
        metavar="BYTES",
        help="memory for the caches of rows, such as 2GB; a request whose row does not fit waits "
        "(default: half of the available memory, less that of prefixes)",
    ),
    "--queue": dict(
        type=int,
        default=64,
        help="requests that wait for a row; further requests are answered with 429 (default: 64)",
    ),
    "--context": dict(
        type=int,
        help="largest number of tokens of prompt and continuation (default: the range of "
        "positions, as far as the memory allows)",
    ),
    "--max-prompt": dict(
        type=int, help="largest number of tokens of a prompt (default: context - 1)"
    ),
    "--max-tokens": dict(
        type=int, help="largest number of tokens of a continuation (default: context - 1)"
    ),
    "--chunk": dict(
        type=int,
        default=256,
        help="most tokens of prompts that are read between two decode steps (default: 256)",
    ),
    "--prefix-memory": dict(
        type=int,
        default=256,
        metavar="MB",
        help="memory in MB for the caches of prompts, which requests that begin alike share; "
        "0 for none (default: 256)",
    ),
    "--speculate": dict(
        choices=["lookup"],
        help="read tokens that are looked up in the text so far in one pass where that is "
        "faster, with the same result (default: one token per pass)",
    ),
    "--grace": dict(
        type=int,
        default=30,
        help="seconds that running requests have to finish after SIGTERM (default: 30)",
    ),
    "--timeout": dict(
        type=int,
        default=600,
        help="seconds from the arrival of a request to the end of its response (default: 600)",
    ),
    "--connections": dict(
        type=int,
        help="connections at a time; further ones get status 503 (default: as the limit of "
        "open files allows, at most 512)",
    ),
    "--allow-origin": dict(
        action="append",
        default=[],
        metavar="ORIGIN",
        help="scheme://host:port of web pages that may send requests; may be repeated",
    ),
}


def add_arguments(serving: argparse.ArgumentParser) -> None:
    add_folder(
        serving,
        "an artefact of a decoder, target ort or onnx-static with signature positions, or of "
        "an encoder with sentence_embedding",
    )
    add_options(serving, OPTIONS)
    add_provider(serving)
    add_threads(serving)
    serving.add_argument(
        "--api-key",
        metavar="KEY",
        default=os.environ.get(KEY),
        help=f"key that requests need (default: the environment variable {KEY})",
    )


def run(options: argparse.Namespace) -> int:
    """Serve until SIGTERM or an interrupt. Returns the exit status: 0, or FAILED_CHECK if the
    engine has ended unexpectedly.
    """
    import uvicorn

    from posenc_export.runtime import load
    from posenc_export.serve.access import access
    from posenc_export.serve.connections import OVER, Listener, most_connections, settings

    options.say(f"{options.folder}: loading")
    model = load(options.folder, options.provider, options.threads)
    note_unverified(options.say, options.folder, model.manifest)
    limits = _limits(options, model)
    _check(model, limits)
    name = options.name or str(
        model.manifest.source.get("checkpoint", options.folder.resolve().name)
    )
    connections = most_connections(options.connections)
    listening = Listener(listen(options.host, options.port), connections + OVER)
    address, port = listening.getsockname()[:2]
    allowed = access(options.host, address, port, options.allow_origin, options.api_key)

    def stop() -> None:
        server.should_exit = True

    app = _application(options, name, model, limits, allowed, stop)
    config = uvicorn.Config(
        app,
        log_level="warning",
        use_colors=False,  # control characters are escaped
        timeout_graceful_shutdown=options.grace,
        lifespan="on",
        **settings(connections, limits.seconds),
    )
    server = uvicorn.Server(config)
    options.say.close()
    _announce(options, name, port, _embeds(model))
    # uvicorn raises it again once everything is finished.
    signal.signal(signal.SIGTERM, lambda *_: None)
    server.run(sockets=[listening])
    failed = not _embeds(model) and app.state.service.engine.state == "failed"
    return FAILED_CHECK if failed else 0


def _embeds(model: Any) -> bool:
    return bool(model.manifest.kind == "encoder")


def _check(model: Any, limits: Any) -> None:
    """Raise ValueError for a model that cannot be served."""
    from posenc_export.runtime.session import sentences
    from posenc_export.serve.requests import check_model

    if _embeds(model):
        sentences.check_model(model)
    else:
        check_model(model.manifest, limits)


def _application(
    options: argparse.Namespace,
    name: str,
    model: Any,
    limits: Any,
    allowed: Any,
    stop: Callable[[], None],
) -> Any:
    """Return the application of a model. stop: ends the server."""
    from posenc_export.runtime.artefact.chat_template import chat_codec
    from posenc_export.runtime.artefact.tokenizer import codec
    from posenc_export.serve.app import application
    from posenc_export.serve.embeddings import application as embedding_application

    if _embeds(model):
        return embedding_application(name, model, limits, allowed)
    text = codec(options.folder, model.manifest)
    chat = chat_codec(options.folder, model.manifest)
    return application(name, model, text, limits, allowed, chat, stop)


def _limits(options: argparse.Namespace, model: Any) -> Any:
    from posenc_export.serve.memory import available_memory, longest_row, rows_memory
    from posenc_export.serve.requests import Limits

    available = None if model.provider == "cuda" else available_memory()
    prefixes = options.prefix_memory * 1_000_000
    memory = rows_memory(options.memory, prefixes, available)
    context = options.context
    if context is None:
        context = longest_row(model.session(), memory, model.manifest.max_positions, options.chunk)
        context = max(context, 2)
    return Limits(
        options.rows,
        options.queue,
        context,
        context - 1 if options.max_prompt is None else options.max_prompt,
        context - 1 if options.max_tokens is None else options.max_tokens,
        options.chunk,
        options.timeout,
        prefixes,
        bool(options.speculate),
        memory,
    )


def listen(host: str, port: int) -> socket.socket:
    """Open a listening socket.

    Raises:
        ValueError: an unknown address, a port that is in use.
    """
    try:
        return socket.create_server(
            (host, port), family=socket.AF_INET6 if ":" in host else socket.AF_INET, backlog=2048
        )
    except (OSError, OverflowError) as error:
        raise ValueError(
            f"serve: expected an address to listen on, got {host}:{port} ({error}); give "
            "another --host or --port"
        ) from None


def _announce(options: argparse.Namespace, name: str, port: int, embeds: bool) -> None:
    """Print the address of the server and its routes."""
    routes = (
        "embeddings, with /docs and /health"
        if embeds
        else "completions and /v1/chat/completions, with /docs, /health and /metrics"
    )
    url = f"http://{f'[{options.host}]' if ':' in options.host else options.host}:{port}"
    line = f"{name} at {url}/v1/{routes}; stop it with Ctrl-C"
    print(json.dumps({"model": name, "url": url}) if options.json else line, flush=True)
