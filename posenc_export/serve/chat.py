"""Requests and responses of /v1/chat/completions, as in OpenAI's API."""

from typing import Annotated, Any, Dict, List, Literal, Optional, Type, Union

from pydantic import AfterValidator, Field, ValidationInfo
from pydantic_core import PydanticCustomError

from posenc_export.runtime.artefact.chat_template import ChatCodec
from posenc_export.runtime.artefact.pieces import REPLACEMENT
from posenc_export.runtime.artefact.tokenizer import Codec
from posenc_export.serve.completion import Part
from posenc_export.serve.protocol import (
    LEAST,
    MOST_LOGPROBS,
    Fields,
    Prompt,
    SamplingRequest,
    Whole,
    encoded,
)
from posenc_export.serve.requests import Limits, Token


def _nothing(value: List[Any], info: ValidationInfo) -> List[Any]:
    if value:
        raise PydanticCustomError(
            "nothing",
            "expected no {field}, which this server does not support",
            {"field": info.field_name},
        )
    return value


Nothing = Annotated[List[Any], AfterValidator(_nothing), Field(json_schema_extra={"maxItems": 0})]


class TextPart(Fields):
    """A part of a message."""

    type: Literal["text"]
    text: str


class Message(Fields):
    """A message. Replies of this server can be sent again as they are."""

    role: Literal["system", "developer", "user", "assistant"] = Field(
        description="developer is another name of system."
    )
    content: Union[str, List[TextPart]] = Field(
        description="Text, or a list of texts, which become one of several lines."
    )
    name: Optional[str] = None
    refusal: Literal[None] = None
    annotations: Nothing = []
    tool_calls: Nothing = []

    def plain(self) -> Dict[str, str]:
        """Return the message as chat templates read it."""
        content = (
            self.content
            if isinstance(self.content, str)
            else "\n".join(part.text for part in self.content)
        )
        return {
            "role": "system" if self.role == "developer" else self.role,
            "content": content,
            **({"name": self.name} if self.name else {}),
        }


class ResponseFormat(Fields):
    """The form of a reply; only text is supported."""

    type: Literal["text"]


class ChatRequest(SamplingRequest):
    """Body of a request of /v1/chat/completions."""

    messages: List[Message] = Field(
        min_length=1, description="The conversation, as the chat template of the model takes it."
    )
    max_tokens: Optional[Whole] = Field(None, description="Older name of max_completion_tokens.")
    max_completion_tokens: Optional[Whole] = Field(
        None,
        description="Most tokens of the reply; null for as many as the context allows.",
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
    response_format: Optional[ResponseFormat] = None
    tools: Nothing = []
    tool_choice: Literal[None, "none", "auto"] = None


class Chat:
    """The format of /v1/chat/completions.

    Args:
        codec: encoder of conversations; None for a model without a chat template, whose requests
            are refused.
    """

    request: Type[SamplingRequest] = ChatRequest
    prefix, whole, part = "chatcmpl", "chat.completion", "chat.completion.chunk"

    def __init__(self, codec: Optional[ChatCodec]) -> None:
        self.codec = codec

    def prompts(self, asked: Any, codec: Codec, limits: Limits) -> List[Prompt]:
        if self.codec is None:
            raise ValueError(
                "chat: expected a model with a chat template, got one without; send a prompt "
                "to /v1/completions"
            )
        if asked.top_logprobs and not asked.logprobs:
            raise ValueError(
                f"top_logprobs: expected 0 without logprobs, got {asked.top_logprobs}; set logprobs"
            )
        text = self.codec.text([message.plain() for message in asked.messages])
        ids = encoded(text, self.codec.codec, limits, special=False)
        given = (
            asked.max_tokens if asked.max_completion_tokens is None else asked.max_completion_tokens
        )
        most = max(1, min(limits.tokens, limits.context - len(ids))) if given is None else given
        return [Prompt(ids, most, self.codec.ends, asked.top_logprobs if asked.logprobs else None)]

    def answer(self, part: Part, asked: Any) -> Dict[str, Any]:
        return {
            "index": part.choice,
            "message": {"role": "assistant", "content": part.text},
            **self._rest(part, asked),
        }

    def piece(self, part: Part, asked: Any, first: bool) -> Optional[Dict[str, Any]]:
        if not (part.text or part.ended or asked.logprobs or asked.return_token_ids):
            return None
        role = {"role": "assistant"} if first else {}
        return {
            "index": part.choice,
            "delta": {**role, "content": part.text},
            **self._rest(part, asked),
        }

    def _rest(self, part: Part, asked: Any) -> Dict[str, Any]:
        ids = {"token_ids": part.ids} if asked.return_token_ids else {}
        logprobs = (
            {
                "content": [self._logprobs(token) for token in part.tokens if not token.is_end],
                "refusal": None,
            }
            if asked.logprobs
            else None
        )
        return {"logprobs": logprobs, "finish_reason": part.ended or None, **ids}

    def _logprobs(self, token: Token) -> Dict[str, Any]:
        own, *likeliest = [self._logprob(*each) for each in token.logprobs]
        return {**own, "top_logprobs": likeliest}

    def _logprob(self, token: int, logarithm: float) -> Dict[str, Any]:
        """One token. `bytes` is null for a part of a character, whose bytes the tokenizer does
        not give.
        """
        assert self.codec is not None  # otherwise the request was refused
        text = self.codec.codec.spelled(token)
        return {
            "token": text,
            "logprob": max(logarithm, LEAST),
            "bytes": None if REPLACEMENT in text else list(text.encode()),
        }
