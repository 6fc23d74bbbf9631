"""A server of completions whose answer is chosen by the path of the request: what others send that
is none, or none of the model.
"""

import contextlib
import gzip
import json
import socket
import struct
import threading
import time
from typing import Any, Dict, Iterator, List

import torch

ELSEWHERE = "http://127.0.0.1:9/elsewhere"
KEY = "sk-0123456789.~+/=="
VOCABULARY = 32


def flat(ids: torch.Tensor) -> torch.Tensor:
    """A model whose tokens are all equally probable."""
    return torch.zeros(*ids.shape, VOCABULARY)


def http(status: str, body: bytes = b"", *headers: str, length: bool = True) -> bytes:
    """Return a reply of HTTP."""
    counted = [f"Content-Length: {len(body)}"] if length else []
    return "\r\n".join([f"HTTP/1.1 {status}", *headers, *counted, "\r\n"]).encode() + body


def choice(index: Any = 0, tokens: Any = ("token_id:3",), tops: Any = None, **more: Any) -> Any:
    """Return a choice as vLLM writes it."""
    named = [{f"token_id:{i}": -3.4657359 for i in range(5)}] if tops is None else tops
    logprobs = {"tokens": tokens, "top_logprobs": named}
    return {"index": index, "logprobs": logprobs, "finish_reason": "length", **more}


def listed(*choices: Any) -> bytes:
    return http("200 OK", json.dumps({"choices": choices}).encode())


def tops(key: Any, number: Any = -3.0) -> bytes:
    """Return a reply with one log probability."""
    return listed(*(choice(index, tops=[{key: number}]) for index in range(4)))


def content(id: Any, **more: Any) -> bytes:
    """Return a reply as of llama.cpp with a token."""
    token = {"id": id, "top_logprobs": [{"id": id, "logprob": -3.0}], **more}
    return listed(*({"index": i, "logprobs": {"content": [token]}} for i in range(4)))


def of_text(text: str) -> bytes:
    return http("200 OK", text.encode())


def error(message: str) -> bytes:
    return json.dumps({"error": {"message": message}}).encode()


# What the refusal of an answer must contain, and the answer.
ANSWERS: Dict[str, Any] = {
    **{
        f"redirect {status}": ("127.0.0.1:9", http(f"{status} R", b"", f"Location: {ELSEWHERE}"))
        for status in (301, 302, 303, 307, 308)
    },
    "redirect to a file": ("HTTP 302", http("302 F", b"", "Location: file:///etc/passwd")),
    "redirect without a place": ("HTTP 302", http("302 Found")),
    "not modified": ("HTTP 304", http("304 Not Modified")),
    "no key": ("--api-key", http("401 Unauthorized", error(f"wrong key {KEY}"))),
    "no right": ("HTTP 403", http("403 Forbidden", error("context"))),
    "no such path": ("HTTP 404", http("404 Not Found", b"<html>\n\n</html>")),
    "too many requests": ("HTTP 429", http("429 Too Many Requests")),
    "a fault of its own": ("HTTP 500", http("500 Internal Server Error", b"\xff\n" * 5000)),
    "no context": ("context", http("400 Bad Request", error("exceeds the context"))),
    "another bad request": ("HTTP 400", http("400 Bad Request", error("no logprobs"))),
    "no content": ("HTTP 204", http("204 No Content")),
    "empty": ("truncated", http("200 OK")),
    "half a body": (
        "lacks 40 bytes", http("200 OK", b"{} " * 4, "Content-Length: 52", length=False)
    ),
    "HTML": ("Content-Type", http("200 OK", b"<html>", "Content-Type: text/html")),
    "no JSON": ("malformed", of_text("<html>")),
    "null": ("object", of_text("null")),
    "a list": ("object", of_text("[]")),
    "a number": ("object", of_text("1")),
    "trailing text": ("trailing", of_text('{"choices": []} []')),
    "no UTF-8": ("body", http("200 OK", b'{"choices\xff": "\xff"}')),
    "UTF-16": ("malformed", http("200 OK", '{"choices": []}'.encode("utf-16"))),
    "gzip": ("Content-Encoding", http("200 OK", gzip.compress(b"{}"), "Content-Encoding: gzip")),
    "deep": ("recursion", of_text('{"x": ' + "[" * 100_000)),
    "deep choices": ("$.choices", of_text('{"choices": ' + "[" * 100_000)),
    "a long number": ("$.choices", of_text('{"choices": [{"index": ' + "1" * 5000 + "}]}")),
    "no choices": ("`choices`", of_text("{}")),
    "choices null": ("$.choices", of_text('{"choices": null}')),
    "choices an object": ("$.choices", of_text('{"choices": {}}')),
    "choices empty": ("index of each", listed()),
    "a choice too few": ("index of each", listed(*map(choice, range(3)))),
    "a choice twice": ("index of each", listed(*map(choice, (0, 1, 1, 3)))),
    "index negative": ("index of each", listed(*map(choice, (-1, 0, 1, 2)))),
    "index a float": ("index", listed(choice(0.0))),
    "index a string": ("index", listed(choice("0"))),
    "logprobs missing": ("logprobs", listed({"index": 0})),
    "logprobs null": ("logprobs", listed({"index": 0, "logprobs": None})),
    "logprobs empty": ("choices[0]", listed(*(choice(i, [], []) for i in range(4)))),
    "logprobs without lists": (
        "choices[0]", listed(*({**choice(i), "logprobs": {}} for i in range(4)))
    ),
    "no top_logprobs": ("1 and 0", listed(*(choice(i, tops=[]) for i in range(4)))),
    "nothing beside a token": ("beside", listed(*(choice(i, tops=[{}]) for i in range(4)))),
    "more tokens than asked": (
        "1 to 1",
        listed(*(choice(i, ["token_id:1"] * 2, [{"token_id:1": -1}] * 2) for i in range(4))),
    ),
    "a log probability as text": ("str", tops("token_id:1", "-3.0")),
    "a log probability null": ("null", tops("token_id:1", None)),
    "NaN": ("malformed", tops("token_id:1", float("nan"))),
    "Infinity": ("malformed", tops("token_id:1", float("inf"))),
    "-Infinity": ("malformed", tops("token_id:1", -float("inf"))),
    "1e400": ("out of range", tops("token_id:1").replace(b"-3.0", b"-1e9999")[:-3] + b"]}]}"),
    "logits": ("at most 0", tops("token_id:1", 12.5)),
    "beyond float32": ("at most 0", tops("token_id:1", -1e300)),
    "texts in place of ids": ("got http", tops(" the")),
    "an id with a fraction": ("'token_id:1.0'", tops("token_id:1.0")),
    "an id in other digits": ("token_id:N", tops("token_id:\u0661")),
    "a negative id": ("token_id:-1", tops("token_id:-1")),
    "an id above the vocabulary": ("got http://127.0.0.1", tops(f"token_id:{VOCABULARY}")),
    "an id of 5,000 digits": ("token_id:N", tops("token_id:" + "1" * 5000)),
    "an id of llama.cpp below 0": ("from 0 to 31", content(-1)),
    "an id of llama.cpp above the vocabulary": ("from 0 to 31", content(VOCABULARY)),
    "an id of llama.cpp of 30 digits": ("from 0 to 31", content(10**30)),
    "an id of llama.cpp with a fraction": ("float", content(1.0)),
    "an id of llama.cpp as text": ("str", content("1")),
    "an id of llama.cpp true": ("bool", content(True)),
    "no top_logprobs of llama.cpp": ("top_logprobs", content(1, top_logprobs=None)),
    "101 headers": ("100 headers", http("200 OK", b"{}", *["X: 1"] * 101)),
    "a long header": ("LineTooLong", http("200 OK", b"{}", "X: " + "x" * 70_000)),
    "no status": ("BadStatusLine", b"hello\r\n\r\n"),
    "TLS": ("BadStatusLine", b"\x15\x03\x01\x00\x02\x02\x46"),
    "chunks without sizes": (
        "IncompleteRead", http("200 OK", b"zz\r\n{}", "Transfer-Encoding: chunked", length=False)
    ),
    "half a chunk": (
        "IncompleteRead", http("200 OK", b"ff\r\n{}", "Transfer-Encoding: chunked", length=False)
    ),
    "a length below 0": ("truncated", http("200 OK", b"", "Content-Length: -5", length=False)),
    "nothing": ("RemoteDisconnected", b""),
    "a reset": ("reset", None),
    "a body without end": ("at most", (b"HTTP/1.1 200 OK\r\n\r\n", b" " * 100_000, 0.0)),
    "a slow body": ("within", (b"HTTP/1.1 200 OK\r\n\r\n", b" ", 0.05)),
    "slow headers": ("within", (b"HTTP/1.1 200 OK\r\n", b"X", 0.05)),
}  # fmt: skip
ENDED = [choice(index, [], [], finish_reason="stop") for index in range(4)]


def _answer(connection: socket.socket, received: List[bytes]) -> None:
    with contextlib.suppress(OSError), connection:
        connection.settimeout(5)
        read = b""
        while b"\r\n\r\n" not in read or not read.endswith(b"}"):
            read += connection.recv(1 << 16)
        received.append(read)
        name = read.split(b" ")[1].split(b"/")[1].decode().replace("%20", " ")
        prompts = len(json.loads(read.partition(b"\r\n\r\n")[2])["prompt"])
        answer = listed(*ENDED[:prompts]) if name == "ended" else ANSWERS[name][1]
        if answer is None:
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            return
        first, rest, seconds = (answer, b"", 0) if isinstance(answer, bytes) else answer
        connection.sendall(first)
        while rest:
            connection.sendall(rest)
            time.sleep(seconds)


@contextlib.contextmanager
def serving(received: List[bytes]) -> Iterator[str]:
    """Context manager of the server; its URL, to which the name of an answer is to be added."""
    with socket.create_server(("127.0.0.1", 0), backlog=64) as listening:

        def accept() -> None:
            with contextlib.suppress(OSError):
                while True:
                    connection = listening.accept()[0]
                    threading.Thread(
                        target=_answer, args=(connection, received), daemon=True
                    ).start()

        threading.Thread(target=accept, daemon=True).start()
        yield f"http://127.0.0.1:{listening.getsockname()[1]}"
        listening.shutdown(socket.SHUT_RDWR)
