"""Conversion between text and token ids, by the tokenizer in an artefact folder or byte by byte."""

import codecs
import functools
import importlib.util
from pathlib import Path
from typing import Any, List, Mapping, Protocol, Sequence

from posenc_export.runtime.artefact import files
from posenc_export.runtime.artefact.manifest import Manifest
from posenc_export.shared.foreign import explained, json_of

BYTES = 256
WINDOW = 16  # tokens of a prompt on which the text of the next token can depend
REPLACEMENT = "\ufffd"


class Pieces(Protocol):
    """Incremental decoder of one row, from token ids to text."""

    def push(self, token: int) -> str:
        """Return the text that a token adds, empty while a character is incomplete. Raise ValueError if the token cannot be decoded."""

    def rest(self) -> str:
        """Return the text of an incomplete character at the end of the row."""


class Codec(Protocol):
    """Encoder of text to token ids, with a decoder for each row."""

    def encode(self, text: str, special: bool = True) -> List[int]:
        """Return the token ids of a prompt, with the special tokens that the tokenizer adds unless `special` is False. Raise ValueError if it cannot be encoded."""

    def pieces(self, prompt: Sequence[int]) -> Pieces:
        """Return a decoder for the tokens that follow a prompt."""

    def spelled(self, token: int) -> str:
        """Return the text of one token alone, of special tokens too, with U+FFFD for parts of characters."""

    def is_special(self, token: int) -> bool:
        """Whether a token gives no text because it is special."""


def codec(folder: Path, manifest: Manifest) -> Codec:
    """Return the codec of an artefact.

    Raises:
        ValueError: the artefact has no tokenizer and not 256 token ids, or its tokenizer.json cannot be read.
        ModuleNotFoundError: tokenizers is not installed.
    """
    if "tokenizer.json" in manifest.files:
        return TokenizerCodec(folder)
    if manifest.vocabulary != BYTES:
        rule, got = (
            f"an artefact with tokenizer.json or a byte-level decoder (vocabulary {BYTES})",
            f"kind {manifest.kind} with {manifest.vocabulary} token ids",
        )
        raise ValueError(
            f"text: expected {rule}, got {got}; pass token ids through posenc_export.load"
        )
    return ByteCodec()


def read_tokenizer(content: bytes) -> Any:
    """Return the tokenizer of the bytes of tokenizer.json. Raise ValueError if the tokenizers package cannot read it, ModuleNotFoundError if it is not installed."""
    from tokenizers import Tokenizer

    with explained(
        "text: expected a tokenizer.json that the tokenizers package can read",
        "update tokenizers, or save the tokenizer again",
    ):
        return Tokenizer.from_buffer(content)


def check_tokenizer(content: bytes) -> None:
    """Raise ValueError unless bytes of tokenizer.json are empty, or can be read: by the tokenizers package, or without it as a JSON object."""
    if content and importlib.util.find_spec("tokenizers"):
        read_tokenizer(content)
    elif content:
        json_of("text", "tokenizer.json", content, "save the tokenizer again")


class TokenizerCodec:
    """Codec that uses tokenizer.json of an artefact folder."""

    def __init__(self, folder: Path) -> None:
        self.tokenizer = read_tokenizer((files.locate(folder) / "tokenizer.json").read_bytes())

    def encode(self, text: str, special: bool = True) -> List[int]:
        valid = text.encode("utf-8", "surrogateescape").decode(
            "utf-8", "replace"
        )  # a prompt from argv may contain bytes that are not UTF-8
        with explained(
            "text: expected a text that the tokenizer can encode",
            "change the text, or export a tokenizer with an unknown token",
        ):
            # Unlike encode, which keeps other threads waiting, a batch releases Python's lock.
            ids: List[int] = self.tokenizer.encode_batch([valid], add_special_tokens=special)[0].ids
        return ids

    def pieces(self, prompt: Sequence[int]) -> Pieces:
        return TokenizerPieces(self.tokenizer, prompt)

    def spelled(self, token: int) -> str:
        return _decoded(self.tokenizer, [token], special=True)

    def is_special(self, token: int) -> bool:
        return token in self._added and self._added[token].special

    @functools.cached_property
    def _added(self) -> Mapping[int, Any]:
        return self.tokenizer.get_added_tokens_decoder()  # type: ignore[no-any-return]


class TokenizerPieces:
    """Incremental decoder of a tokenizer. Special tokens give no text.

    The text of a token depends on the tokens before it, and a character can have several tokens, so each call decodes a window of the last tokens again.
    tokenizers.decoders.DecodeStream does the same, but fails for the rest of a row once bytes that follow a character are not UTF-8.
    """

    def __init__(self, tokenizer: Any, prompt: Sequence[int] = ()) -> None:
        self.tokenizer = tokenizer
        self.window = list(prompt[-WINDOW:])
        text = _decoded(tokenizer, self.window)
        self.shown = len(text.rstrip(REPLACEMENT))  # characters of the window's text
        self.complete = (
            len(self.window) if self.shown == len(text) else 0
        )  # the next window begins at this token, never within a character

    def push(self, token: int) -> str:
        self.window.append(token)
        text = _decoded(self.tokenizer, self.window)
        certain = text.rstrip(REPLACEMENT)  # bytes that are no character yet are decoded as this
        new = certain[self.shown :]
        self.shown = max(self.shown, len(certain))
        if new and certain == text:
            self.window, self.complete = (
                self.window[self.complete :],
                len(self.window) - self.complete,
            )
            self.shown = len(_decoded(self.tokenizer, self.window))
        return new

    def rest(self) -> str:
        return _decoded(self.tokenizer, self.window)[self.shown :]


def _decoded(tokenizer: Any, tokens: Sequence[int], special: bool = False) -> str:
    rule = "text: expected token ids that the tokenizer can decode"
    with explained(rule, "use the model's own tokenizer"):
        return tokenizer.decode(tokens, skip_special_tokens=not special)  # type: ignore[no-any-return]


class ByteCodec:
    """Codec of models whose token ids are UTF-8 bytes."""

    def encode(self, text: str, special: bool = True) -> List[int]:
        return list(
            text.encode("utf-8", "surrogateescape")
        )  # a prompt from argv may contain bytes that are not UTF-8

    def pieces(self, prompt: Sequence[int]) -> Pieces:
        pieces = BytePieces()
        pieces.decoder.decode(
            bytes(prompt[-3:])
        )  # the prompt may end within a character, which has up to 4 bytes
        return pieces

    def spelled(self, token: int) -> str:
        return bytes([token]).decode(errors="replace")

    def is_special(self, token: int) -> bool:
        return False


class BytePieces:
    """Incremental decoder of UTF-8. Invalid bytes become the replacement character."""

    def __init__(self) -> None:
        self.decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")

    def push(self, token: int) -> str:
        return self.decoder.decode(bytes([token]))

    def rest(self) -> str:
        return self.decoder.decode(b"", final=True)
