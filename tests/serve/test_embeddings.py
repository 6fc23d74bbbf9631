"""/v1/embeddings: the shape of OpenAI's API, and its refusals."""

import base64
from typing import Any, Iterator

import numpy as np
import pytest

pytest.importorskip("fastapi", reason="fastapi is not installed")
pytest.importorskip("tokenizers", reason="tokenizers is not installed")
from starlette.testclient import TestClient

from posenc_export.runtime import load
from posenc_export.runtime.session import model as session_text
from posenc_export.runtime.session.model import Model
from posenc_export.serve.access import Access
from posenc_export.serve.embeddings import application
from posenc_export.serve.requests import Limits
from tests.models.sentence_folders import artefact

KEY = "secret"


@pytest.fixture(scope="module")
def model() -> Model:
    return load(artefact())


@pytest.fixture
def client(model: Model) -> Iterator[TestClient]:
    app = application("tiny", model, Limits(queue=2), Access(key=KEY))
    with TestClient(app, headers={"Authorization": f"Bearer {KEY}"}) as client:
        yield client


def embedded(client: TestClient, **body: Any) -> Any:
    response = client.post("/v1/embeddings", json=body)
    assert response.status_code == 200, response.text
    return response.json()


def first(client: TestClient, **body: Any) -> Any:
    return embedded(client, **body)["data"][0]["embedding"]


def test_texts_and_token_ids_give_embeddings_in_order_with_token_counts(
    client: TestClient, model: Model
) -> None:
    result = embedded(client, input=["w5 w6", "w7"], model="tiny")
    expected = model.embed(["w5 w6", "w7"])
    assert result["object"] == "list"
    assert result["model"] == "tiny"
    assert result["usage"] == {"prompt_tokens": 7, "total_tokens": 7}
    assert [entry["index"] for entry in result["data"]] == [0, 1]
    numbers = np.array([entry["embedding"] for entry in result["data"]], np.float32)
    assert np.array_equal(numbers, expected)
    for same in ("w5 w6", [0, 5, 6, 2], [[0, 5, 6, 2]]):
        assert np.allclose(first(client, input=same), expected[0], atol=1e-6)


def test_base64_holds_the_bytes_of_float32_numbers(client: TestClient) -> None:
    forms = ("float", "base64")
    plain, coded = (first(client, input="w5", encoding_format=form) for form in forms)
    numbers = np.frombuffer(base64.b64decode(coded), "<f4")
    assert np.array_equal(numbers, np.array(plain, np.float32))


@pytest.mark.parametrize(
    ("body", "status", "message"),
    [
        ({"input": "w5", "model": "other"}, 404, "model: expected tiny, got other"),
        ({"input": []}, 400, "input: expected at least 1 item, got []"),
        ({"input": [99]}, 400, "expected token ids 0 .. 60, got 99"),
        ({"input": "w5", "dimensions": 5}, 400, "dimensions: expected 48"),
        ({"input": "w5", "extra": 1}, 400, "extra: expected no such field"),
        ({"input": ["w5"] * 2049}, 400, "input: expected at most 2048 items, got ['w5'"),
        ({"input": "w5", "prompt_name": "query"}, 400, "expected prompt to be one of none"),
        ({}, 400, "input: expected a value, got none"),
    ],
)
def test_what_cannot_be_embedded_is_refused(
    body: Any, status: int, message: str, client: TestClient
) -> None:
    response = client.post("/v1/embeddings", json=body)
    assert response.status_code == status and message in response.json()["error"]["message"]


def test_the_listed_length_is_that_at_which_texts_are_cut(client: TestClient, model: Model) -> None:
    (row,) = session_text.rows_of(model, ["w5 " * 200])
    listed = client.get("/v1/models").json()["data"][0]["max_model_len"]
    assert listed == len(row) < model.manifest.max_positions


@pytest.mark.parametrize(
    ("method", "path", "status"),
    [("POST", "/v1/chat/completions", 404), ("GET", "/v1/embeddings", 405)],
)
def test_another_path_or_method_is_answered_with_those_of_this_server(
    method: str, path: str, status: int, client: TestClient
) -> None:
    response = client.request(method, path)
    assert response.status_code == status
    said = (
        f"request: expected a method and path that /openapi.json lists, got {method} {path}; POST "
        "/v1/embeddings embeds texts, since tiny is an encoder"
    )
    assert response.json()["error"]["message"] == said


def test_the_key_guards_embeddings_and_models_but_not_health(client: TestClient) -> None:
    assert client.get("/health").json() == {"status": "ready"}
    assert client.get("/v1/models").json()["data"][0]["id"] == "tiny"
    for method, path in (("POST", "/v1/embeddings"), ("GET", "/v1/models")):
        given: Any = {"json": {"input": "w5"}, "headers": {"Authorization": ""}}
        assert client.request(method, path, **given).status_code == 401


def test_a_module_in_memory_is_refused_before_it_is_served(model: Model) -> None:
    with pytest.raises(ValueError, match="expected the folder of an artefact for a tokenizer"):
        application("tiny", Model(model.graph), Limits())
