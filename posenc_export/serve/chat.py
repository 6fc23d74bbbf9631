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
from posenc_export.serve.requests import Limits, refused


def _nothing(value: List[Any], info: ValidationInfo) -> List[Any]:
    if value:
        rule = "expected no {field}, which this server does not support"
        raise PydanticCustomError("nothing", rule, {"field": info.field_name})
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
        role, content = "system" if self.role == "developer" else self.role, self.content
        text = content if isinstance(content, str) else "\n".join(part.text for part in content)
        name = {"name": self.name} if self.name else {}
        return {"role": role, "content": text, **name}


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
            remedy = "send a prompt to /v1/completions"
            raise refused("chat", "a model with a chat template", "one without", remedy)
        if asked.top_logprobs and not asked.logprobs:
            rule = "0 without logprobs"
            raise refused("top_logprobs", rule, asked.top_logprobs, "set logprobs")
        text = self.codec.text([message.plain() for message in asked.messages])
        ids = encoded(text, self.codec.codec, limits, special=False)
        most = asked.max_completion_tokens
        most = asked.max_tokens if most is None else most
        if most is None:
            most = max(1, min(limits.tokens, limits.context - len(ids)))
        return [Prompt(ids, most, self.codec.ends, asked.top_logprobs if asked.logprobs else None)]

    def answer(self, part: Part, asked: Any) -> Dict[str, Any]:
        message = {"role": "assistant", "content": part.text}
        return {"index": part.choice, "message": message, **self._rest(part, asked)}

    def piece(self, part: Part, asked: Any, first: bool) -> Optional[Dict[str, Any]]:
        if not (part.text or part.ended or asked.logprobs or asked.return_token_ids):
            return None
        role = {"role": "assistant"} if first else {}
        delta = {**role, "content": part.text}
        return {"index": part.choice, "delta": delta, **self._rest(part, asked)}

    def _rest(self, part: Part, asked: Any) -> Dict[str, Any]:
        ids = {"token_ids": part.ids} if asked.return_token_ids else {}
        logprobs: Optional[Dict[str, Any]] = None
        if asked.logprobs:
            content = []
            for token in part.tokens:
                if not token.is_end:
                    own, *likeliest = [self._logprob(*pair) for pair in token.logprobs]
                    content.append({**own, "top_logprobs": likeliest})
            logprobs = {"content": content, "refusal": None}
        return {"logprobs": logprobs, "finish_reason": part.ended or None, **ids}

    def _logprob(self, token: int, logarithm: float) -> Dict[str, Any]:
        """One token. Its bytes are null for a part of a character: the tokenizer gives none."""
        assert self.codec is not None  # otherwise the request was refused
        text = self.codec.codec.spelled(token)
        spelled = None if REPLACEMENT in text else list(text.encode())
        return {"token": text, "logprob": max(logarithm, LEAST), "bytes": spelled}
