"""Requests and responses of /v1/completions, as in OpenAI's API."""

from typing import Annotated, Any, Dict, List, Literal, Optional, Sequence, Type, Union

from pydantic import Field

from posenc_export.runtime.artefact.tokenizer import Codec
from posenc_export.serve.completion import Part
from posenc_export.serve.protocol import (
    FAST,
    LEAST,
    MOST_LOGPROBS,
    Ids,
    Prompt,
    SamplingRequest,
    Whole,
    encoded,
    prompts_of,
)
from posenc_export.serve.requests import Limits


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
            for prompt in prompts_of(asked)
        )
        return [Prompt(ids, asked.max_tokens, self.stop_ids, asked.logprobs) for ids in rows]

    def answer(self, part: Part, asked: Any) -> Dict[str, Any]:
        ids = {"token_ids": part.ids} if asked.return_token_ids else {}
        logprobs = None if asked.logprobs is None else self._logprobs(part)
        choice = {"index": part.choice, "text": part.text, "logprobs": logprobs}
        return {**choice, "finish_reason": part.ended or None, **ids}

    def piece(self, part: Part, asked: Any, first: bool) -> Optional[Dict[str, Any]]:
        sent = part.text or part.ended or asked.return_token_ids or asked.logprobs is not None
        return self.answer(part, asked) if sent else None

    def _logprobs(self, part: Part) -> Dict[str, Any]:
        """Format the probabilities. Of tokens with equal texts, the likelier is listed."""
        places = [p for t, p in zip(part.tokens, part.places, strict=True) if not t.is_end]
        spelled = [
            [(self.codec.spelled(id), max(logarithm, LEAST)) for id, logarithm in token.logprobs]
            for token in part.tokens
            if not token.is_end
        ]
        return {
            "tokens": [own for (own, _), *_ in spelled],
            "token_logprobs": [logarithm for (_, logarithm), *_ in spelled],
            "top_logprobs": [dict(sorted(top, key=lambda pair: pair[1])) for _, *top in spelled],
            "text_offset": places,
        }
