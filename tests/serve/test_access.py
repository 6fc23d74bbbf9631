"""Who may use the server: Host, Origin, Content-Type, key."""

import http.client
import json
from typing import Any, Iterator

import pytest

from posenc_export.runtime.session.model import Model
from tests.serve.test_http import JSON, LIMITS, Client, folder, model, running  # noqa: F401

pytestmark = pytest.mark.xdist_group("serve")
KEY = {"Authorization": "Bearer secret"}
BODY = json.dumps({"prompt": "a", "max_tokens": 2})


@pytest.fixture(scope="module")
def port(model: Model) -> Iterator[int]:
    """A server with a key and an allowed page."""
    from posenc_export.serve.access import access
    from posenc_export.serve.app import application

    allowed = access("127.0.0.1", "127.0.0.1", ["https://page.example"], "secret")
    with running(application("tiny", model, LIMITS, allowed)) as (port, _):
        yield port


def _status(
    port: int, headers: dict[str, str], path: str = "/v1/completions", method: str | None = None
) -> int:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=30)
    usual, body = ("POST", BODY) if "complet" in path else ("GET", None)
    connection.request(method or usual, path, body, headers)
    status = connection.getresponse().status
    connection.close()
    return status


@pytest.mark.parametrize("host", ["127.0.0.1:{}", "localhost:{}", "[::1]:{}", "localhost"])
def test_requests_to_local_names_are_answered(host: str, port: int) -> None:
    assert _status(port, {**JSON, **KEY, "Host": host.format(port)}) == 200


@pytest.mark.parametrize("path", ["/v1/completions", "/health", "/metrics"])
def test_requests_to_foreign_names_are_refused(path: str, port: int) -> None:
    assert _status(port, {**JSON, **KEY, "Host": f"evil.example:{port}"}, path) == 400


def test_a_browser_that_asks_ahead_is_told_which_pages_may_send_requests(port: int) -> None:
    asked = {"Method": "POST", "Headers": "content-type"}
    ahead = {f"Access-Control-Request-{name}": value for name, value in asked.items()}
    for origin, status in (("https://page.example", 200), ("https://evil.example", 400)):
        assert _status(port, {**ahead, "Origin": origin}, method="OPTIONS") == status


@pytest.mark.parametrize(
    "kind", [None, "text/plain", "application/x-www-form-urlencoded", "application/jsonp"]
)
def test_a_body_that_is_not_declared_as_json_is_refused(kind: str | None, port: int) -> None:
    assert _status(port, {**KEY, **({"Content-Type": kind} if kind else {})}) == 415


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/models", "/metrics"])
@pytest.mark.parametrize("key", [None, "Bearer secreT", "Basic secret", "Bearer sécret"])
def test_requests_without_the_key_are_refused(path: str, key: str | None, port: int) -> None:
    given = {} if key is None else {"Authorization": key}
    assert _status(port, {**JSON, **given}, path) == 401
    assert _status(port, {**JSON, **KEY}, path) == 200


def test_health_needs_no_key(port: int) -> None:
    assert Client(port).ask("/health")[0] == 200


def test_a_server_on_all_addresses_accepts_every_name_and_allows_no_other_page() -> None:
    from posenc_export.serve.access import access

    assert access("0.0.0.0", "0.0.0.0").hosts == access("::", "::").hosts == ("*",)
    assert access("0.0.0.0", "0.0.0.0").origins == ()
    assert "server.example" in access("server.example", "192.0.2.1").hosts


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
        access("127.0.0.1", "127.0.0.1", **given)
