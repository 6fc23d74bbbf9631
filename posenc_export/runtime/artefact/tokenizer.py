"""Conversion between text and token ids, by the tokenizer in an artefact folder or byte by byte."""

import functools
import importlib.util
import itertools
import json
import re
from pathlib import Path
from typing import Any, FrozenSet, List, Optional, Protocol, Sequence

from posenc_export.runtime.artefact import files
from posenc_export.runtime.artefact.manifest import Manifest
from posenc_export.runtime.artefact.pieces import LONGEST, BytePieces, TokenizerPieces
from posenc_export.runtime.artefact.token_length import bytes_of_token
from posenc_export.shared.foreign import explained, json_of

BYTES = 256
WINDOW = 16  # tokens of a prompt on which the text of the next token can depend
CONTINUES = re.compile("<0x[89AB][0-9A-F]>")  # tokens of bytes that begin no character


class Pieces(Protocol):
    """Incremental decoder of one row, from token ids to text."""

    def push(self, token: int) -> str:
        """Return the text that a token adds; ValueError if it cannot be decoded."""

    def rest(self) -> str:
        """Return the text of an incomplete character at the end of the row."""


class Codec(Protocol):
    """Encoder of text to token ids, with a decoder for each row."""

    def encode(self, text: str, special: bool = True) -> List[int]:
        """Return the ids of a prompt, with special tokens or without; ValueError if it has none."""

    def least_tokens(self, text: str) -> int:
        """Return a number of tokens that a text has at least, without encoding it."""

    def pieces(self, prompt: Sequence[int]) -> Pieces:
        """Return a decoder for the tokens that follow a prompt."""

    def spelled(self, token: int) -> str:
        """Return the text of any token alone, with U+FFFD for parts of characters."""

    def is_special(self, token: int) -> bool:
        """Whether a token gives no text because it is special."""


def codec(folder: Path, manifest: Manifest, most: Optional[int] = None) -> Codec:
    """Return the codec of an artefact.

    Args:
        most: number of tokens, special ones included, to which tokenizer.json cuts a text; None
            for whole texts.

    Raises:
        ValueError: the artefact has no tokenizer and not 256 token ids, or its tokenizer.json
            cannot be read.
        ModuleNotFoundError: tokenizers is not installed.
    """
    if "tokenizer.json" in manifest.files:
        return TokenizerCodec(folder, most)
    if manifest.vocabulary != BYTES:
        rule = f"an artefact with tokenizer.json or a byte-level decoder (vocabulary {BYTES})"
        got = f"kind {manifest.kind} with {manifest.vocabulary} token ids"
        remedy = "posenc inspect --runtime prints a program that runs it"
        if manifest.vocabulary:
            remedy = "pass token ids through posenc_export.load"
        raise ValueError(f"text: expected {rule}, got {got}; {remedy}")
    return ByteCodec()


def read_tokenizer(content: bytes, most: Optional[int] = None) -> Any:
    """Return the tokenizer of the bytes of tokenizer.json. As in transformers, its settings of
    truncation and padding, which are of a training script, only say which end of a text is cut.

    Args:
        most: as for `codec`.

    Raises:
        ValueError: the tokenizers package cannot read it.
        ModuleNotFoundError: tokenizers is not installed.
    """
    from tokenizers import Tokenizer

    rule = "text: expected a tokenizer.json that the tokenizers package can read"
    with explained(rule, "update tokenizers, or save the tokenizer again"):
        tokenizer = Tokenizer.from_buffer(content)
    settings = tokenizer.truncation or {}
    tokenizer.no_truncation()
    tokenizer.no_padding()
    if most is not None:
        tokenizer.enable_truncation(most, direction=settings.get("direction", "right"))
    return tokenizer


def check_tokenizer(content: bytes) -> None:
    """Raise ValueError unless bytes of tokenizer.json are empty or can be read."""
    if content and importlib.util.find_spec("tokenizers"):
        read_tokenizer(content)
    elif content:
        json_of("text", "tokenizer.json", content, "save the tokenizer again")


class TokenizerCodec:
    """Codec that uses tokenizer.json of an artefact folder. most: as for `codec`."""

    def __init__(self, folder: Path, most: Optional[int] = None) -> None:
        content = (files.locate(folder) / "tokenizer.json").read_bytes()
        self.tokenizer = read_tokenizer(content, most)

    def encode(self, text: str, special: bool = True) -> List[int]:
        remedy = "change the text, or export a tokenizer with an unknown token"
        with explained("text: expected a text that the tokenizer can encode", remedy):
            # Unlike encode, which keeps other threads waiting, a batch releases Python's lock.
            ids: List[int] = self.tokenizer.encode_batch(
                [_bytes(text).decode("utf-8", "replace")], add_special_tokens=special
            )[0].ids
        return ids

    def least_tokens(self, text: str) -> int:
        return 0 if self._bytes_of_token is None else -(-len(_bytes(text)) // self._bytes_of_token)

    def pieces(self, prompt: Sequence[int]) -> Pieces:
        decode = functools.partial(_decoded, self.tokenizer)
        return TokenizerPieces(decode, self._silent, self._end(prompt))

    def spelled(self, token: int) -> str:
        return _decoded(self.tokenizer, [token], special=True)

    def is_special(self, token: int) -> bool:
        return token in self._silent

    def _end(self, prompt: Sequence[int]) -> List[int]:
        """Return the last WINDOW tokens of a prompt that give text, from a whole character on."""
        shown = (token for token in reversed(prompt) if token not in self._silent)
        end = list(itertools.islice(shown, WINDOW + LONGEST))[::-1]
        first = max(len(end) - WINDOW, 0)
        while first and CONTINUES.fullmatch(self.tokenizer.id_to_token(end[first]) or ""):
            first -= 1
        return end[first:]

    @functools.cached_property
    def _silent(self) -> FrozenSet[int]:
        """Ids of special tokens, which give no text."""
        added = self.tokenizer.get_added_tokens_decoder()
        return frozenset(token for token, kind in added.items() if kind.special)

    @functools.cached_property
    def _bytes_of_token(self) -> Optional[int]:
        return bytes_of_token(json.loads(self.tokenizer.to_str()))


def _bytes(text: str) -> bytes:
    """Return a text in UTF-8. A text from argv may contain bytes that are not UTF-8."""
    return text.encode("utf-8", "surrogateescape")


def _decoded(tokenizer: Any, tokens: Sequence[int], special: bool = False) -> str:
    rule = "text: expected token ids that the tokenizer can decode"
    with explained(rule, "use the model's own tokenizer"):
        return str(tokenizer.decode(tokens, skip_special_tokens=not special))


class ByteCodec:
    """Codec of models whose token ids are UTF-8 bytes."""

    def encode(self, text: str, special: bool = True) -> List[int]:
        return list(_bytes(text))

    def least_tokens(self, text: str) -> int:
        return len(_bytes(text))

    def pieces(self, prompt: Sequence[int]) -> Pieces:
        return BytePieces(prompt)

    def spelled(self, token: int) -> str:
        return bytes([token]).decode(errors="replace")

    def is_special(self, token: int) -> bool:
        return False
