"""What requests of all routes have, and how they become rows of the engine."""

from typing import Annotated, Any, Literal, Sequence

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationInfo, model_validator
from pydantic_core import PydanticCustomError

from posenc_export.runtime.artefact.tokenizer import Codec
from posenc_export.serve.requests import Limits, refused

MOST_STOPS, LONGEST_STOP = 16, 256  # stop strings of a request, and characters of each
MOST_LOGPROBS = 20  # most probable tokens that a request can ask for
CHARACTERS = 64  # limit of the characters of a prompt, for each token that it may have
LEAST = -9999.0  # OpenAI's number for the logarithm of a probability of 0
Whole = Annotated[int, Field(ge=-(2**63), lt=2**63)]
FAST = Field(fail_fast=True)  # otherwise each of 100,000 wrong items takes time
Ids = Annotated[list[Whole], FAST]
Stop = Annotated[str, Field(min_length=1, max_length=LONGEST_STOP)]


def _nothing(value: Any, info: ValidationInfo) -> Any:
    if value:
        rule = "expected no {field}, which this server does not support"
        raise PydanticCustomError("nothing", rule, {"field": info.field_name})
    return value


Nothing = Annotated[list[Any], AfterValidator(_nothing), Field(json_schema_extra={"maxItems": 0})]
NoEntries = Annotated[dict[str, Any], AfterValidator(_nothing)]


class Fields(BaseModel):
    """An object in a request. A null value means the default, as in OpenAI's API."""

    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)

    @model_validator(mode="before")
    @classmethod
    def _without_nulls(cls, body: Any) -> Any:
        if not isinstance(body, dict):
            return body
        return {name: value for name, value in body.items() if value is not None}


class StreamOptions(Fields):
    """Additional content of a stream."""

    include_usage: bool = False
    include_obfuscation: Literal[False] = False


class SamplingRequest(Fields):
    """What all requests have. Unsupported fields of OpenAI's API accept only a neutral value."""

    model: str | None = Field(None, description="Name of the served model; others are refused.")
    temperature: float = Field(
        1.0, ge=0, description="Divisor of the logits; 0 chooses the most probable token."
    )
    top_p: float = Field(1.0, gt=0, le=1)
    top_k: int = Field(0, ge=0, description="Sample from the k most probable tokens; 0 for all.")
    seed: int | None = Field(
        None,
        ge=-(2**63),
        lt=2**63,
        description="Seed of sampling; choice i of a prompt uses seed + i.",
    )
    n: int = Field(1, ge=1, le=128, description="Number of choices for each prompt.")
    stop: Stop | Annotated[list[Stop], Field(max_length=MOST_STOPS)] | None = Field(
        None, description="Strings that end the text; the text does not include them."
    )
    stop_token_ids: Ids = Field(
        [], max_length=64, description="Ids that end the text, in addition to those of the model."
    )
    stream: bool = False
    stream_options: StreamOptions | None = None
    return_token_ids: bool = Field(
        False,
        description="Whether choices have token_ids: all generated ids, also of a stop string.",
    )
    user: str = Field(
        "", description="Computed prefixes of prompts are shared by requests with the same user."
    )
    prompt_cache_key: str = Field("", description="As user.")
    safety_identifier: str = Field("", description="As user.")
    # Fields of OpenAI's API, and then of vLLM's, with the values that change nothing.
    logit_bias: dict[str, Literal[0]] | None = None
    presence_penalty: Literal[0] = 0
    frequency_penalty: Literal[0] = 0
    metadata: NoEntries = {}
    prompt_cache_retention: Literal[None, "in_memory"] = None
    service_tier: Literal["auto", "default"] = "auto"
    store: Literal[False] = False
    min_p: Literal[0] = 0
    repetition_penalty: Literal[1] = 1
    ignore_eos: Literal[False] = False
    skip_special_tokens: Literal[True] = True

    @property
    def stops(self) -> list[str]:
        """The stop strings."""
        return [self.stop] if isinstance(self.stop, str) else self.stop or []


def encoded(text: str, codec: Codec, limits: Limits, special: bool = True) -> tuple[int, ...]:
    """Return the token ids of a text, as Codec.encode. Raise Refused for a text with more than
    CHARACTERS characters for each token that a prompt may have, since encoding it could take
    seconds.
    """
    most = CHARACTERS * (limits.context - 1)
    if len(text) > most:
        rule = f"1 .. {limits.context - 1} tokens in at most {most} characters"
        raise refused("prompt", rule, len(text), "shorten it")
    return tuple(codec.encode(text, special))


def prompts_of(asked: SamplingRequest) -> Sequence[Any]:
    """Return the prompts as a list. An empty list is one prompt without tokens."""
    prompt: Any = getattr(asked, "prompt", "")
    several = isinstance(prompt, list) and prompt and not isinstance(prompt[0], int)
    return prompt if several else [prompt]
