"""Conversations over HTTP, with the client of openai where it is installed."""

import math
from typing import Any, Iterator

import numpy as np
import pytest

from posenc_export.runtime.artefact.chat_template import ChatCodec
from posenc_export.runtime.artefact.tokenizer import ByteCodec, spelled
from posenc_export.runtime.session.model import Model
from posenc_export.serve.batch import log_probabilities
from posenc_export.serve.requests import Limits
from tests.serve.models import artefact, opened
from tests.serve.test_http import Client, _usage, of_openai, running

pytest.importorskip("uvicorn")
pytest.importorskip("fastapi")
pytest.importorskip("prometheus_client")
pytest.importorskip("jinja2")
pytestmark = pytest.mark.xdist_group("serve")
LIMITS = Limits(rows=4, queue=8, context=120, chunk=32)
TEMPLATE = """{% for message in messages %}{% if message.role == 'system' and not loop.first %}\
{{ raise_exception('The system message comes first') }}{% endif %}
{{- message.role[0] }}:{{ message.content }}
{% endfor %}{% if add_generation_prompt %}a:{% endif %}"""
HELLO = {"messages": [{"role": "user", "content": "Hello"}], "temperature": 0, "max_tokens": 12}
CHAT = "/v1/chat/completions"


@pytest.fixture(scope="module")
def model() -> Model:
    return opened(artefact("ort"))


@pytest.fixture(scope="module")
def stop(model: Model) -> int:
    """The third token of the reply to HELLO, which the model's own stop id is here."""
    return int([token[0] for token in model.session().generate([list(b"u:Hello\na:")], 12)][2])


@pytest.fixture(scope="module")
def port(model: Model) -> Iterator[int]:
    from posenc_export.serve.app import application

    chat = ChatCodec(ByteCodec(), TEMPLATE, {})
    with running(application("tiny", model, LIMITS, chat=chat)) as (port, _):
        yield port


def _expected(model: Model, prompt: bytes, count: int) -> str:
    tokens = model.session().generate([list(prompt)], count)
    return bytes(int(token[0]) for token in tokens).decode(errors="replace")


def test_a_reply_is_the_continuation_of_the_rendered_conversation(port: int, model: Model) -> None:
    turns = [
        {"role": "system", "content": "Be"},
        {"role": "user", "content": "a"},
        {"role": "assistant", "content": "b", "tool_calls": None},
    ]
    last = {"role": "user", "content": [{"type": "text", "text": text} for text in "cd"]}
    status, answer = Client(port).ask(CHAT, {**HELLO, "messages": [*turns, last]})
    assert status == 200
    assert answer["object"] == "chat.completion"
    assert answer["id"].startswith("chatcmpl-")
    (choice,) = answer["choices"]
    prompt = b"s:Be\nu:a\na:b\nu:c\nd\na:"
    assert choice["message"] == {"role": "assistant", "content": _expected(model, prompt, 12)}
    assert choice["finish_reason"] == "length"
    assert answer["usage"] == _usage(len(prompt), 12)


def test_a_stream_begins_with_the_role_and_has_the_text_of_the_whole_reply(port: int) -> None:
    given: dict[str, Any] = {**HELLO, "model": "tiny", "n": 2, "seed": 3, "temperature": 0.9}
    with of_openai(port) as client:
        create = client.chat.completions.create
        whole = create(**given)
        parts = list(create(**given, stream=True, stream_options={"include_usage": True}))
        choices = [part.choices[0] for part in parts if part.choices]
        for choice in whole.choices:
            mine = [part for part in choices if part.index == choice.index]
            assert [part.delta.role for part in mine] == ["assistant", *[None] * (len(mine) - 1)]
            assert "".join(part.delta.content for part in mine) == choice.message.content
            assert mine[-1].finish_reason == choice.finish_reason == "length"
        assert parts[-1].usage == whole.usage
        assert whole.usage.completion_tokens == 24
        assert parts[0].object == "chat.completion.chunk"
        further = [whole.choices[0].message, {"role": "user", "content": "?"}]
        again = create(**{**given, "messages": [*HELLO["messages"], *further]})
        assert again.choices[0].message.role == "assistant"


def test_log_probabilities_come_with_each_token(port: int) -> None:
    given: dict[str, Any] = {**HELLO, "model": "tiny", "logprobs": True, "top_logprobs": 3}
    with of_openai(port) as client:
        create = client.chat.completions.create
        whole = create(**given).choices[0].logprobs.content
        parts = [part.choices[0].logprobs.content for part in create(**given, stream=True)]
    streamed = [one for part in parts for one in part]
    assert len(whole) == 12 and streamed == whole
    for token in whole:
        assert token.top_logprobs[0].logprob == token.logprob < 0
        assert token.top_logprobs[0].token == token.token
        assert len(token.top_logprobs) == 3


def test_log_probabilities_are_logarithms_of_the_softmax() -> None:
    logits = np.array([1.0, 3.0, 3.0, -np.inf, 0.0], np.float32)
    result = log_probabilities(logits, 0, 2)
    total = math.log(sum(math.exp(float(one)) for one in logits))
    assert [index for index, _ in result] == [0, 1, 2]
    values = [value for _, value in result]
    assert np.allclose(values, [1 - total, 3 - total, 3 - total], rtol=1e-12)


def test_a_reply_ends_at_the_ids_of_the_model_and_at_stop_strings(
    port: int, stop: int, model: Model
) -> None:
    asked = {**HELLO, "stop_token_ids": [stop], "logprobs": True, "return_token_ids": True}
    whole = Client(port).choice(asked, CHAT)
    assert whole["finish_reason"] == "stop" and whole["token_ids"][-1] == stop
    tokens = [token["token"] for token in whole["logprobs"]["content"]]
    assert tokens == [spelled(ByteCodec(), token) for token in whole["token_ids"][:-1]]
    text = _expected(model, b"u:Hello\na:", 12)
    choice = Client(port).choice({**HELLO, "stop": [text[4:6]]}, CHAT)
    assert choice["message"]["content"] == text[: text.find(text[4:6])]
    assert choice["finish_reason"] == "stop"


def test_a_reply_without_max_tokens_goes_to_the_end_of_the_context(port: int) -> None:
    messages = [{"role": "user", "content": "x" * 50}]
    answer = Client(port).ask(CHAT, {"messages": messages, "temperature": 0})[1]
    assert answer["usage"]["total_tokens"] == 120
    assert answer["choices"][0]["finish_reason"] == "length"


MESSAGE = {"role": "user", "content": "a"}
BAD: dict[str, Any] = {
    "no messages": {"messages": []},
    "a reply in JSON": {"messages": [MESSAGE], "response_format": {"type": "json_object"}},
    "alternatives without probabilities": {"messages": [MESSAGE], "top_logprobs": 2},
    "too many alternatives": {"messages": [MESSAGE], "logprobs": True, "top_logprobs": 21},
    "what the template refuses": {"messages": [MESSAGE, {"role": "system", "content": "a"}]},
    "a conversation that is too long": {"messages": [{"role": "user", "content": "a" * 120}]},
    "a prompt": {"messages": [MESSAGE], "prompt": "a"},
}


@pytest.mark.parametrize("case", BAD)
def test_what_cannot_be_honoured_is_refused_in_one_line(case: str, port: int) -> None:
    status, answer = Client(port).ask(CHAT, BAD[case])
    assert status == 400 and answer["error"]["type"] == "invalid_request_error"
    assert "\n" not in answer["error"]["message"] and len(answer["error"]["message"]) < 350


def test_a_model_without_a_template_says_so(model: Model) -> None:
    from posenc_export.serve.app import application

    with running(application("tiny", model, LIMITS)) as (port, _):
        status, answer = Client(port).ask(CHAT, HELLO)
        assert status == 400
        assert "expected a model with a chat template" in answer["error"]["message"]
        listed: list[Any] = Client(port).ask("/openapi.json")[1]["paths"]
        assert CHAT in listed
