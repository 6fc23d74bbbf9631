"""Fields of requests: what evaluation harnesses and clients of OpenAI's API send, and pages."""

import json
import re
from typing import Any, Iterator, get_type_hints

import numpy as np
import pytest

from posenc_export.export.expected import eager_session
from posenc_export.models.presets import seeded
from posenc_export.runtime.artefact.chat_template import ChatCodec
from posenc_export.runtime.artefact.tokenizer import ByteCodec
from posenc_export.serve.batch import log_probabilities
from tests.serve.models import CONFIG, artefact, opened
from tests.serve.test_http import JSON, LIMITS, Client, running

pytest.importorskip("uvicorn")
pytest.importorskip("fastapi")
pytest.importorskip("jinja2")
pytestmark = pytest.mark.xdist_group("serve")
NAME = "tiny <b>"
TEMPLATE = """{% for message in messages %}{{ message.role }}:{% if message.content is string %}
{{- message.content }}{% else %}{% for part in message.content %}{{ part.text }}{% endfor %}
{%- endif %};{% endfor %}{% if enable_thinking is false %}-{% endif %}{{ reasoning_effort }}"""
TEXTS = ["def read(path):", "é", "x = [1, 2]  # Zoë 🎉" * 6]
COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
USER = {"role": "user", "content": "a"}


@pytest.fixture(scope="module")
def port() -> Iterator[int]:
    from posenc_export.serve.app import application

    chat = ChatCodec(ByteCodec(), TEMPLATE, {})
    with running(application(NAME, opened(artefact("ort")), LIMITS, chat=chat)) as served:
        yield served[0]


def _refused(port: int, path: str, body: dict[str, Any]) -> str:
    status, answer = Client(port).ask(path, body)
    assert status == 400 and "\n" not in answer["error"]["message"]
    return str(answer["error"]["message"])


@pytest.mark.parametrize("as_ids", [False, True])
def test_log_probabilities_are_those_of_the_model_in_torch(as_ids: bool, port: int) -> None:
    prompts = [list(text.encode()) for text in TEXTS]
    body = {"model": NAME, "prompt": prompts if as_ids else TEXTS, "temperature": 0}
    body |= {"max_tokens": 4, "logprobs": 1, "seed": 1234, "return_token_ids": True}
    status, answer = Client(port).ask(COMPLETIONS, body)
    assert status == 200
    for prompt, choice in zip(prompts, answer["choices"], strict=True):
        new, listed = choice["token_ids"], choice["logprobs"]
        logits = eager_session(seeded(CONFIG)).prefill([prompt + new])[0][len(prompt) - 1 : -1]
        rows = [log_probabilities(row, id, 1) for row, id in zip(logits, new, strict=True)]
        expected = [own for (_, own), _ in rows]
        assert np.allclose(listed["token_logprobs"], expected, rtol=0, atol=1e-4)
        assert [max(top.values()) for top in listed["top_logprobs"]] == listed["token_logprobs"]
        places = listed["text_offset"]
        assert places[0] == 0 and places == sorted(places) and places[-1] <= len(choice["text"])


def test_bytes_of_log_probabilities_come_from_the_vocabulary(port: int) -> None:
    body = {"messages": [USER], "max_tokens": 40, "seed": 2, "temperature": 9, "logprobs": True}
    choice = Client(port).ask(CHAT, {**body, "return_token_ids": True})[1]["choices"][0]
    listed = choice["logprobs"]["content"]
    assert [token["bytes"] for token in listed] == [[id] for id in choice["token_ids"]]
    parts = [token for token in listed if token["bytes"][0] > 127]
    assert parts
    assert all(t["token"] == f"bytes:\\x{t['bytes'][0]:02x}" for t in parts)


@pytest.mark.parametrize(
    ("fields", "prompt"),
    [
        ({}, "user:ab;"),
        ({"chat_template_kwargs": {"enable_thinking": False}}, "user:ab;-"),
        ({"reasoning_effort": "low"}, "user:ab;low"),
    ],
)
def test_the_template_joins_parts_of_text_and_gets_values_of_the_request(
    fields: dict[str, Any], prompt: str, port: int
) -> None:
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    body = {"messages": [{**USER, "content": parts}], "max_tokens": 1, **fields}
    assert Client(port).ask(CHAT, body)[1]["usage"]["prompt_tokens"] == len(prompt)


@pytest.mark.parametrize(
    ("values", "said"),
    [
        ({"enable_thinkin": 1}, "expected names that the .*, got enable"),
        ({"messages": []}, "expected names that the .*, got messages"),
        (
            {"chat_template_kwargs": {"enable_thinking": "x" * 70_000}},
            "expected at most 65536 bytes",
        ),
    ],
)
def test_values_that_the_template_does_not_read_are_refused(
    values: dict[str, Any], said: str, port: int
) -> None:
    message = _refused(port, CHAT, {"messages": [USER], "chat_template_kwargs": values})
    assert re.match(f"chat_template_kwargs: {said}", message)


IMAGE = {"type": "image_url", "image_url": {"url": "x"}}
CALL = {"id": "1", "type": "function", "function": {"name": "f", "arguments": "{}"}}
PLACES: dict[str, Any] = {
    "messages[1].content: expected a value, got null": [USER, {**USER, "content": None}],
    "messages[0].content: expected a value, got none": [{"role": "user"}],
    "messages[0].content[1].type: expected 'text', got 'image_url'": [
        {**USER, "content": [{"type": "text", "text": "a"}, IMAGE]}
    ],
    "messages[0].tool_calls: expected no tool_calls": [{**USER, "tool_calls": [CALL]}],
    "messages[0].audio: expected no such field": [{**USER, "audio": {"id": "1"}}],
    "messages[0].role: expected 'system', ": [{**USER, "role": "tool"}],
    "messages[0].content: expected a valid string": [{**USER, "content": 5}],
}


@pytest.mark.parametrize("said", PLACES)
def test_an_error_names_the_place_in_the_request(said: str, port: int) -> None:
    assert _refused(port, CHAT, {"messages": PLACES[said]}).startswith(said)


MISSPELLED: dict[str, dict[str, Any]] = {
    "promt: expected no such field, got 'a'; did you mean prompt? /openapi.json": {"promt": "a"},
    "max_token: expected no such field, got 5; did you mean max_tokens? /openapi.json": {
        "prompt": "a",
        "max_token": 5,
    },
    "zzz: expected no such field, got 5; /openapi.json": {"prompt": "a", "zzz": 5},
    "prompt: expected a value, got none; /openapi.json": {"max_tokens": 5},
}


@pytest.mark.parametrize("said", MISSPELLED)
def test_a_field_that_does_not_exist_is_named_with_the_nearest_one(said: str, port: int) -> None:
    assert _refused(port, COMPLETIONS, MISSPELLED[said]).startswith(said)


def test_a_body_that_is_not_json_is_shown_as_text(port: int) -> None:
    client = Client(port)
    client.connection.request("POST", COMPLETIONS, '{"prompt": é'.encode(), JSON)
    message = json.loads(client.connection.getresponse().read())["error"]["message"]
    client.connection.close()
    assert re.match(r'body: expected JSON, got \{"prompt": é \(expected value at line 1', message)


def test_padding_of_a_stream_is_refused_by_its_name(port: int) -> None:
    body = {"messages": [USER], "stream": True, "max_tokens": 1}
    message = _refused(port, CHAT, {**body, "stream_options": {"include_obfuscation": True}})
    assert message.startswith("stream_options.include_obfuscation: expected False, got True")
    options = {"include_obfuscation": False, "include_usage": None}
    assert Client(port).ask(CHAT, {**body, "stream_options": options})[0] == 200


# Values that change nothing, of the fields of OpenAI's API and of vLLM.
NEUTRAL: list[tuple[str, list[Any]]] = [
    ("echo store ignore_eos", [False]),
    ("skip_special_tokens", [True]),
    ("parallel_tool_calls", [True, False]),
    ("frequency_penalty presence_penalty min_p", [0, 0.0]),
    ("top_logprobs", [0]),
    ("best_of repetition_penalty", [1]),
    ("logit_bias", [{}, {"5": 0}]),
    ("functions tools", [[]]),
    ("function_call tool_choice", ["none", "auto"]),
    ("metadata", [{}]),
    ("modalities", [["text"]]),
    ("prompt_cache_key safety_identifier user", ["a", ""]),
    ("prompt_cache_retention", ["in_memory"]),
    ("response_format", [{"type": "text"}]),
    ("service_tier", ["auto", "default"]),
    ("suffix", [""]),
    ("verbosity", ["medium"]),
    ("stream_options", [{"include_usage": False, "include_obfuscation": False}]),
]
WRONG = {"x": 1.5}  # as no field takes it


@pytest.mark.parametrize("path", [COMPLETIONS, CHAT])
def test_every_field_of_openai_is_supported_or_neutral_or_refused_by_name(
    path: str, port: int
) -> None:
    openai = pytest.importorskip("openai.types")
    bodies = {COMPLETIONS: {"prompt": "a"}, CHAT: {"messages": [USER]}}
    kinds = {
        COMPLETIONS: openai.completion_create_params.CompletionCreateParamsNonStreaming,
        CHAT: openai.chat.completion_create_params.CompletionCreateParamsNonStreaming,
    }
    body = {**bodies[path], "max_tokens": 1, "temperature": 0}
    expected = Client(port).ask(path, body)[1]["choices"]
    described = Client(port).ask("/openapi.json")[1]["paths"][path]["post"]["requestBody"]
    ours = described["content"]["application/json"]["schema"]["properties"]
    neutral = {name: values for names, values in NEUTRAL for name in names.split()}
    for name in {*get_type_hints(kinds[path]), *neutral} - body.keys():
        answer = Client(port).ask(path, {**body, name: None})
        assert answer[0] == 200 and answer[1]["choices"] == expected, name
        for value in neutral.get(name, []) if name in ours else []:
            answer = Client(port).ask(path, {**body, name: value})
            assert answer[0] == 200 and answer[1]["choices"] == expected, (name, answer)
        assert _refused(port, path, {**body, name: WRONG}).startswith(name)


def test_a_model_is_described_by_its_name_and_others_are_not_found(port: int) -> None:
    listed = Client(port).ask("/v1/models")[1]["data"]
    assert Client(port).ask("/v1/models/tiny%20%3Cb%3E") == (200, listed[0])
    status, answer = Client(port).ask("/v1/models/org/other")
    assert status == 404 and answer["error"]["message"].startswith("model: expected tiny <b>, got")
