"""Conversion between text and token ids, by the tokenizer in an artefact folder or byte by byte."""

import codecs
import contextlib
import functools
import importlib.util
import itertools
import re
from pathlib import Path
from typing import Any, Callable, Container, Sequence

import msgspec

from posenc_export.runtime.artefact import files
from posenc_export.runtime.artefact.manifest import Manifest
from posenc_export.shared.foreign import explained, json_of

LONGEST = 4  # most bytes, and so most tokens, of a character
REPLACEMENT = "\ufffd"  # bytes that are no character, or none yet, are decoded as this
BYTES = 256
WINDOW = 16  # tokens of a prompt on which the text of the next token can depend
# Characters that stand for bytes in the vocabularies of GPT-2 and most models since: printable ones
# for themselves, and those from 256 on for the rest, in their order.
PRINTED = [*range(33, 127), *range(161, 173), *range(174, 256)]
REST = sorted(set(range(256)).difference(PRINTED))
LETTERS = {chr(byte): byte for byte in PRINTED} | {chr(256 + i): b for i, b in enumerate(REST)}
Parts = dict[str, msgspec.Raw]  # an object in JSON whose values are not decoded
BYTE = re.compile("<0x([0-9A-F]{2})>")
CONTINUES = re.compile("<0x[89AB][0-9A-F]>")  # tokens of bytes that begin no character


class TokenizerPieces:
    """Incremental decoder of a tokenizer: all pieces together are the text of all tokens.

    The text of a token depends on the tokens before it, so each call decodes those of the last
    piece again; their number is bounded. A decoder with tokens for bytes replaces a whole run of
    them if one byte is invalid: characters of such a run that are pieces already stay.

    Args:
        silent: ids that give no text whatever is around them.
        prompt: the last tokens before the row, from the beginning of a character on. A character
            that they do not complete belongs to the pieces.
    """

    def __init__(
        self,
        decode: Callable[[Sequence[int]], str],
        silent: Container[int] = (),
        prompt: Sequence[int] = (),
    ) -> None:
        self._decode, self._silent = decode, silent
        self._context: list[int] = []  # tokens of the last piece
        self._before = ""  # their text
        self._pending: list[int] = []  # tokens after them
        self._shown = 0  # characters of the text of the pending tokens that are pieces already
        self._open = 0  # tokens since this text did not end in bytes without a character
        for token in prompt:
            self.push(token)

    def push(self, token: int) -> str:
        """Return the text that a token adds; ValueError if it cannot be decoded."""
        if token in self._silent:
            return ""
        self._pending.append(token)
        text = self._text()
        certain = len(text.rstrip(REPLACEMENT))
        self._open = 0 if certain == len(text) else self._open + 1
        if self._open >= LONGEST:  # only the last bytes can still become a character
            certain = max(certain, len(text) - 1)
        piece = text[self._shown : certain]
        self._shown = max(self._shown, certain)
        if piece and certain == len(text):
            self._context, self._pending, self._shown = self._pending, [], 0
            self._before = self._decode(self._context)
        elif len(self._pending) > 2 * LONGEST:
            # The first tokens tell the decoder that a run of bytes is invalid, the last ones can
            # begin a character.
            hidden = len(text) - self._shown
            del self._pending[LONGEST:-LONGEST]
            self._shown = len(self._text()) - hidden
        return piece

    def rest(self) -> str:
        """Return the text of an incomplete character at the end of the row."""
        return self._text()[self._shown :]

    def _text(self) -> str:
        text = self._decode([*self._context, *self._pending])
        if text.startswith(self._before):
            return text[len(self._before) :]
        return self._decode(self._pending)  # the last byte makes those of earlier pieces invalid


class BytePieces:
    """Incremental decoder of UTF-8, after the bytes of a prompt. Invalid bytes become U+FFFD."""

    def __init__(self, prompt: Sequence[int] = ()) -> None:
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
        self._decoder.decode(bytes(prompt[1 - LONGEST :]))

    def push(self, token: int) -> str:
        """Return the text that a byte adds."""
        return self._decoder.decode(bytes([token]))

    def rest(self) -> str:
        """Return the text of an incomplete character at the end of the row."""
        return self._decoder.decode(b"", final=True)


def read_tokenizer(content: bytes, most: int | None = None) -> Any:
    """Return the tokenizer of the bytes of tokenizer.json, without its settings of padding, which
    are of a training script. Those of truncation hold below `most`. Arguments and errors as
    `codec`.
    """
    from tokenizers import Tokenizer

    rule = "text: expected a tokenizer.json that the tokenizers package can read"
    with explained(rule, "update tokenizers, or save the tokenizer again"):
        _check_merges(content)
        tokenizer = Tokenizer.from_buffer(content)
    settings = tokenizer.truncation or {}
    tokenizer.no_truncation()
    tokenizer.no_padding()
    if most is not None:
        length, direction = settings.get("max_length", most), settings.get("direction", "right")
        tokenizer.enable_truncation(min(most, length), direction=direction)
    return tokenizer


def _check_merges(content: bytes) -> None:
    """Raise ValueError for a merge whose second token does not begin with the prefix that
    tokenizers cuts off by its length; within a character, that ends the process.
    """
    decode = msgspec.json.decode
    model = decode(decode(content, type=Parts)["model"], type=Parts)
    prefix = decode(model.get("continuing_subword_prefix", b"null"))
    for merge in decode(model.get("merges", b"[]")) if prefix else ():
        second = merge.split(" ")[-1] if isinstance(merge, str) else merge[1]
        if not second.startswith(prefix):
            raise ValueError(f"a merge whose second token does not begin with {prefix!r}")


def check_tokenizer(content: bytes) -> None:
    """Raise ValueError unless bytes of tokenizer.json are empty or can be read."""
    if content and importlib.util.find_spec("tokenizers"):
        read_tokenizer(content)
    elif content:
        json_of("text", "tokenizer.json", content, "save the tokenizer again")


class TokenizerCodec:
    """Encoder of text to token ids by tokenizer.json of an artefact folder, with a decoder for each
    row. most: as for `codec`; as an attribute, the length of what it cuts.
    """

    def __init__(self, folder: Path, most: int | None = None) -> None:
        content = (files.locate(folder) / "tokenizer.json").read_bytes()
        self.tokenizer = read_tokenizer(content, most)
        self.most: int | None = (self.tokenizer.truncation or {}).get("max_length")
        self._bytes: dict[int, bytes] = {}

    def encode(self, text: str, special: bool = True) -> list[int]:
        """Return the ids of a prompt, with special tokens or without; ValueError if it has none."""
        remedy = "change the text, or export a tokenizer with an unknown token"
        with explained("text: expected a text that the tokenizer can encode", remedy):
            # Unlike encode, which keeps other threads waiting, a batch releases Python's lock.
            ids: list[int] = self.tokenizer.encode_batch(
                [_bytes(text).decode("utf-8", "replace")], add_special_tokens=special
            )[0].ids
        return ids

    def decode(self, tokens: Sequence[int]) -> str:
        """Return the text of token ids, in which special tokens give none; ValueError if they
        cannot be decoded.
        """
        return _decoded(self.tokenizer, tokens)

    def pieces(self, prompt: Sequence[int]) -> TokenizerPieces:
        """Return a decoder for the tokens that follow a prompt, from its last WINDOW tokens that
        give text, or a few more up to the beginning of a character.
        """
        shown = (token for token in reversed(prompt) if token not in self._silent)
        end = list(itertools.islice(shown, WINDOW + LONGEST))[::-1]
        first = max(len(end) - WINDOW, 0)
        while first and CONTINUES.fullmatch(self.tokenizer.id_to_token(end[first]) or ""):
            first -= 1
        return TokenizerPieces(self.decode, self._silent, end[first:])

    def bytes_of(self, token: int) -> bytes:
        """Return the bytes that any token adds to a text, which can be parts of characters."""
        if token not in self._bytes:
            self._bytes[token] = self._bytes_in_vocabulary(token)
        return self._bytes[token]

    def _bytes_in_vocabulary(self, token: int) -> bytes:
        before = self._letter
        text = _decoded(self.tokenizer, [*before, token], special=True)
        text = text[len(_decoded(self.tokenizer, before)) :]
        if REPLACEMENT not in text:
            return text.encode()
        name = self.tokenizer.id_to_token(token) or text
        if match := BYTE.fullmatch(name):
            return bytes([int(match[1], 16)])
        return bytes(LETTERS[c] for c in name) if LETTERS.keys() >= set(name) else text.encode()

    def is_special(self, token: int) -> bool:
        """Whether a token gives no text because it is special."""
        return token in self._silent

    @functools.cached_property
    def _letter(self) -> list[int]:
        """A token to put before others, as some decoders drop the space that begins a text."""
        with contextlib.suppress(ValueError):
            return self.encode("a", special=False)[-1:]
        return []

    @functools.cached_property
    def _silent(self) -> frozenset[int]:
        """Ids of special tokens, which give no text."""
        added = self.tokenizer.get_added_tokens_decoder()
        return frozenset(token for token, kind in added.items() if kind.special)


def _bytes(text: str) -> bytes:
    """Return a text in UTF-8. A text from argv may contain bytes that are not UTF-8."""
    return text.encode("utf-8", "surrogateescape")


def _decoded(tokenizer: Any, tokens: Sequence[int], special: bool = False) -> str:
    rule = "text: expected token ids that the tokenizer can decode"
    with explained(rule, "use the model's own tokenizer"):
        return str(tokenizer.decode(tokens, skip_special_tokens=not special))


class ByteCodec:
    """Codec of models whose token ids are UTF-8 bytes."""

    most: int | None = None

    def encode(self, text: str, special: bool = True) -> list[int]:
        return list(_bytes(text))

    def decode(self, tokens: Sequence[int]) -> str:
        with explained("text: expected token ids 0 .. 255", "use the model's own ids"):
            return bytes(tokens).decode("utf-8", "replace")

    def pieces(self, prompt: Sequence[int]) -> BytePieces:
        return BytePieces(prompt)

    def bytes_of(self, token: int) -> bytes:
        return bytes([token])

    def is_special(self, token: int) -> bool:
        return False


Codec = TokenizerCodec | ByteCodec


def spelled(codec: Codec, token: int) -> str:
    """Return the text that any token adds; of parts of characters, as OpenAI's API, bytes:\\xNN for
    each byte.
    """
    content = codec.bytes_of(token)
    try:
        return content.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in content)


def codec(folder: Path, manifest: Manifest, most: int | None = None) -> Codec:
    """Return the codec of an artefact. With `most`, a tokenizer cuts texts to that many tokens, or
    to fewer if its settings say so. Raise ValueError without a tokenizer or 256 token ids, or if it
    cannot be read, ModuleNotFoundError without tokenizers.
    """
    if "tokenizer.json" in manifest.files:
        return TokenizerCodec(folder, most)
    if manifest.vocabulary != BYTES:
        rule = f"an artefact with tokenizer.json or a byte-level decoder (vocabulary {BYTES})"
        got = f"kind {manifest.kind} with {manifest.vocabulary} token ids"
        remedy = "posenc inspect --runtime prints a program that runs it"
        reads = " on token ids, as a session does" if manifest.vocabulary else ""
        raise ValueError(f"text: expected {rule}, got {got}; {remedy}{reads}")
    return ByteCodec()
