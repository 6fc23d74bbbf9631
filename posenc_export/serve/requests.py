"""Requests and tokens of the engine, without text."""

import sys
from dataclasses import dataclass
from typing import NamedTuple

from posenc_export.runtime.artefact.manifest import Manifest
from posenc_export.shared.refusal import refusal

STOP, LENGTH, FAILED = "stop", "length", "error"  # why a row ended
CHUNK = 64  # default of the largest number of prompt tokens fed between two steps


@dataclass(frozen=True)
class Limits:
    """Limits of a server."""

    rows: int = 16  # largest number of requests decoded together
    queue: int = 64  # number of requests waiting for a row
    context: int = 4096  # tokens of a prompt and its continuation together
    chunk: int = CHUNK  # largest number of prompt tokens fed between two steps
    seconds: int = 600  # time from the arrival of a request to the end of its response
    prefix_memory: int = 0  # bytes for the caches of prompts, kept for requests that begin alike
    memory: int = sys.maxsize  # bytes for the caches of rows, while they grow too


@dataclass(frozen=True, eq=False)
class Request:
    """A prompt to continue in one row. Requests are compared by identity."""

    prompt: tuple[int, ...]  # token ids
    max_tokens: int  # largest number of tokens to generate
    temperature: float = 0.0  # as for runtime.session.generation.Sampling
    top_k: int = 0
    top_p: float = 1.0
    seed: int = 0  # seed of sampling; gives the same tokens as Session.generate with this seed
    stop_ids: tuple[int, ...] = ()  # ids that end the row
    # Most probable tokens that come with each token and its probability; None for neither.
    logprobs: int | None = None
    sharing: str = ""  # the caches of prompts are shared by requests with the same one of these


class Token(NamedTuple):
    """A generated token, or the end of a failed row."""

    request: Request
    id: int  # -1 if the row has failed
    ended: str  # STOP, LENGTH or FAILED for the last token of a row, otherwise empty
    # Ids and logarithms of their probabilities: this token, then the most probable ones; empty if
    # not requested.
    logprobs: tuple[tuple[int, float], ...] = ()

    @property
    def is_end(self) -> bool:
        """Whether the token only ends a text and is not part of it."""
        return self.id in self.request.stop_ids


class Refused(ValueError):
    """A request that is answered with an error. status: of HTTP; 429 if it can succeed later."""

    def __init__(self, message: str, status: int = 400) -> None:
        super().__init__(message)
        self.status = status


def refused(where: str, rule: str, got: object, remedy: str, status: int = 400) -> Refused:
    """Return the error `where: expected RULE, got GOT; REMEDY` of a request."""
    return Refused(str(refusal(where, rule, got, remedy)), status)


def most_tokens(request: Request) -> int:
    """Return the number of tokens that the row of a request may reach."""
    return len(request.prompt) + request.max_tokens


def check_model(manifest: Manifest, limits: Limits) -> None:
    """Raise ValueError unless a model is a decoder without encoder whose rows can be admitted."""
    if not manifest.decodes:
        raise refusal("serve", "a decoder", f"kind {manifest.kind}", "use posenc inspect --runtime")
    if manifest.encoder:
        rule, remedy = "a decoder that reads no encoder", "use posenc generate --encoder"
        raise refusal("serve", rule, "one that reads one", remedy)
    if manifest.by_columns:
        got = f"target {manifest.target} with signature {manifest.signature}"
        remedy = "export target ort or onnx-static with signature positions"
        raise refusal("serve", "rows with cache slots of their own", got, remedy)
    if limits.context > manifest.max_positions:
        rule = f"a context of at most {manifest.max_positions} tokens"
        raise refusal("serve", rule, limits.context, "export a larger range")


def check_request(request: Request, manifest: Manifest, limits: Limits) -> None:
    """Raise Refused if a prompt is empty or exceeds a limit, or an id is no id of the model."""
    count, most = len(request.prompt), request.max_tokens
    if not 1 <= count < limits.context:
        raise refused("prompt", f"1 .. {limits.context - 1} tokens", count, "change its length")
    least, largest = min(request.prompt), max(request.prompt)
    if not 0 <= least <= largest < manifest.vocabulary:
        rule, got = f"token ids 0 .. {manifest.vocabulary - 1}", f"{least} .. {largest}"
        raise refused("prompt", rule, got, "use the model's own tokenizer")
    if most < 1:
        raise refused("max_tokens", "at least 1", most, "give a larger number")
    if count + most > limits.context:
        rule = f"prompt and max_tokens within {limits.context} tokens together"
        raise refused("max_tokens", rule, f"{count} + {most}", "reduce max_tokens")
