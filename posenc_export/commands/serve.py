"""`posenc serve`: serve completions and conversations, or embeddings, over HTTP, as in OpenAI's
API.
"""

import argparse
import json
import os
import signal
import socket
from typing import Any

from posenc_export.commands.options import add_folder, add_provider, threads
from posenc_export.commands.terminal import FAILED_CHECK, note_unverified

KEY = "POSENC_API_KEY"


def add_arguments(serving: argparse.ArgumentParser) -> None:
    """Add the arguments of `posenc serve`."""
    add_folder(
        serving,
        "an artefact of a decoder, target ort or onnx-static with signature positions, or of "
        "an encoder with sentence_embedding",
    )
    serving.add_argument(
        "--host",
        default="127.0.0.1",
        help="address to listen on; 0.0.0.0 for all addresses (default: 127.0.0.1)",
    )
    serving.add_argument(
        "--port",
        type=int,
        default=8000,
        help="port to listen on; 0 for any free port (default: 8000)",
    )
    serving.add_argument(
        "--name",
        help="name of the model in requests (default: name of the checkpoint, or else of the "
        "folder)",
    )
    serving.add_argument(
        "--rows", type=int, default=16, help="requests that are decoded together (default: 16)"
    )
    serving.add_argument(
        "--queue",
        type=int,
        default=64,
        help="requests that wait for a row; further requests are answered with 429 (default: 64)",
    )
    serving.add_argument(
        "--context",
        type=int,
        help="largest number of tokens of prompt and continuation (default: the range of "
        "positions)",
    )
    serving.add_argument(
        "--max-prompt", type=int, help="largest number of tokens of a prompt (default: context - 1)"
    )
    serving.add_argument(
        "--max-tokens",
        type=int,
        help="largest number of tokens of a continuation (default: context - 1)",
    )
    serving.add_argument(
        "--chunk",
        type=int,
        default=256,
        help="most tokens of prompts that are read between two decode steps (default: 256)",
    )
    shared = (
        "memory in MB for the caches of prompts, which requests that begin alike share; 0 for "
        "none (default: 256)"
    )
    serving.add_argument("--prefix-memory", type=int, default=256, metavar="MB", help=shared)
    drafted = (
        "read tokens that are looked up in the text so far in one pass where that is faster, "
        "with the same result (default: one token per pass)"
    )
    serving.add_argument("--speculate", choices=["lookup"], help=drafted)
    add_provider(serving)
    serving.add_argument(
        "--threads",
        type=threads,
        default="auto",
        help="threads of one operator (default: by the size of the model)",
    )
    serving.add_argument(
        "--grace",
        type=int,
        default=30,
        help="seconds that running requests have to finish after SIGTERM (default: 30)",
    )
    serving.add_argument(
        "--timeout",
        type=int,
        default=600,
        help="seconds from the arrival of a request to the end of its response (default: 600)",
    )
    serving.add_argument(
        "--connections",
        type=int,
        help="connections at a time; further ones get status 503 (default: as the limit of open "
        "files allows, at most 512)",
    )
    serving.add_argument(
        "--allow-origin",
        action="append",
        default=[],
        metavar="ORIGIN",
        help="scheme://host:port of web pages that may send requests; may be repeated",
    )
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
    from posenc_export.runtime.artefact.chat_template import chat_codec
    from posenc_export.runtime.artefact.tokenizer import codec
    from posenc_export.runtime.session import sentences
    from posenc_export.serve.access import access
    from posenc_export.serve.app import application
    from posenc_export.serve.connections import OVER, Listener, most_connections, settings
    from posenc_export.serve.embeddings import application as embedding_application
    from posenc_export.serve.memory import available_memory, check_memory
    from posenc_export.serve.requests import check_model

    options.say(f"{options.folder}: loading")
    model = load(options.folder, options.provider, options.threads)
    note_unverified(options.say, options.folder, model.manifest)
    limits = _limits(options, model.manifest.max_positions)
    embeds = model.manifest.kind == "encoder"
    if embeds:
        sentences.check_model(model)
    else:
        check_model(model.manifest, limits)
        check_memory(
            model.manifest, limits, None if model.provider == "cuda" else available_memory()
        )
    name = options.name or str(
        model.manifest.source.get("checkpoint", options.folder.resolve().name)
    )
    connections = most_connections(options.connections)
    listening = Listener(listen(options.host, options.port), connections + OVER)
    address, port = listening.getsockname()[:2]
    allowed = access(options.host, address, port, options.allow_origin, options.api_key)

    def stop() -> None:
        server.should_exit = True

    if embeds:
        app = embedding_application(name, model, limits, allowed)
    else:
        app = application(
            name,
            model,
            codec(options.folder, model.manifest),
            limits,
            allowed,
            chat_codec(options.folder, model.manifest),
            stop,
        )
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
    _announce(
        options,
        name,
        port,
        "embeddings, with /docs and /health"
        if embeds
        else "completions and /v1/chat/completions, with /docs, /health and /metrics",
    )
    signal.signal(
        signal.SIGTERM, lambda *_: None
    )  # uvicorn raises it again once everything is finished
    server.run(sockets=[listening])
    return FAILED_CHECK if not embeds and app.state.service.engine.state == "failed" else 0


def _limits(options: argparse.Namespace, most: int) -> Any:
    from posenc_export.serve.requests import Limits

    context = most if options.context is None else options.context
    prompt, tokens = (
        context - 1 if given is None else given
        for given in (options.max_prompt, options.max_tokens)
    )
    return Limits(
        options.rows,
        options.queue,
        context,
        prompt,
        tokens,
        options.chunk,
        options.timeout,
        options.prefix_memory * 1_000_000,
        bool(options.speculate),
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


def _announce(options: argparse.Namespace, name: str, port: int, routes: str) -> None:
    url = f"http://{f'[{options.host}]' if ':' in options.host else options.host}:{port}"
    line = f"{name} at {url}/v1/{routes}; stop it with Ctrl-C"
    print(json.dumps({"model": name, "url": url}) if options.json else line, flush=True)
