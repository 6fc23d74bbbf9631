"""Text of a row of tokens, piece by piece (RFC 3629: a character of UTF-8 has at most 4 bytes)."""

import codecs
from typing import Callable, Container, List, Sequence

LONGEST = 4  # most bytes, and so most tokens, of a character
REPLACEMENT = "\ufffd"  # bytes that are no character, or none yet, are decoded as this


class TokenizerPieces:
    """Incremental decoder of a tokenizer: all pieces together are the text of all tokens.

    The text of a token depends on the tokens before it, so each call decodes those of the last
    piece again; their number is bounded. A decoder with tokens for bytes replaces a whole run of
    them if one byte is invalid: characters of such a run that are pieces already stay.

    Args:
        decode: returns the text of token ids.
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
        self._context: List[int] = []  # tokens of the last piece
        self._before = ""  # their text
        self._pending: List[int] = []  # tokens after them
        self._shown = 0  # characters of the text of the pending tokens that are pieces already
        self._open = 0  # tokens since this text did not end in bytes without a character
        for token in prompt:
            self.push(token)

    def push(self, token: int) -> str:
        """Return the text that a token adds, as Pieces.push."""
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
        """Return the text of the pending tokens."""
        text = self._decode([*self._context, *self._pending])
        if text.startswith(self._before):
            return text[len(self._before) :]
        return self._decode(self._pending)  # the last byte makes those of earlier pieces invalid


class BytePieces:
    """Incremental decoder of UTF-8. Invalid bytes become the replacement character.

    Args:
        prompt: the bytes before the row, of which the last ones can begin a character.
    """

    def __init__(self, prompt: Sequence[int] = ()) -> None:
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
        self._decoder.decode(bytes(prompt[1 - LONGEST :]))

    def push(self, token: int) -> str:
        """Return the text that a byte adds, as Pieces.push."""
        return self._decoder.decode(bytes([token]))

    def rest(self) -> str:
        """Return the text of an incomplete character at the end of the row."""
        return self._decoder.decode(b"", final=True)
