"""State of a completion request: its rows in the engine, the text of each choice, token counts."""

import asyncio
import functools
import logging
import time
from typing import AsyncIterator, NamedTuple, Sequence

from posenc_export.runtime.artefact.tokenizer import Codec
from posenc_export.serve.engine import Engine
from posenc_export.serve.metrics import Metrics
from posenc_export.serve.requests import FAILED, STOP, Request, Token

LOG = logging.getLogger(__name__)


class Part(NamedTuple):
    """A piece of a choice."""

    choice: int  # its index
    text: str  # new text
    tokens: list[Token]  # new tokens, none of which has failed
    places: list[int]  # number of characters of the choice before each of them
    ended: str  # STOP, LENGTH or FAILED for the last piece of a choice, otherwise empty

    @property
    def ids(self) -> list[int]:
        """The generated token ids."""
        return [token.id for token in self.tokens]

    def joined(self, after: "Part") -> "Part":
        """Return this piece and the next one of the same choice as one piece."""
        tokens, places = self.tokens + after.tokens, self.places + after.places
        return Part(self.choice, self.text + after.text, tokens, places, after.ended)


class Choice:
    """One choice of a completion: converts the tokens of a row to text."""

    def __init__(self, index: int, request: Request, codec: Codec, stops: list[str]) -> None:
        self.index, self.request = index, request
        self.pieces, self.stops = codec.pieces(request.prompt), Stops(stops)
        self.tokens, self.characters, self.ended, self.last = 0, 0, "", 0.0

    def take(self, token: Token) -> Part:
        """Return the piece that a token adds. A stop string, or a token that cannot be decoded,
        ends the choice, even if the row continues.
        """
        try:
            return self._taken(token)
        except ValueError as error:
            LOG.error("%s; a choice ended", error)
            self.ended = FAILED
            return Part(self.index, "", [], [], FAILED)

    def _taken(self, token: Token) -> Part:
        text, place = "", self.characters
        if token.ended != FAILED:
            piece = "" if token.is_end else self.pieces.push(token.id)
            text = self.stops.push(piece)
            self.tokens, self.characters = self.tokens + 1, place + len(piece)
        if token.ended and not self.stops.found:
            text += self.stops.push(self.pieces.rest())
            text += self.stops.rest()
        self.ended = STOP if self.stops.found else token.ended
        new = ([], []) if token.ended == FAILED else ([token], [place])
        return Part(self.index, text, *new, self.ended)


class Completion:
    """The choices of one HTTP request. May be created on any thread, since it reads the prompts;
    must be used on the event loop only.

    Args:
        requests: one engine request per choice; the `n` choices of a prompt are consecutive.

    Attributes:
        prompt_tokens: their number; each prompt is counted once.
    """

    def __init__(
        self,
        engine: Engine,
        requests: list[Request],
        n: int,
        codec: Codec,
        stops: list[str],
        metrics: Metrics,
    ) -> None:
        self.engine, self.metrics = engine, metrics
        self.prompt_tokens = sum(len(request.prompt) for request in requests[::n])
        self.choices: dict[Request, Choice] = {}
        for index, request in enumerate(requests):
            self.choices[request] = Choice(index, request, codec, stops)
        self.tokens: asyncio.Queue[Token] = asyncio.Queue()
        self.begun = time.monotonic()

    @property
    def completion_tokens(self) -> int:
        """Number of generated tokens of all choices."""
        return sum(choice.tokens for choice in self.choices.values())

    async def parts(self) -> AsyncIterator[Part]:
        """Yield pieces of the choices until all have ended. Tokens that arrive while a piece is
        being sent are joined to one piece per choice.
        """
        while not all(choice.ended for choice in self.choices.values()):
            arrived = [await self.tokens.get()]
            while not self.tokens.empty():
                arrived.append(self.tokens.get_nowait())
            for request in dict.fromkeys(token.request for token in arrived):
                choice = self.choices[request]
                own = [token for token in arrived if token.request is request]
                taken = [self._taken(choice, token) for token in own if not choice.ended]
                # Empty if the choice has ended at a stop string, while its row runs until it is
                # cancelled.
                if taken:
                    yield functools.reduce(Part.joined, taken)

    def end(self) -> None:
        """Cancel the rows that still run, and update the metrics. Must be called once."""
        running = [r for r, choice in self.choices.items() if choice.ended in ("", STOP, FAILED)]
        self.engine.cancel(running)
        for choice in self.choices.values():
            self.metrics.requests.labels(choice.ended or "cancelled").inc()
        self.metrics.prompt_tokens.inc(self.prompt_tokens)
        self.metrics.completion_tokens.inc(self.completion_tokens)

    def _taken(self, choice: Choice, token: Token) -> Part:
        now = time.monotonic()
        if choice.tokens:
            self.metrics.between.observe(now - choice.last)
        elif token.ended != FAILED:
            self.metrics.first.observe(now - self.begun)
        choice.last = now
        return choice.take(token)


class Stops:
    """Cuts the text of one row, given in pieces, before the first stop string, and says if it was
    found.
    """

    def __init__(self, strings: Sequence[str]) -> None:
        self.strings, self.found, self._held = tuple(strings), False, ""

    def push(self, piece: str) -> str:
        """Add a piece. Return the text that cannot be part of a stop string any more."""
        if self.found:
            return ""
        text = self._held + piece
        places = [place for place in (text.find(string) for string in self.strings) if place >= 0]
        if places:
            self.found, self._held = True, ""
            return text[: min(places)]
        sizes = [0]  # numbers of characters with which a stop string may begin
        for string in self.strings:
            sizes += [size for size in range(1, len(string)) if text.endswith(string[:size])]
        held_back = max(sizes)
        self._held = text[len(text) - held_back :]
        return text[: len(text) - held_back]

    def rest(self) -> str:
        """Return the text that was held back, at the end of the row."""
        held_back, self._held = self._held, ""
        return held_back
