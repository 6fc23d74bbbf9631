"""What the engine is asked and what it answers, without HTTP or text."""

from dataclasses import dataclass
from typing import NamedTuple, Tuple

from posenc_export.runtime.manifest import Manifest

STOP, LENGTH, FAILED = "stop", "length", "error"  # why a row ended


@dataclass(frozen=True)
class Limits:
    """What a server takes at most.

    Args:
        rows: requests that are decoded together.
        queue: requests that wait for a row.
        context: tokens of a prompt and its continuation together; slots of a row's caches.
        prompt: tokens of a prompt.
        tokens: tokens of a continuation.
        chunk: tokens of prompts that are read between two steps of the running rows.

    Raises:
        ValueError: a number below 1.
    """

    rows: int = 16
    queue: int = 64
    context: int = 4096
    prompt: int = 4095
    tokens: int = 4095
    chunk: int = 256

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            if value < 1:
                raise ValueError(f"serve: expected {name} of at least 1, got {value}; give a larger number")


@dataclass(frozen=True, eq=False)
class Request:
    """One row: a prompt to continue. Two requests are never equal.

    Args:
        prompt: token ids.
        max_tokens: tokens to add at most.
        temperature, top_k, top_p, seed: as runtime.sampling.choose; a seed draws as Session.generate does with it.
        stop_ids: ids that end the row.
    """

    prompt: Tuple[int, ...]
    max_tokens: int
    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    seed: int = 0
    stop_ids: Tuple[int, ...] = ()


class Token(NamedTuple):
    """A token that was chosen, or the end of a row that failed.

    Args:
        request: whose row it is.
        id: the token; -1 where the row failed.
        ended: STOP, LENGTH or FAILED with the last token of a row, else empty.
    """

    request: Request
    id: int
    ended: str


class Refused(ValueError):
    """A request that does not fit the limits or the model; it will be refused again."""


class Full(RuntimeError):
    """The queue has no room now."""


class Stopping(RuntimeError):
    """The engine takes no more requests."""


def check_model(manifest: Manifest, limits: Limits) -> None:
    """Refuse artefacts whose rows cannot come and go, or that continue no text.

    Raises:
        ValueError: another kind, target or signature, a decoder that reads an encoder, a context beyond the range of positions.
    """
    if manifest.kind != "decoder":
        raise ValueError(f"serve: expected a decoder, got kind {manifest.kind}; use posenc_export.load")
    if manifest.encoder:
        raise ValueError("serve: expected a decoder that reads no encoder, got one that reads one; use posenc generate --encoder")
    if manifest.layout != "rows":
        found = f"target {manifest.target} with signature {manifest.signature}"
        raise ValueError(f"serve: expected rows that come and go, got {found}; export target ort or onnx-static with signature positions")
    if limits.context > manifest.max_positions:
        raise ValueError(f"serve: expected a context of at most {manifest.max_positions} tokens, got {limits.context}; export a larger range")


def check_request(request: Request, manifest: Manifest, limits: Limits) -> None:
    """Refuse what no row can take.

    Raises:
        Refused: a prompt without tokens or with ids of another vocabulary, more tokens than the limits.
    """
    count = len(request.prompt)
    if not 1 <= count <= limits.prompt:
        raise Refused(f"prompt: expected 1 .. {limits.prompt} tokens, got {count}")
    if not 0 <= min(request.prompt) <= max(request.prompt) < manifest.vocabulary:
        raise Refused(f"prompt: expected token ids 0 .. {manifest.vocabulary - 1}, got {min(request.prompt)} .. {max(request.prompt)}")
    if not 1 <= request.max_tokens <= limits.tokens:
        raise Refused(f"max_tokens: expected 1 .. {limits.tokens}, got {request.max_tokens}")
    if count + request.max_tokens > limits.context:
        raise Refused(f"max_tokens: expected prompt and max_tokens within {limits.context} tokens together, got {count} + {request.max_tokens}")
