"""Requests and tokens of the engine, without HTTP and text."""

import sys
from dataclasses import dataclass
from typing import NamedTuple, Optional, Tuple

from posenc_export.runtime.artefact.manifest import Manifest

STOP, LENGTH, FAILED = "stop", "length", "error"  # why a row ended
CONTEXT = 4096  # default number of tokens of a row
CHUNK = 256  # default of the largest number of prompt tokens fed between two steps


@dataclass(frozen=True)
class Limits:
    """Limits of a server.

    Raises:
        ValueError: a limit is below 1, or the memory of prefixes below 0.
    """

    rows: int = 16  # largest number of requests decoded together
    queue: int = 64  # number of requests waiting for a row
    context: int = CONTEXT  # tokens of a prompt and its continuation together
    prompt: int = CONTEXT - 1  # tokens of a prompt
    tokens: int = 4095  # tokens of a continuation
    chunk: int = CHUNK  # largest number of prompt tokens fed between two steps
    seconds: int = 600  # time from the arrival of a request to the end of its response
    prefix_memory: int = 0  # bytes for the caches of prompts, kept for requests that begin alike
    # Read tokens that are looked up in the text of a row in one pass, where that is faster.
    speculate: bool = False
    memory: int = sys.maxsize  # bytes for the caches of rows, while they grow too

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            least = 0 if name in ("prefix_memory", "speculate") else 1
            if value < least:
                raise ValueError(
                    f"serve: expected {name} of at least {least}, got {value}; give a larger number"
                )


@dataclass(frozen=True, eq=False)
class Request:
    """A prompt to continue in one row. Requests are compared by identity."""

    prompt: Tuple[int, ...]  # token ids
    max_tokens: int  # largest number of tokens to generate
    temperature: float = 0.0  # as for runtime.session.generation.choose
    top_k: int = 0
    top_p: float = 1.0
    seed: int = 0  # seed of sampling; gives the same tokens as Session.generate with this seed
    stop_ids: Tuple[int, ...] = ()  # ids that end the row
    logprobs: Optional[int] = (
        # Number of most probable tokens that come with each token and its probability; None for
        # neither.
        None
    )
    sharing: str = ""  # the caches of prompts are shared by requests with the same one of these


class Token(NamedTuple):
    """A generated token, or the end of a failed row."""

    request: Request
    id: int  # -1 if the row has failed
    ended: str  # STOP, LENGTH or FAILED for the last token of a row, otherwise empty
    # Ids and logarithms of their probabilities: this token, then the most probable ones; empty if
    # not requested.
    logprobs: Tuple[Tuple[int, float], ...] = ()

    @property
    def is_end(self) -> bool:
        """Whether the token only ends a text and is not part of it."""
        return self.id in self.request.stop_ids


class Refused(ValueError):
    """The request exceeds the limits or does not fit the model. Sending it again gives the same
    error.
    """


class Full(RuntimeError):
    """The queue has no room at the moment."""


class Stopping(RuntimeError):
    """The engine accepts no more requests."""


def most_tokens(request: Request) -> int:
    """Return the number of tokens that the row of a request may reach."""
    return len(request.prompt) + request.max_tokens


def check_model(manifest: Manifest, limits: Limits) -> None:
    """Raise ValueError unless an artefact is a decoder without encoder whose target supports
    admit and retire, and the context is within its range.
    """
    if manifest.kind != "decoder":
        raise ValueError(
            f"serve: expected a decoder, got kind {manifest.kind}; use posenc_export.load"
        )
    if manifest.encoder:
        raise ValueError(
            "serve: expected a decoder that reads no encoder, got one that reads one; use "
            "posenc generate --encoder"
        )
    if manifest.layout != "rows":
        got = f"target {manifest.target} with signature {manifest.signature}"
        raise ValueError(
            f"serve: expected rows with cache slots of their own, got {got}; export target "
            "ort or onnx-static with signature positions"
        )
    if limits.context > manifest.max_positions:
        raise ValueError(
            f"serve: expected a context of at most {manifest.max_positions} tokens, got "
            f"{limits.context}; export a larger range"
        )


def check_request(request: Request, manifest: Manifest, limits: Limits) -> None:
    """Raise Refused if the prompt has no tokens, an id is outside the vocabulary, or the number
    of tokens exceeds a limit.
    """
    count = len(request.prompt)
    if not 1 <= count <= limits.prompt:
        raise Refused(
            f"prompt: expected 1 .. {limits.prompt} tokens, got {count}; change its length"
        )
    if not 0 <= min(request.prompt) <= max(request.prompt) < manifest.vocabulary:
        raise Refused(
            f"prompt: expected token ids 0 .. {manifest.vocabulary - 1}, got "
            f"{min(request.prompt)} .. {max(request.prompt)}; use the model's own tokenizer"
        )
    if not 1 <= request.max_tokens <= limits.tokens:
        raise Refused(
            f"max_tokens: expected 1 .. {limits.tokens}, got {request.max_tokens}; give a "
            "number in this range"
        )
    if count + request.max_tokens > limits.context:
        rule = f"prompt and max_tokens within {limits.context} tokens together"
        raise Refused(
            f"max_tokens: expected {rule}, got {count} + {request.max_tokens}; reduce max_tokens"
        )
