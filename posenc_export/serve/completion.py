"""One HTTP request on its way: rows in the engine, text of each, and the counts."""

import asyncio
import time
from typing import AsyncIterator, Dict, List, NamedTuple

from posenc_export.serve.engine import Engine
from posenc_export.serve.metrics import Metrics
from posenc_export.serve.requests import FAILED, STOP, Request, Token
from posenc_export.serve.stops import Stops
from posenc_export.text import Codec


class Part(NamedTuple):
    """A piece of a choice.

    Args:
        choice: its index.
        text: that is new.
        ids: tokens that are new.
        ended: STOP, LENGTH or FAILED where the choice ends, else empty.
    """

    choice: int
    text: str
    ids: List[int]
    ended: str


class Choice:
    """Text of one row."""

    def __init__(self, index: int, request: Request, codec: Codec, stops: List[str]) -> None:
        self.index, self.request = index, request
        self.pieces, self.stops = codec.pieces(request.prompt), Stops(stops)
        self.made, self.ended, self.last = 0, "", 0.0

    def take(self, token: Token) -> Part:
        """What a token adds. A stop string ends the choice before the row ends."""
        text = ""
        if token.ended != FAILED:
            self.made += 1
            text = self.stops.push("" if token.id in self.request.stop_ids else self.pieces.push(token.id))
        if token.ended and not self.stops.found:
            text += self.stops.push(self.pieces.rest())
            text += self.stops.rest()
        self.ended = STOP if self.stops.found else token.ended
        return Part(self.index, text, [] if token.ended == FAILED else [token.id], self.ended)


class Completion:
    """Choices of one HTTP request; used on the event loop only.

    Args:
        engine: that decodes the rows.
        requests: a row for each choice.
        each: choices of one prompt, which stand side by side.
        codec: of the model.
        stops: strings that end a choice.
        metrics: of the server.

    Attributes:
        read: tokens of the prompts, each counted once.
    """

    def __init__(self, engine: Engine, requests: List[Request], each: int, codec: Codec, stops: List[str], metrics: Metrics) -> None:
        self.engine, self.metrics = engine, metrics
        self.read = sum(len(request.prompt) for request in requests[::each])
        self.choices: Dict[Request, Choice] = {request: Choice(index, request, codec, stops) for index, request in enumerate(requests)}
        self.tokens: "asyncio.Queue[Token]" = asyncio.Queue()
        self.begun = time.monotonic()

    @property
    def made(self) -> int:
        """Tokens chosen."""
        return sum(choice.made for choice in self.choices.values())

    async def parts(self) -> AsyncIterator[Part]:
        """Pieces of the choices as they come, until all have ended. Tokens that came while the last piece was on its way are one piece of each choice."""
        while not all(choice.ended for choice in self.choices.values()):
            arrived = [await self.tokens.get()]
            while not self.tokens.empty():
                arrived.append(self.tokens.get_nowait())
            for request in dict.fromkeys(token.request for token in arrived):
                choice = self.choices[request]
                taken = [self._taken(choice, token) for token in arrived if token.request is request and not choice.ended]
                if taken:  # else its row runs on for some steps behind a stop string
                    yield Part(choice.index, "".join(part.text for part in taken), [id for part in taken for id in part.ids], taken[-1].ended)

    def end(self) -> None:
        """Cancel the rows that still run, and count; to be called once, however the request ended."""
        self.engine.cancel([request for request, choice in self.choices.items() if choice.ended in ("", STOP)])
        for choice in self.choices.values():
            self.metrics.requests.labels(choice.ended or "cancelled").inc()
        self.metrics.read.inc(self.read)
        self.metrics.made.inc(self.made)

    def _taken(self, choice: Choice, token: Token) -> Part:
        now = time.monotonic()
        if choice.made:
            self.metrics.between.observe(now - choice.last)
        elif token.ended != FAILED:
            self.metrics.first.observe(now - self.begun)
        choice.last = now
        return choice.take(token)
