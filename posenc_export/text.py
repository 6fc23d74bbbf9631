"""Text to token ids and back, by the tokenizer in an artefact folder, or byte by byte."""

import codecs
from pathlib import Path
from typing import Any, List, Protocol, Sequence

from posenc_export.runtime import files
from posenc_export.runtime.manifest import Manifest

BYTES = 256


class Pieces(Protocol):
    """Text of a row, token by token."""

    def push(self, token: int) -> str:
        """The text that a token adds; empty where a character is not complete yet."""

    def rest(self) -> str:
        """What is left of an incomplete character, at the end of the row."""


class Codec(Protocol):
    """Between text and token ids."""

    def encode(self, text: str) -> List[int]:
        """Ids of a prompt, with the special tokens that the tokenizer adds."""

    def pieces(self, prompt: Sequence[int]) -> Pieces:
        """Text of the tokens behind a prompt."""


def codec(folder: Path, manifest: Manifest) -> Codec:
    """The codec of an artefact.

    Raises:
        ValueError: neither a tokenizer nor 256 token ids; a tokenizer.json that cannot be read.
        ModuleNotFoundError: tokenizers is not installed.
    """
    if "tokenizer.json" in manifest.files:
        return ByTokenizer(folder)
    if manifest.vocabulary != BYTES:
        found = f"kind {manifest.kind} with {manifest.vocabulary} token ids"
        rule = f"expected an artefact with tokenizer.json or a byte-level decoder (vocabulary {BYTES})"
        raise ValueError(f"text: {rule}, got {found}; drive it through posenc_export.load")
    return ByBytes()


class ByTokenizer:
    """Codec of a folder with tokenizer.json."""

    def __init__(self, folder: Path) -> None:
        from tokenizers import Tokenizer

        try:
            self.tokenizer = Tokenizer.from_file(str(files.locate(folder) / "tokenizer.json"))
        except Exception as error:
            if type(error) is not Exception:  # the library raises Exception itself
                raise
            raise ValueError(f"text: expected tokenizer.json to be one that tokenizers reads, got another ({error}); update tokenizers") from None

    def encode(self, text: str) -> List[int]:
        ids: List[int] = self.tokenizer.encode(text).ids
        return ids

    def pieces(self, prompt: Sequence[int]) -> Pieces:
        pieces = TokenizerPieces(self.tokenizer)
        for token in prompt:  # the text of a token depends on the tokens before it
            pieces.push(token)
        return pieces


class TokenizerPieces:
    """Pieces of a tokenizer, without special tokens."""

    def __init__(self, tokenizer: Any) -> None:
        from tokenizers.decoders import DecodeStream

        self.tokenizer, self.stream = tokenizer, DecodeStream(skip_special_tokens=True)

    def push(self, token: int) -> str:
        return self.stream.step(self.tokenizer, token) or ""

    def rest(self) -> str:
        return ""


class ByBytes:
    """Codec of ids that are bytes of UTF-8."""

    def encode(self, text: str) -> List[int]:
        return list(text.encode("utf-8", "surrogateescape"))  # a prompt from argv may have bytes that are no UTF-8

    def pieces(self, prompt: Sequence[int]) -> Pieces:
        return BytePieces()


class BytePieces:
    """Pieces of UTF-8; bytes that are none become the replacement character."""

    def __init__(self) -> None:
        self.decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")

    def push(self, token: int) -> str:
        return self.decoder.decode(bytes([token]))

    def rest(self) -> str:
        return self.decoder.decode(b"", final=True)
