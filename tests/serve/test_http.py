"""The server over HTTP on the loopback interface."""

import contextlib
import http.client
import json
import os
import signal
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Iterator

import pytest

from posenc_export.commands import cli, serve
from posenc_export.runtime.artefact.chat_template import ChatCodec
from posenc_export.runtime.artefact.tokenizer import ByteCodec
from posenc_export.runtime.session.errors import GraphError
from posenc_export.runtime.session.model import Model
from posenc_export.serve.batch import Batch
from posenc_export.serve.requests import Limits, Request
from tests.serve.models import alone, artefact, opened, prompts, slow  # noqa: F401

uvicorn = pytest.importorskip("uvicorn")
pytest.importorskip("fastapi")
pytest.importorskip("prometheus_client")
pytestmark = pytest.mark.xdist_group("serve")
LIMITS = Limits(rows=6, queue=40, context=300, chunk=32)
LONG = {"prompt": [97], "max_tokens": 250, "temperature": 0}
JSON, COMPLETIONS = {"Content-Type": "application/json"}, "/v1/completions"


class Client:
    """An HTTP client with one connection."""

    def __init__(self, port: int) -> None:
        self.connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)

    def ask(self, path: str, body: dict[str, Any] | None = None) -> tuple[int, Any]:
        self.send(path, body)
        with contextlib.closing(self.connection):
            answer = self.connection.getresponse()
            text = answer.read().decode()
        is_json = answer.headers["content-type"].startswith("application/json")
        return answer.status, json.loads(text) if is_json else text

    def send(self, path: str, body: dict[str, Any] | None = None) -> None:
        content = None if body is None else json.dumps(body)
        self.connection.request("GET" if body is None else "POST", path, content, JSON)

    def choice(self, body: dict[str, Any], path: str = COMPLETIONS) -> dict[str, Any]:
        """Return the first choice of an answer."""
        return dict(self.ask(path, body)[1]["choices"][0])

    def events(self, body: dict[str, Any]) -> Iterator[dict[str, Any]]:
        """Yield server-sent events up to [DONE]. Closes the connection if the caller stops
        earlier.
        """
        self.send(COMPLETIONS, {**body, "stream": True, "return_token_ids": True})
        answer = self.connection.getresponse()
        try:
            kind = answer.headers["content-type"]
            assert answer.status == 200 and kind.startswith("text/event-stream"), answer.read()
            for line in answer:
                if line.strip() == b"data: [DONE]":
                    return
                if line.strip():
                    yield json.loads(line.removeprefix(b"data: "))
        finally:
            answer.close()
            self.connection.close()


@contextlib.contextmanager
def running(app: Any, **settings: Any) -> Iterator[tuple[int, Any]]:
    """Context manager that serves an application on a thread; gives the port and uvicorn's
    server.
    """
    from posenc_export.commands.serve import listen

    listening = listen("127.0.0.1", 0)
    server = uvicorn.Server(uvicorn.Config(app, log_level="warning", **settings))
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listening]})
    thread.start()
    yield listening.getsockname()[1], server
    server.should_exit = True
    thread.join(30)
    listening.close()


@pytest.fixture(scope="module")
def folder() -> Path:
    return artefact("ort")


@pytest.fixture(scope="module")
def model(folder: Path) -> Model:
    return opened(folder)


@pytest.fixture(scope="module")
def app(folder: Path, model: Model) -> Any:
    from posenc_export.serve.app import application

    return application("tiny", model, LIMITS)


@pytest.fixture(scope="module")
def port(app: Any) -> Iterator[int]:
    with running(app) as (port, _):
        yield port


def _metric(port: int, name: str) -> float:
    lines = Client(port).ask("/metrics")[1].splitlines()
    found = [line for line in lines if line.startswith((f"{name} ", f"{name}{{"))]
    return sum(float(line.rpartition(" ")[2]) for line in found)


def _usage(prompt: int, completion: int) -> dict[str, int]:
    total = prompt + completion
    return {"prompt_tokens": prompt, "completion_tokens": completion, "total_tokens": total}


def _until(port: int, name: str, value: float) -> None:
    """Wait until a metric has a value."""
    end = time.monotonic() + 30
    while _metric(port, name) != value:
        assert time.monotonic() < end, f"{name} is {_metric(port, name)}"
        time.sleep(0.01)


def test_sixteen_clients_get_what_each_gets_alone_while_others_leave(
    port: int, model: Model
) -> None:
    requests = [Request(tuple(prompt), 24) for prompt in prompts(48, 120, seed=3)]
    expected = alone(model, requests)

    def one(index: int) -> list[int]:
        request = requests[index]
        body = {"prompt": list(request.prompt), "max_tokens": request.max_tokens, "temperature": 0}
        if index % 3 == 0:  # a response without streaming
            status, answer = Client(port).ask(COMPLETIONS, {**body, "return_token_ids": True})
            assert status == 200 and answer["usage"] == _usage(len(request.prompt), 24)
            return list(answer["choices"][0]["token_ids"])
        made: list[int] = []
        for event in Client(port).events(body):
            made += event["choices"][0]["token_ids"]
            if index % 3 == 1 and len(made) >= 5:  # disconnects before the end
                break
        return made

    with ThreadPoolExecutor(16) as clients:
        result = list(clients.map(one, range(len(requests))))
    for index, request in enumerate(requests):
        made, least = result[index], 5 if index % 3 == 1 else 24
        assert made == expected[request][: len(made)] and len(made) >= least, index
    _until(port, "posenc_running_rows", 0)


@pytest.mark.usefixtures("slow")
@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_leaves_ends_its_row(stream: bool, port: int) -> None:
    cancelled = 'posenc_requests_total{outcome="cancelled"}'
    before, client = _metric(port, cancelled), Client(port)
    client.send(COMPLETIONS, {**LONG, "stream": stream})
    _until(port, "posenc_running_rows", 1)
    client.connection.close()
    _until(port, "posenc_running_rows", 0)
    assert _metric(port, cancelled) == before + 1


def test_a_stream_has_the_text_and_the_counts_of_the_whole_answer(port: int) -> None:
    body = {"prompt": ["import", "def f(x):"], "max_tokens": 30, "seed": 5, "n": 2}
    body["temperature"] = 0.8
    _, whole = Client(port).ask(COMPLETIONS, body)
    events = list(Client(port).events({**body, "stream_options": {"include_usage": True}}))
    parts = [event["choices"][0] for event in events if event["choices"]]
    for index, choice in enumerate(whole["choices"]):
        mine = [part for part in parts if part["index"] == index]
        assert "".join(part["text"] for part in mine) == choice["text"]
        assert mine[-1]["finish_reason"] == choice["finish_reason"] == "length"
    assert events[-1]["usage"] == whole["usage"] == _usage(15, 120)


def test_text_ends_before_a_stop_string_and_its_row_is_free_again(port: int) -> None:
    body = {"prompt": "def", "max_tokens": 200, "temperature": 0}
    text = Client(port).choice(body)["text"]
    stop = text[11:14]
    choice = Client(port).choice({**body, "stop": ["never there", stop]})
    assert choice["text"] == text[: text.find(stop)] and choice["finish_reason"] == "stop"
    _until(port, "posenc_running_rows", 0)


BAD: dict[str, Any] = {
    "no object": [1],
    "an empty prompt": {"prompt": ""},
    "no tokens": {"prompt": "a", "max_tokens": 0},
    "a prompt that is too long": {"prompt": "a" * 300},
    "too many tokens": {"prompt": "a" * 200, "max_tokens": 101},
    "an id outside of the vocabulary": {"prompt": [256]},
    "a negative temperature": {"prompt": "a", "temperature": -1},
    "a share above 1": {"prompt": "a", "top_p": 1.5},
    "an empty stop string": {"prompt": "a", "stop": ""},
    "more choices than the queue holds": {"prompt": ["a"] * 41},
    "a name without end": {"prompt": "a", "x" * 5000: 1},
    "a number without end": {"prompt": "a", "max_tokens": 10**4000},
    "a name in two lines": {"prompt": "a", "x\ny": 1},
}


@pytest.mark.parametrize("case", BAD)
def test_what_cannot_be_honoured_is_refused_in_one_line(case: str, port: int) -> None:
    status, answer = Client(port).ask("/v1/completions", BAD[case])
    assert status == 400 and answer["error"]["type"] == "invalid_request_error"
    assert "\n" not in answer["error"]["message"]
    assert "got" in answer["error"]["message"]
    assert len(answer["error"]["message"]) < 300


def test_a_body_beyond_the_limit_is_refused_before_it_is_read_to_its_end(port: int) -> None:
    status, answer = Client(port).ask("/v1/completions", {"prompt": "a" * (1 << 20)})
    assert status == 413
    assert answer["error"]["message"].startswith("body: expected at most 1048576 bytes")


@pytest.mark.parametrize("stream", [False, True])
def test_a_graph_that_stops_is_said_and_logged_and_the_next_request_is_served(
    stream: bool, port: int, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def stop(batch: Batch) -> None:
        monkeypatch.undo()
        raise GraphError(RuntimeError("planted"))

    monkeypatch.setattr(Batch, "step", stop)
    client = Client(port)
    said = list(client.events(LONG))[-1] if stream else client.ask(COMPLETIONS, LONG)[1]
    assert said["error"]["type"] == "server_error" and "planted" in caplog.text
    assert Client(port).ask("/v1/completions", {**LONG, "max_tokens": 3})[0] == 200


def test_another_model_is_not_found_and_the_served_one_is_listed(port: int, model: Model) -> None:
    status, answer = Client(port).ask("/v1/completions", {"prompt": "a", "model": "other"})
    said = "model: expected tiny, got other; /v1/models lists what is served"
    assert status == 404 and answer["error"]["message"] == said
    card = Client(port).ask("/v1/models")[1]["data"][0]
    assert (card["id"], card["max_model_len"]) == ("tiny", 300)
    assert card["digest"] == model.manifest.digest


@pytest.mark.parametrize(
    ("path", "status", "got"),
    [("/v1/completion", 404, "POST /v1/completion"), ("/v1/models", 405, "POST /v1/models")],
)
def test_another_path_or_method_is_refused_by_name(
    path: str, status: int, got: str, port: int
) -> None:
    said = Client(port).ask(path, {"prompt": "a"})
    rule = "request: expected a method and path that /openapi.json lists"
    message = f"{rule}, got {got}; POST /v1/completions completes a text"
    assert said[0] == status and said[1]["error"]["message"] == message


@pytest.mark.usefixtures("slow")
def test_more_requests_than_rows_and_queue_hold_are_told_to_come_later(port: int) -> None:
    streams = [Client(port).events(LONG) for _ in range(6)]
    for stream in streams:
        next(stream)
    waiting = [Client(port) for _ in range(2)]
    for client in waiting:
        client.send(COMPLETIONS, {**LONG, "n": 20})
    _until(port, "posenc_waiting_requests", 40)
    status, answer = Client(port).ask("/v1/completions", LONG)
    assert status == 429
    assert answer["error"]["type"] == "rate_limit_error"
    assert "40 of 40 waiting" in answer["error"]["message"]
    for each in (*streams, *(client.connection for client in waiting)):
        each.close()
    _until(port, "posenc_running_rows", 0)


def test_health_and_the_description_of_the_api_are_there(port: int) -> None:
    assert Client(port).ask("/health") == (200, {"status": "ready"})
    described = Client(port).ask("/openapi.json")[1]["paths"][COMPLETIONS]["post"]["requestBody"]
    assert "max_tokens" in described["content"]["application/json"]["schema"]["properties"]


def of_openai(port: int) -> Any:
    """Open the client of openai, or skip the test."""
    openai = pytest.importorskip("openai")
    return openai.OpenAI(base_url=f"http://127.0.0.1:{port}/v1", api_key="none", max_retries=0)


def test_the_client_of_openai_reads_answers_and_streams(port: int) -> None:
    openai = pytest.importorskip("openai")
    given = {"model": "tiny", "prompt": "def f(x):", "max_tokens": 20, "temperature": 0, "seed": 1}
    with of_openai(port) as client:
        whole = client.completions.create(**given)
        parts = client.completions.create(**given, stream=True)
        streamed = "".join(part.choices[0].text for part in parts)
        assert streamed == whole.choices[0].text and whole.usage.completion_tokens == 20
        with pytest.raises(openai.BadRequestError, match="got"):
            client.completions.create(**{**given, "max_tokens": 1000})
        assert [card.id for card in client.models.list()] == ["tiny"]


@pytest.mark.parametrize("templated", [False, True])
def test_the_first_line_names_the_routes_that_the_model_answers(
    templated: bool, folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    codec = ChatCodec(ByteCodec(), "{{ messages[0].content }}", {}) if templated else None
    monkeypatch.setattr(serve, "chat_codec", lambda folder, manifest: codec)
    monkeypatch.setattr(uvicorn.Server, "run", lambda server, sockets: sockets[0].close())
    monkeypatch.setattr(signal, "signal", lambda *given: None)
    assert cli.main(["serve", str(folder), "--port", "0"]) == 0
    routes = "completions and /v1/chat/completions" if templated else "completions"
    assert f"/v1/{routes}, with /openapi.json" in capsys.readouterr().out


def test_sigterm_lets_running_requests_finish_and_refuses_new_ones(
    folder: Path, model: Model
) -> None:
    command = [sys.executable, *"-m posenc_export.commands.cli serve".split(), str(folder)]
    command += "--port 0 --context 1100 --threads 1 --json".split()
    pipe, environment = subprocess.PIPE, {**os.environ, "OMP_NUM_THREADS": "1"}
    process = subprocess.Popen(command, stdout=pipe, stderr=pipe, text=True, env=environment)
    try:
        assert process.stdout is not None
        port = int(json.loads(process.stdout.readline())["url"].rpartition(":")[2])
        stream = Client(port).events({**LONG, "max_tokens": 600})
        result = list(next(stream)["choices"][0]["token_ids"])
        process.send_signal(signal.SIGTERM)
        result += [token for event in stream for token in event["choices"][0]["token_ids"]]
        request = Request((97,), 600)
        assert result == alone(model, [request])[request]
        assert process.wait(30) == 0
        with pytest.raises(ConnectionError):
            Client(port).ask("/health")
    finally:
        process.kill()
        process.communicate()
