"""Fields that all requests have, and requests and responses of /v1/completions, as in OpenAI's
API.
"""

import secrets
from typing import (
    Annotated,
    Any,
    Dict,
    List,
    Literal,
    NamedTuple,
    Optional,
    Protocol,
    Sequence,
    Tuple,
    Type,
    Union,
)

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationError, model_validator
from pydantic_core import PydanticCustomError

from posenc_export.runtime.artefact.tokenizer import Codec
from posenc_export.serve.completion import Part
from posenc_export.serve.requests import Limits, Refused, Request

LONGEST_SHOWN = 80
MOST_STOPS, LONGEST_STOP = (
    16,
    256,
)  # limits for the number of stop strings of a request and the characters of each
MOST_LOGPROBS = 20  # most probable tokens that a request can ask for
LEAST = -9999.0  # OpenAI's number for the logarithm of a probability of 0
Whole = Annotated[int, Field(ge=-(2**63), lt=2**63)]
FAST = Field(fail_fast=True)  # otherwise each of 100,000 wrong items takes time
Ids = Annotated[List[Whole], FAST]


def _zero(value: float) -> float:
    if value != 0:
        raise PydanticCustomError("zero", "expected 0, which is the only supported value")
    return value


Zero = Annotated[float, AfterValidator(_zero), Field(json_schema_extra={"enum": [0]})]


class Prompt(NamedTuple):
    """A prompt, and what its continuations may be."""

    ids: Tuple[int, ...]
    max_tokens: int
    stop_ids: Tuple[int, ...]  # ids that end a continuation, without those of the request
    logprobs: Optional[int] = None  # as for requests.Request


class StreamOptions(BaseModel):
    """Additional content of a stream."""

    model_config = ConfigDict(extra="forbid")
    include_usage: bool = False


class Fields(BaseModel):
    """An object in a request. A null value means the default, as in OpenAI's API."""

    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)

    @model_validator(mode="before")
    @classmethod
    def _without_nulls(cls, body: Any) -> Any:
        return (
            {name: value for name, value in body.items() if value is not None}
            if isinstance(body, dict)
            else body
        )


class SamplingRequest(Fields):
    """What requests of all routes have. Fields of OpenAI's API that this server does not support
    accept only their neutral value.
    """

    model: Optional[str] = Field(
        None, description="Name of the served model; other names are refused."
    )
    temperature: float = Field(
        1.0, ge=0, description="Divisor of the logits; 0 chooses the most probable token."
    )
    top_p: float = Field(1.0, gt=0, le=1)
    top_k: int = Field(0, ge=0, description="Sample from the k most probable tokens; 0 for all.")
    seed: Optional[int] = Field(
        None,
        ge=-(2**63),
        lt=2**63,
        description="Seed of sampling; choice i of a prompt uses seed + i.",
    )
    n: int = Field(1, ge=1, le=128, description="Number of choices for each prompt.")
    stop: Union[None, str, List[str]] = Field(
        None, description="Strings that end the text; the text does not include them."
    )
    stop_token_ids: Ids = Field(
        [], max_length=64, description="Ids that end the text, in addition to those of the model."
    )
    stream: bool = False
    stream_options: Optional[StreamOptions] = None
    return_token_ids: bool = Field(
        False,
        description="Whether choices have token_ids: all generated ids, also of a stop string.",
    )
    user: str = Field(
        "", description="Computed prefixes of prompts are shared by requests with the same user."
    )
    logit_bias: Optional[Dict[str, Zero]] = None
    presence_penalty: Zero = 0.0
    frequency_penalty: Zero = 0.0


class CompletionRequest(SamplingRequest):
    """Body of a request of /v1/completions."""

    prompt: Union[str, Ids, Annotated[List[str], FAST], Annotated[List[Ids], FAST]] = Field(
        description="Text or token ids, or a list of these."
    )
    max_tokens: Whole = 16
    echo: Literal[False] = False
    logprobs: Optional[int] = Field(
        None,
        ge=0,
        le=MOST_LOGPROBS,
        description="Number of most probable tokens, with their log probabilities, for each token.",
    )
    suffix: Literal[None] = None
    best_of: Literal[None, 1] = None


class Format(Protocol):
    """The form of the requests and responses of a route."""

    request: Type[SamplingRequest]
    prefix: str  # of ids of responses
    whole: str  # `object` of a response
    part: str  # `object` of an event of a stream

    def prompts(self, asked: Any, codec: Codec, limits: Limits) -> List[Prompt]:
        """Return the prompts of a request, whose texts `codec` encodes. Raise ValueError if one
        cannot be encoded.
        """

    def answer(self, part: Part, asked: Any) -> Dict[str, Any]:
        """Format one entry of `choices` of a response."""

    def piece(self, part: Part, asked: Any, first: bool) -> Optional[Dict[str, Any]]:
        """Format one entry of `choices` of an event, None if there is nothing to send. first:
        whether it is the first one of its choice.
        """


class Completions:
    """The format of /v1/completions.

    Args:
        codec: converts between text and token ids.
        stop_ids: ids that end a text.
    """

    request: Type[SamplingRequest] = CompletionRequest
    prefix, whole, part = "cmpl", "text_completion", "text_completion"

    def __init__(self, codec: Codec, stop_ids: Sequence[int]) -> None:
        self.codec, self.stop_ids = codec, tuple(stop_ids)

    def prompts(self, asked: Any, codec: Codec, limits: Limits) -> List[Prompt]:
        rows = (
            encoded(prompt, codec, limits) if isinstance(prompt, str) else tuple(prompt)
            for prompt in _prompts(asked)
        )
        return [Prompt(ids, asked.max_tokens, self.stop_ids, asked.logprobs) for ids in rows]

    def answer(self, part: Part, asked: Any) -> Dict[str, Any]:
        ids = {"token_ids": part.ids} if asked.return_token_ids else {}
        logprobs = None if asked.logprobs is None else self._logprobs(part)
        return {
            "index": part.choice,
            "text": part.text,
            "logprobs": logprobs,
            "finish_reason": part.ended or None,
            **ids,
        }

    def piece(self, part: Part, asked: Any, first: bool) -> Optional[Dict[str, Any]]:
        return (
            self.answer(part, asked)
            if part.text or part.ended or asked.return_token_ids or asked.logprobs is not None
            else None
        )

    def _logprobs(self, part: Part) -> Dict[str, Any]:
        """The logarithms of the probabilities of the tokens that are part of the text. Of two
        tokens with the same text, the more probable one is listed.
        """
        shown = [
            (token, place)
            for token, place in zip(part.tokens, part.places, strict=True)
            if not token.is_end
        ]
        spelled = [
            [(self.codec.spelled(id), max(logarithm, LEAST)) for id, logarithm in token.logprobs]
            for token, _ in shown
        ]
        return {
            "tokens": [own for (own, _), *_ in spelled],
            "token_logprobs": [logarithm for (_, logarithm), *_ in spelled],
            "top_logprobs": [
                dict(sorted(likeliest, key=lambda each: each[1])) for _, *likeliest in spelled
            ],
            "text_offset": [place for _, place in shown],
        }


def parse(body: Union[bytes, bytearray], kind: Type[SamplingRequest]) -> Any:
    """Parse the body of a request. Raise Refused if it is not JSON, or a field is unknown, of a
    wrong type or outside its range.
    """
    try:
        asked = kind.model_validate_json(body)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        where, said = (
            "".join(cut(str(part)) for part in first["loc"][:1]) or "body",
            first["msg"].replace("Input should be", "expected"),
        )
        raise Refused(
            f"{where}: {said[0].lower()}{said[1:]}, got {_short(first['input'])}; /docs "
            "lists the fields"
        ) from None
    if (
        any(not 1 <= len(string) <= LONGEST_STOP for string in stops(asked))
        or len(stops(asked)) > MOST_STOPS
    ):
        raise Refused(
            f"stop: expected at most {MOST_STOPS} strings of 1 .. {LONGEST_STOP} characters, "
            f"got {_short(asked.stop)}; shorten the list"
        )
    return asked


def stops(asked: SamplingRequest) -> List[str]:
    """Return the stop strings of a request."""
    return [asked.stop] if isinstance(asked.stop, str) else asked.stop or []


def rows(asked: SamplingRequest, format: Format, codec: Codec, limits: Limits) -> List[Request]:
    """Create an engine request for each choice: first all choices of the first prompt, then those
    of the next.

    Raises:
        Refused: there are more choices than the queue holds, or a prompt cannot be encoded.
    """
    count = len(_prompts(asked)) * asked.n
    if count > limits.queue:
        raise Refused(
            f"prompt: expected at most {limits.queue} choices of all prompts together, got "
            f"{count}; send several requests"
        )
    try:
        prompts = format.prompts(asked, codec, limits)
    except ValueError as error:
        raise Refused(str(error)) from None
    seed, choosing = (
        secrets.randbits(63) if asked.seed is None else asked.seed,
        (asked.temperature, asked.top_k, asked.top_p),
    )
    return [
        Request(
            prompt.ids,
            prompt.max_tokens,
            *choosing,
            (seed + choice) % 2**64,
            (*prompt.stop_ids, *asked.stop_token_ids),
            prompt.logprobs,
            asked.user,
        )
        for prompt in prompts
        for choice in range(asked.n)
    ]


def encoded(text: str, codec: Codec, limits: Limits, special: bool = True) -> Tuple[int, ...]:
    """Return the token ids of a text, as Codec.encode.

    Raises:
        Refused: the text has more tokens than the limit, as its length shows. Encoding it would
            take seconds.
        ValueError: as Codec.encode.
    """
    least = codec.least_tokens(text)
    if least > limits.prompt:
        raise Refused(
            f"prompt: expected 1 .. {limits.prompt} tokens, got a text of at least {least}; "
            "shorten it"
        )
    return tuple(codec.encode(text, special))


def _prompts(asked: SamplingRequest) -> Sequence[Any]:
    """Return the prompts as a list. An empty list is one prompt without tokens."""
    prompt: Any = getattr(asked, "prompt", "")
    return (
        prompt
        if isinstance(prompt, list) and prompt and not isinstance(prompt[0], int)
        else [prompt]
    )


def usage(prompt: int, completion: int) -> Dict[str, int]:
    """Format the token counts."""
    return {
        "prompt_tokens": prompt,
        "completion_tokens": completion,
        "total_tokens": prompt + completion,
    }


def failure(message: str, kind: str = "invalid_request_error") -> Dict[str, Any]:
    """Format the body of an error response."""
    return {"error": {"message": message, "type": kind, "param": None, "code": None}}


def cut(text: str) -> str:
    """Return a text of a request as a message shows it: in one line, of at most LONGEST_SHOWN
    characters.
    """
    line = text if text.isprintable() else repr(text)
    return line if len(line) <= LONGEST_SHOWN else f"{line[: LONGEST_SHOWN - 3]}..."


def _short(value: Any) -> str:
    return cut(repr(value))
