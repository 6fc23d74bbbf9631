"""Requests and responses of /v1/completions and /v1/chat/completions, as in OpenAI's API."""

import json
import secrets
from dataclasses import replace
from functools import partial
from typing import Annotated, Any, Literal, Sequence

from pydantic import Field

from posenc_export.runtime.artefact.chat_template import ChatCodec
from posenc_export.runtime.artefact.tokenizer import Codec, spelled
from posenc_export.serve.completion import Part
from posenc_export.serve.protocol import (
    FAST,
    LEAST,
    MOST_LOGPROBS,
    Fields,
    Ids,
    Nothing,
    SamplingRequest,
    Whole,
    encoded,
    prompts_of,
)
from posenc_export.serve.requests import Limits, Request, refused


class CompletionRequest(SamplingRequest):
    """Body of a request of /v1/completions."""

    prompt: str | Ids | Annotated[list[str], FAST] | Annotated[list[Ids], FAST] = Field(
        description="Text or token ids, or a list of these."
    )
    max_tokens: Whole = Field(16, description="Most new tokens.")
    logprobs: int | None = Field(
        None,
        ge=0,
        le=MOST_LOGPROBS,
        description="Number of most probable tokens, with their log probabilities, for each token.",
    )
    echo: Literal[False] = False
    suffix: Literal[None, ""] = None
    best_of: Literal[None, 1] = None

    @property
    def likeliest(self) -> int | None:
        """How many of the most probable tokens come with each token; None without probabilities."""
        return self.logprobs


class Completions:
    """The format of /v1/completions. stop_ids: ids that end a text."""

    request = CompletionRequest
    prefix, whole, part = "cmpl", "text_completion", "text_completion"

    def __init__(self, codec: Codec, stop_ids: Sequence[int]) -> None:
        self.codec, self.stop_ids = codec, tuple(stop_ids)

    def prompts(self, asked: Any, limits: Limits) -> list[Request]:
        rows = (
            encoded(prompt, self.codec, limits) if isinstance(prompt, str) else tuple(prompt)
            for prompt in prompts_of(asked)
        )
        return [Request(ids, asked.max_tokens, stop_ids=self.stop_ids) for ids in rows]

    def said(self, part: Part, begins: bool | None) -> dict[str, Any]:
        return {"text": part.text}

    def logprobs(self, part: Part) -> dict[str, Any]:
        """Format the probabilities. Of tokens with equal texts, the likelier is listed."""
        spelling = partial(spelled, self.codec)
        pairs = [[(spelling(i), max(n, LEAST)) for i, n in t.logprobs] for t in part.tokens]
        tops = [dict(sorted(top, key=lambda pair: pair[1])) for _, *top in pairs]
        return {
            "tokens": [spelling(token.id) for token in part.tokens],
            "token_logprobs": [own[1] for own, *_ in pairs],
            "top_logprobs": tops,
            "text_offset": part.places,
        }


class TextPart(Fields):
    """A part of a message."""

    type: Literal["text"]
    text: str


class Message(Fields):
    """A message. Replies of this server can be sent again as they are."""

    role: Literal["system", "developer", "user", "assistant"] = Field(
        description="developer is another name of system."
    )
    content: str | list[TextPart] = Field(
        description="Text, or a list of texts, which the chat template joins; for one that reads "
        "only text, they become lines."
    )
    name: str | None = None
    refusal: Literal[None] = None
    annotations: Nothing = []
    tool_calls: Nothing = []

    def plain(self) -> dict[str, Any]:
        """Return the message as chat templates read it."""
        role = "system" if self.role == "developer" else self.role
        return {**self.model_dump(include={"content", "name"}, exclude_none=True), "role": role}


class ChatRequest(SamplingRequest):
    """Body of a request of /v1/chat/completions."""

    messages: list[Message] = Field(
        min_length=1, description="The conversation, as the chat template of the model takes it."
    )
    max_tokens: Whole | None = Field(None, description="Older name of max_completion_tokens.")
    max_completion_tokens: Whole | None = Field(
        None, description="Most tokens of the reply; null for as many as the context allows."
    )
    logprobs: bool = Field(
        False,
        description="Whether choices have the logarithms of their tokens' probabilities, before "
        "temperature.",
    )
    top_logprobs: int = Field(
        0,
        ge=0,
        le=MOST_LOGPROBS,
        description="Number of most probable tokens with each token; needs logprobs.",
    )
    response_format: dict[Literal["type"], Literal["text"]] | None = Field(None, min_length=1)
    chat_template_kwargs: dict[str, Any] = Field(
        {}, description="Further values for the chat template, by names that it reads."
    )
    reasoning_effort: str | None = Field(
        None, description="Short for chat_template_kwargs with this name."
    )
    tools: Nothing = []
    tool_choice: Literal[None, "none", "auto"] = None
    parallel_tool_calls: bool = Field(True, description="Without effect, as there are no tools.")
    functions: Nothing = []
    function_call: Literal[None, "none", "auto"] = None
    modalities: list[Literal["text"]] = ["text"]
    verbosity: Literal["medium"] = "medium"

    @property
    def likeliest(self) -> int | None:
        """As of CompletionRequest."""
        return self.top_logprobs if self.logprobs else None


class Chat:
    """The format of /v1/chat/completions. Without a chat template, codec is None and requests are
    refused.
    """

    request = ChatRequest
    prefix, whole, part = "chatcmpl", "chat.completion", "chat.completion.chunk"

    def __init__(self, codec: ChatCodec | None) -> None:
        self.codec = codec

    def prompts(self, asked: Any, limits: Limits) -> list[Request]:
        if self.codec is None:
            remedy = "send a prompt to /v1/completions"
            raise refused("chat", "a model with a chat template", "one without", remedy)
        if asked.top_logprobs and not asked.logprobs:
            rule = "0 without logprobs"
            raise refused("top_logprobs", rule, asked.top_logprobs, "set logprobs")
        values = dict(asked.chat_template_kwargs)
        if asked.reasoning_effort is not None:
            values["reasoning_effort"] = asked.reasoning_effort
        plain = [message.plain() for message in asked.messages]
        text = self.codec.given(values).text(plain)
        ids = encoded(text, self.codec.codec, limits, special=False)
        most = asked.max_completion_tokens
        most = asked.max_tokens if most is None else most
        if most is None:
            most = max(1, limits.context - len(ids))
        return [Request(ids, most, stop_ids=tuple(self.codec.ends))]

    def said(self, part: Part, begins: bool | None) -> dict[str, Any]:
        role = {} if begins is False else {"role": "assistant"}
        return {"message" if begins is None else "delta": {**role, "content": part.text}}

    def logprobs(self, part: Part) -> dict[str, Any]:
        content = []
        for token in part.tokens:
            if not token.is_end:
                own, *likeliest = [self._logprob(*pair) for pair in token.logprobs]
                content.append({**own, "top_logprobs": likeliest})
        return {"content": content, "refusal": None}

    def _logprob(self, token: int, logarithm: float) -> dict[str, Any]:
        assert self.codec is not None  # otherwise the request was refused
        codec = self.codec.codec
        own = {"token": spelled(codec, token), "bytes": list(codec.bytes_of(token))}
        return {**own, "logprob": max(logarithm, LEAST)}


# The form of a route: prompts of a request, without its sampling; what a choice says in an entry of
# `choices`, with `begins` in a stream, whether it is its first; and its probabilities.
Format = Completions | Chat
Asked = CompletionRequest | ChatRequest


def entry(format: Format, part: Part, asked: Asked, begins: bool | None = None) -> dict[str, Any]:
    """Return an entry of `choices`: of a response, or with `begins`, whether it is the first of its
    choice, of an event of a stream.
    """
    logprobs = None if asked.likeliest is None else format.logprobs(part)
    ids = {"token_ids": part.ids} if asked.return_token_ids else {}
    ended = {"logprobs": logprobs, "finish_reason": part.ended or None}
    return {"index": part.choice, **format.said(part, begins), **ended, **ids}


def rows(asked: Asked, format: Format, limits: Limits) -> list[Request]:
    """Create an engine request for each choice, all of a prompt before those of the next. Raise
    ValueError for more choices than the queue holds, and a prompt that cannot be encoded.
    """
    count = len(prompts_of(asked)) * asked.n
    if count > limits.queue:
        rule = f"at most {limits.queue} choices of all prompts together"
        raise refused("prompt", rule, count, "send several requests")
    first = secrets.randbits(63) if asked.seed is None else asked.seed
    how: Any = {name: getattr(asked, name) for name in ("temperature", "top_k", "top_p")}
    how["logprobs"] = asked.likeliest
    how["sharing"] = json.dumps([asked.user, asked.prompt_cache_key, asked.safety_identifier])
    return [
        replace(row, seed=seed % 2**64, stop_ids=(*row.stop_ids, *asked.stop_token_ids), **how)
        for row in format.prompts(asked, limits)
        for seed in range(first, first + asked.n)
    ]
