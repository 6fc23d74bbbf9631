"""Who may use the server, and how many at a time: Host, Origin, Content-Type, key, connections."""

import contextlib
import http.client
import json
import socket
import time
from typing import Any, Dict, Iterator, List, Optional

import pytest

from posenc_export.runtime.artefact.tokenizer import ByteCodec
from posenc_export.runtime.session.model import Model
from tests.serve.test_http import JSON, LIMITS, Client, folder, model, running  # noqa: F401

pytestmark = pytest.mark.xdist_group("serve")
KEY = {"Authorization": "Bearer secret"}
BODY = json.dumps({"prompt": "a", "max_tokens": 2})
CONNECTIONS = 4


@pytest.fixture(scope="module")
def port(model: Model) -> Iterator[int]:
    """A server as `posenc serve` runs it, with a key, an allowed page and few connections."""
    from posenc_export.commands.serve import listen
    from posenc_export.serve.access import access
    from posenc_export.serve.app import application
    from posenc_export.serve.connections import OVER, Listener, settings

    listening = Listener(listen("127.0.0.1", 0), CONNECTIONS + OVER)
    allowed = access("127.0.0.1", *listening.getsockname(), ["https://page.example"], "secret")
    with running(
        application("tiny", model, ByteCodec(), LIMITS, allowed),
        listening=listening,
        **settings(CONNECTIONS, 600),
    ) as (port, _):
        yield port


def _status(
    port: int, headers: Dict[str, str], path: str = "/v1/completions", method: Optional[str] = None
) -> int:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=30)
    connection.request(
        method or ("POST" if "complet" in path else "GET"),
        path,
        BODY if "complet" in path else None,
        headers,
    )
    status = connection.getresponse().status
    connection.close()
    return status


@pytest.mark.parametrize("host", ["127.0.0.1:{}", "localhost:{}", "[::1]:{}", "localhost"])
def test_requests_to_local_names_are_answered(host: str, port: int) -> None:
    assert _status(port, {**JSON, **KEY, "Host": host.format(port)}) == 200


@pytest.mark.parametrize("path", ["/v1/completions", "/health", "/metrics", "/docs"])
def test_requests_to_foreign_names_are_refused(path: str, port: int) -> None:
    assert _status(port, {**JSON, **KEY, "Host": f"evil.example:{port}"}, path) == 400


def test_pages_of_the_server_and_allowed_ones_may_send_requests(port: int) -> None:
    for origin in (f"http://127.0.0.1:{port}", f"http://localhost:{port}", "https://page.example"):
        assert _status(port, {**JSON, **KEY, "Origin": origin}) == 200


@pytest.mark.parametrize(
    "origin", ["https://evil.example", "http://localhost:1", "null", "https://page.example.evil"]
)
@pytest.mark.parametrize("path", ["/v1/completions", "/health"])
def test_other_pages_may_not(origin: str, path: str, port: int) -> None:
    assert _status(port, {**JSON, **KEY, "Origin": origin}, path) == 403


def test_a_browser_that_asks_ahead_is_told_which_pages_may_send_requests(port: int) -> None:
    ahead = {
        "Access-Control-Request-Method": "POST",
        "Access-Control-Request-Headers": "content-type",
    }
    assert [
        _status(port, {**ahead, "Origin": origin}, method="OPTIONS")
        for origin in ("https://page.example", "https://evil.example")
    ] == [200, 400]


@pytest.mark.parametrize(
    "kind", [None, "text/plain", "application/x-www-form-urlencoded", "application/jsonp"]
)
def test_a_body_that_is_not_declared_as_json_is_refused(kind: Optional[str], port: int) -> None:
    assert _status(port, {**KEY, **({"Content-Type": kind} if kind else {})}) == 415


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/models", "/metrics"])
@pytest.mark.parametrize(
    "key",
    [
        {},
        {"Authorization": "Bearer secreT"},
        {"Authorization": "Basic secret"},
        {"Authorization": "Bearer sécret"},
    ],
)
def test_requests_without_the_key_are_refused(path: str, key: Dict[str, str], port: int) -> None:
    assert (_status(port, {**JSON, **key}, path), _status(port, {**JSON, **KEY}, path)) == (
        401,
        200,
    )


def test_health_needs_no_key(port: int) -> None:
    assert Client(port).ask("/health")[0] == 200


def test_a_server_on_all_addresses_accepts_every_name_but_no_other_page() -> None:
    from posenc_export.serve.access import access

    assert access("0.0.0.0", "0.0.0.0", 8000).hosts == access("::", "::", 8000).hosts == ("*",)
    assert access("0.0.0.0", "0.0.0.0", 8000).origins == ()
    assert "server.example" in access("server.example", "192.0.2.1", 8000).hosts
    assert {"http://localhost", "http://localhost:80"} <= set(
        access("127.0.0.1", "127.0.0.1", 80).origins
    )


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"key": ""}, "expected a key"),
        ({"key": "a b"}, "expected a key"),
        ({"origins": ["page.example"]}, "expected an origin"),
    ],
)
def test_keys_and_origins_that_cannot_be_compared_are_refused(given: Any, said: str) -> None:
    from posenc_export.serve.access import access

    with pytest.raises(ValueError, match=said):
        access("127.0.0.1", "127.0.0.1", 8000, **given)


@contextlib.contextmanager
def _silent(port: int, count: int) -> Iterator[List[socket.socket]]:
    """Context manager that opens connections without sending anything."""
    with contextlib.ExitStack() as stack:
        yield [
            stack.enter_context(socket.create_connection(("127.0.0.1", port), timeout=10))
            for _ in range(count)
        ]


def test_silent_connections_make_room_for_requests(port: int) -> None:
    with _silent(port, CONNECTIONS):
        time.sleep(0.1)
        assert [_status(port, {**JSON, **KEY}) for _ in range(3)] == [200] * 3


def test_requests_beyond_the_connections_are_refused_and_further_connections_closed(
    port: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    from posenc_export.serve.connections import OVER

    for seconds in ("PATIENCE", "SENDING"):
        monkeypatch.setattr(f"posenc_export.serve.connections.{seconds}", 60)
    time.sleep(0.1)  # until connections of other tests are closed
    with _silent(port, CONNECTIONS + OVER - 1), _silent(port, 3) as late:
        late[0].sendall(b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n")
        assert late[0].recv(64).startswith(b"HTTP/1.1 503")
        assert [each.recv(64) for each in late[1:]] == [b"", b""]


def test_a_connection_without_a_request_is_closed(
    port: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("posenc_export.serve.connections.SENDING", 0.1)
    with _silent(port, 1) as (silent,):
        assert silent.recv(64) == b""


def test_more_connections_than_open_files_are_refused() -> None:
    from posenc_export.serve.connections import most_connections

    with pytest.raises(ValueError, match="serve: expected at least .* open files to be allowed"):
        most_connections(10**9)
    with pytest.raises(ValueError, match="serve: expected at least 8 connections, got 7"):
        most_connections(7)
