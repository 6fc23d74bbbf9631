"""The server when a tokenizer, a client or the engine fails: an error in one line, and nothing
that is left running.
"""

import asyncio
import dataclasses
import json
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any, Sequence

import pytest

from posenc_export.runtime.artefact.chat_template import ChatCodec
from posenc_export.runtime.artefact.tokenizer import ByteCodec, TokenizerCodec
from posenc_export.runtime.session.model import Model
from posenc_export.serve import protocol
from posenc_export.serve.batch import Batch
from tests.serve.models import artefact, slow  # noqa: F401
from tests.serve.test_http import JSON, LIMITS, LONG, Client, app, folder, model, port, running  # noqa: F401

pytestmark = pytest.mark.xdist_group("serve")
STEP = (
    "from posenc_export.serve.batch import Batch\ndef step(batch):\n    raise "
    "MemoryError\nBatch.step = step\n"
)


class Failing(ByteCodec):
    """A codec that cannot prepare the decoder of the second choice."""

    def __init__(self) -> None:
        self.asked: list[Sequence[int]] = []

    def pieces(self, prompt: Sequence[int]) -> Any:
        self.asked.append(prompt)
        if len(self.asked) == 2:
            raise ValueError("text: expected planted, got planted; planted")
        return super().pieces(prompt)


def test_a_request_that_fails_in_the_middle_leaves_no_row_behind(
    app: Any, port: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    service, queued = app.state.service, []
    monkeypatch.setattr(service.completions, "codec", Failing())
    monkeypatch.setattr(service.engine, "submit", queued.append)
    status, answer = Client(port).ask("/v1/completions", {**LONG, "n": 3})
    assert (status, queued) == (400, []) and "planted" in answer["error"]["message"]


def test_a_text_that_the_tokenizer_cannot_encode_is_refused(
    app: Any, port: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    tokenizers = pytest.importorskip("tokenizers", reason="tokenizers is not installed")
    codec = TokenizerCodec.__new__(TokenizerCodec)
    codec.tokenizer = tokenizers.Tokenizer(tokenizers.models.WordLevel({"a": 0}, unk_token="none"))
    monkeypatch.setattr(app.state.service.completions, "codec", codec)
    status, answer = Client(port).ask("/v1/completions", {"prompt": "b"})
    said = "text: expected a text that the tokenizer can encode, got an error"
    assert status == 400 and answer["error"]["message"].startswith(said)


@pytest.mark.parametrize("stream", [False, True])
def test_tokens_that_the_tokenizer_cannot_decode_end_the_request_with_an_error(
    stream: bool, app: Any, port: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    def push(pieces: Any, token: int) -> str:
        raise ValueError("planted")

    monkeypatch.setattr("posenc_export.runtime.artefact.tokenizer.BytePieces.push", push)
    client, end = Client(port), time.monotonic() + 10
    said = list(client.events(LONG))[-1] if stream else client.ask("/v1/completions", LONG)[1]
    # A client sees the end of a stream before the server has finished with it.
    while app.state.service.open and time.monotonic() < end:
        time.sleep(0.01)
    assert said["error"]["type"] == "server_error" and not app.state.service.open


def test_other_requests_are_answered_while_a_long_text_is_tokenized(
    app: Any, port: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun, done = threading.Event(), threading.Event()

    class Slow(ByteCodec):
        def encode(self, text: str, special: bool = True) -> list[int]:
            begun.set()
            assert done.wait(30)
            return super().encode(text)

    monkeypatch.setattr(app.state.service.completions, "codec", Slow())
    answers: list[Any] = []

    def ask() -> None:
        body = {"prompt": "a", "max_tokens": 2}
        answers.append(Client(port).ask("/v1/completions", body))

    asking = threading.Thread(target=ask)
    asking.start()
    assert begun.wait(30)
    other = Client(port)
    other.connection.timeout = 5
    assert other.ask("/health")[0] == 200
    done.set()
    asking.join(30)
    assert answers[0][0] == 200


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
def test_a_text_that_cannot_fit_is_refused_before_it_is_tokenized(
    path: str, app: Any, port: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Watched(ByteCodec):
        def encode(self, text: str, special: bool = True) -> list[int]:
            assert len(text) < LIMITS.context
            return super().encode(text)

    monkeypatch.setattr(app.state.service.completions, "codec", Watched())
    template = "{{ messages[0].content }}"
    monkeypatch.setattr(app.state.service.chat, "codec", ChatCodec(Watched(), template, {}))
    text = "a" * (protocol.CHARACTERS * (LIMITS.context - 1) + 1)
    asked = {"prompt": text} if path == "/v1/completions" else {"messages": [_user(text)]}
    status, answer = Client(port).ask(path, asked)
    said = "prompt: expected 1 .. 299 tokens in at most 19136 characters, got 19137; shorten it"
    assert status == 400 and answer["error"]["message"] == said


def _user(text: str) -> dict[str, str]:
    return {"role": "user", "content": text}


@pytest.fixture
def short(app: Any, monkeypatch: pytest.MonkeyPatch, slow: None) -> None:
    """Give requests a tenth of a second."""
    monkeypatch.setattr(app.state.service, "limits", dataclasses.replace(LIMITS))
    vars(app.state.service.limits)["seconds"] = 0.1


def test_a_stream_that_takes_too_long_ends_with_an_error(app: Any, port: int, short: None) -> None:
    events = list(Client(port).events(LONG))
    assert len(events) > 1
    assert "choices" in events[0]
    assert "got a longer one" in events[-1]["error"]["message"]
    assert not app.state.service.open


def test_an_answer_that_takes_too_long_is_refused(app: Any, port: int, short: None) -> None:
    status, answer = Client(port).ask("/v1/completions", LONG)
    assert status == 504
    assert answer["error"]["type"] == "server_error"
    assert not app.state.service.open


def test_a_request_that_got_no_memory_in_its_time_is_answered_with_429(
    app: Any, port: int, short: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Batch, "_has_room_for", lambda batch, request: False)
    status, answer = Client(port).ask("/v1/completions", LONG)
    assert status == 429 and "expected a row and its memory" in answer["error"]["message"]
    assert not app.state.service.open


@pytest.mark.parametrize("stream", [False, True])
def test_a_request_that_the_end_of_the_server_cuts_ends_with_an_error(
    stream: bool, folder: Path, model: Model, slow: None, caplog: pytest.LogCaptureFixture
) -> None:
    from posenc_export.serve.app import application

    app = application("tiny", model, LIMITS)
    with running(app, timeout_graceful_shutdown=0) as (port, server):
        client = Client(port)
        client.send("/v1/completions", {**LONG, "stream": stream})
        while not server.server_state.tasks:
            time.sleep(0.01)
        time.sleep(0.1)
        server.should_exit = True
        said = client.connection.getresponse().read().decode()
        client.connection.close()
    assert "got the end of the server" in said.strip().splitlines()[-1]
    assert "Exception" not in caplog.text


def test_a_server_whose_engine_ends_says_so_and_exits_with_a_code(folder: Path) -> None:
    code = (
        f"import sys\nfrom posenc_export.commands.cli import main\n{STEP}sys.exit(main(['serve', "
        f"{str(folder)!r}, '--port', '0', '--context', '300', '--json']))"
    )
    pipes: Any = dict.fromkeys(("stdout", "stderr"), subprocess.PIPE)
    process = subprocess.Popen([sys.executable, "-c", code], text=True, **pipes)
    try:
        assert process.stdout is not None
        port = int(json.loads(process.stdout.readline())["url"].rpartition(":")[2])
        assert Client(port).ask("/v1/completions", LONG)[0] == 500
        _, said = process.communicate(timeout=30)
        assert process.returncode == 1
        assert "the engine has ended" in said
        assert "Traceback" not in said
    finally:
        process.kill()
        process.communicate()


def test_a_body_of_many_parts_is_read_in_linear_time() -> None:
    from posenc_export.serve.http import read_body

    class Parts:
        headers = {"content-type": "application/json; charset=utf-8"}

        async def stream(self) -> Any:
            for _ in range(200_000):
                yield b"12345"

    begun = time.perf_counter()
    assert asyncio.run(read_body(Parts())) == b"12345" * 200_000  # type: ignore[arg-type]
    assert time.perf_counter() - begun < 2  # 0.05 s; 10 s if each part copied those before it


def test_a_body_that_does_not_arrive_is_refused(port: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("posenc_export.serve.http.SENDING", 0.1)
    client = Client(port)
    client.connection.putrequest("POST", "/v1/completions")
    for name, value in {**JSON, "Content-Length": "100"}.items():
        client.connection.putheader(name, value)
    client.connection.endheaders(b"{")
    answer = client.connection.getresponse()
    assert answer.status == 408 and b"got only a part" in answer.read()
    client.connection.close()
