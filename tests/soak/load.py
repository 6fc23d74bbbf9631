"""Check the server under load: `python -m tests.soak.load [--requests 2000] [--slow 200] [--leaving
200] [--json FILE]`.

Slow clients hold connections without
sending or reading to the end, leaving clients close theirs at any moment, and other clients send
requests, again if they are refused, and compare the tokens with those of a session. Most requests
begin with one of fifteen common prefixes, and the memory of prefixes is so small that kept ones are
replaced. Exits with status 1 if an answer is wrong or missing, the server writes a traceback, its
memory grows by more than LIMIT, it needs more than a second to answer after the load, or no prefix
was shared or replaced.
"""

import argparse
import asyncio
import contextlib
import json
import os
import random
import subprocess
import sys
import tempfile
import time
import urllib.request
import warnings
from collections import Counter
from pathlib import Path
from typing import Any, Iterator, NamedTuple

import numpy as np

from posenc_export.runtime.artefact import manifest as manifests
from posenc_export.runtime.session.prefixes import BLOCK
from posenc_export.serve.requests import Request
from tests.serve.models import alone, artefact, opened, prompts

LIMIT = 8 * 2**20  # most growth of the server in bytes
RECOVERED = 1.0  # most seconds to the first answer after the load
CLIENTS = 48  # clients that send requests at a time
DIFFERENT, TOKENS = 64, 24  # number of different requests, most tokens of each
DRAWS = [np.random.default_rng(seed).integers(97, 123, 3 * BLOCK) for seed in range(15)]
BEGINNINGS = [[], *(draw.tolist() for draw in DRAWS)]
PREFIX_MEMORY = 1  # MB, less than all requests together need
REFUSED = (429, 503)


class Case(NamedTuple):
    """A request and its tokens."""

    body: bytes
    tokens: list[int]


class Load(NamedTuple):
    """Size of a load: numbers of requests, slow and leaving clients."""

    requests: int = 2000
    slow: int = 200
    leaving: int = 200


def message(body: bytes, length: int | None = None) -> bytes:
    head = (
        "POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\nContent-Type: "
        f"application/json\r\nContent-Length: {length or len(body)}\r\n\r\n"
    )
    return head.encode() + body


async def asked(port: int, case: Case) -> tuple[int, list[int]]:
    """Send a request. Return the status and the tokens; status 0 if the server closed the
    connection without an answer.
    """
    try:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        try:
            writer.write(message(case.body))
            head, _, rest = (await reader.read()).partition(b"\r\n\r\n")
        finally:
            writer.close()
    except ConnectionError:
        return 0, []
    if not head.startswith(b"HTTP/1.1 200"):
        return int(head.split()[1]) if head else 0, []
    lines = [line for line in rest.splitlines() if b'"choices"' in line]
    events = [json.loads(line.removeprefix(b"data: ")) for line in lines]
    return 200, [token for event in events for token in event["choices"][0]["token_ids"]]


async def served(port: int, case: Case, found: "Counter[str]") -> None:
    """Send a request until it is not refused, and count what happened."""
    for _ in range(1000):
        status, tokens = await asked(port, case)
        if status == 200:
            found["answered" if tokens == case.tokens else "wrong"] += 1
            return
        if status and status not in REFUSED:
            break
        found["refused" if status else "closed"] += 1
        await asyncio.sleep(random.uniform(0.02, 0.2))
    found["missing"] += 1


async def slow(port: int, case: Case, kind: int, ended: asyncio.Event) -> None:
    """Hold connections until the load ends: without a word, with parts of a head or of a body,
    or without reading the answer.
    """
    while not ended.is_set():
        with contextlib.suppress(ConnectionError):
            reader, writer = await asyncio.open_connection("127.0.0.1", port, limit=1024)
            whole = message(case.body)
            head = [whole[place : place + 1] for place in range(40)]
            parts = ([], head, [message(b"", 1000)] + [b" "] * 900, [whole])[kind % 4]
            try:
                for part in parts:
                    writer.write(part)
                    await writer.drain()
                    await _until(ended, 0.2)
                if kind % 4 == 3:
                    await _until(ended, 5)
                while not (ended.is_set() or reader.at_eof()):
                    await _until(ended, 0.1)
                    with contextlib.suppress(asyncio.TimeoutError):
                        await asyncio.wait_for(reader.read(64), 0.1)
            finally:
                writer.close()
        await _until(ended, 0.1)


async def _until(ended: asyncio.Event, seconds: float) -> None:
    with contextlib.suppress(asyncio.TimeoutError):
        await asyncio.wait_for(ended.wait(), seconds)


async def leaving(port: int, case: Case, found: "Counter[str]") -> None:
    """Send a part of a request, or all of it, and close the connection after a moment."""
    whole = message(case.body)
    with contextlib.suppress(ConnectionError):
        _, writer = await asyncio.open_connection("127.0.0.1", port)
        length = len(whole)
        end = random.choice((10, length // 2, length - 1, length, length, length))
        writer.write(whole[:end])
        await asyncio.sleep(random.uniform(0, 0.05))
        writer.transport.abort()
    found["left"] += 1


def cases(folder: Path) -> list[Case]:
    """Return requests, half of them streams, with the tokens that a session gives."""
    requests = [
        Request((*BEGINNINGS[index % len(BEGINNINGS)], *prompt), 1 + index % TOKENS)
        for index, prompt in enumerate(prompts(DIFFERENT, 60, seed=5))
    ]
    expected = alone(opened(folder), requests)
    each = enumerate(requests)
    return [Case(_body(request, bool(index % 2)), expected[request]) for index, request in each]


def _body(request: Request, stream: bool) -> bytes:
    body = {"prompt": list(request.prompt), "max_tokens": request.max_tokens, "temperature": 0}
    return json.dumps({**body, "stream": stream, "return_token_ids": True}).encode()


@contextlib.contextmanager
def server(folder: Path) -> Iterator[tuple[int, "subprocess.Popen[str]", Path]]:
    """Context manager that runs a server; gives its port, the process and the file of its
    errors.
    """
    command = [
        sys.executable,
        *"-m posenc_export.commands.cli serve".split(),
        str(folder),
        *"--port 0 --context 256 --threads 1 --json".split(),
    ]
    command += ["--prefix-memory", str(PREFIX_MEMORY)]
    with (
        tempfile.TemporaryDirectory() as temporary,
        open(Path(temporary) / "errors", "w") as errors,
    ):
        how: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": errors, "text": True}
        process = subprocess.Popen(command, env={**os.environ, "OMP_NUM_THREADS": "1"}, **how)
        try:
            assert process.stdout is not None
            port = json.loads(process.stdout.readline())["url"].rpartition(":")[2]
            yield int(port), process, Path(errors.name)
        finally:
            process.terminate()
            process.communicate()


def resident(process: "subprocess.Popen[str]") -> int:
    """Return the resident memory of the process in bytes."""
    pages = int(Path(f"/proc/{process.pid}/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")


def prefix_metrics(port: int) -> dict[str, int]:
    """Return the counts of shared prefixes."""
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=60) as answer:
        lines = answer.read().decode().splitlines()
    found = [line.split() for line in lines if line.startswith("posenc_prefix")]
    return {name.removeprefix("posenc_"): int(float(value)) for name, value in found}


async def loaded(port: int, load: Load, given: list[Case]) -> tuple["Counter[str]", float]:
    """Run all clients. Return what happened, and the seconds from the end of the load to the
    next answer.
    """
    result: Counter[str] = Counter()
    ended, turn = asyncio.Event(), asyncio.Semaphore(CLIENTS)

    async def one(index: int) -> None:
        async with turn:
            await served(port, given[index % len(given)], result)
            if index * load.leaving // load.requests != (index + 1) * load.leaving // load.requests:
                await leaving(port, random.choice(given), result)

    holding = [
        asyncio.create_task(slow(port, given[index % len(given)], index, ended))
        for index in range(load.slow)
    ]
    await asyncio.gather(*(one(index) for index in range(load.requests)))
    ended.set()
    await asyncio.gather(*holding)
    since = time.perf_counter()
    while (await asked(port, given[0])) != (200, given[0].tokens):
        await asyncio.sleep(0.01)
    return result, time.perf_counter() - since


def measured(folder: Path, load: Load) -> dict[str, Any]:
    """Run a server and its load. Return the figures, with a list of failures under "wrong"."""
    given = cases(folder)
    with server(folder) as (port, process, errors):
        # Memory stays in use from the first load on.
        asyncio.run(loaded(port, load._replace(requests=max(load.requests // 4, 100)), given))
        before, since = resident(process), time.perf_counter()
        found, recovered = asyncio.run(loaded(port, load, given))
        seconds, after, said = time.perf_counter() - since, resident(process), errors.read_text()
        shared = prefix_metrics(port)
        room = PREFIX_MEMORY * 10**6 // (manifests.read(folder).slot_bytes * BLOCK) * BLOCK
        running = process.poll() is None
    wrong = [f"{found[kind]} {kind}" for kind in ("wrong", "missing") if found[kind]]
    wrong += [f"memory grew by {after - before} bytes"] if after - before > LIMIT else []
    wrong += [f"{recovered:.2f} s to recover"] if recovered > RECOVERED else []
    wrong += [f"errors: {said[-2000:]}"] if "Traceback" in said or "rror" in said else []
    wrong += [] if running else ["the server has ended"]
    right = shared["prefix_kept_tokens"] == room
    if not right or shared["prefix_hits_total"] <= load.requests // 4:
        wrong.append(f"prefixes: {shared} of {room} tokens")
    figures: dict[str, Any] = {"before": before, "after": after, "recovered": round(recovered, 3)}
    figures |= {"seconds": round(seconds, 1), "wrong": wrong}
    return {**load._asdict(), **found, **shared, **figures}


def main(arguments: list[str] | None = None) -> int:
    """Run the load. Returns the exit status: 0, or 1 if there is a failure."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    for name, value in Load()._asdict().items():
        parser.add_argument(f"--{name}", type=int, default=value)
    parser.add_argument("--json", type=Path, help="write the figures to FILE")
    options = parser.parse_args(arguments)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # warnings of torch and other libraries during export
        figures = measured(artefact("ort"), Load(options.requests, options.slow, options.leaving))
    print(json.dumps(figures), flush=True)
    if options.json:
        options.json.parent.mkdir(parents=True, exist_ok=True)
        options.json.write_text(json.dumps(figures, indent=1) + "\n")
    return 1 if figures["wrong"] else 0


if __name__ == "__main__":
    sys.exit(main())
