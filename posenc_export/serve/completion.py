"""State of one completion request: its rows in the engine, the text of each choice, and the token counts."""

import asyncio
import logging
import time
from typing import AsyncIterator, Dict, List, NamedTuple

from posenc_export.runtime.artefact.tokenizer import Codec
from posenc_export.serve.engine import Engine
from posenc_export.serve.metrics import Metrics
from posenc_export.serve.requests import FAILED, STOP, Request, Token
from posenc_export.serve.stops import Stops

LOG = logging.getLogger(__name__)


class Part(NamedTuple):
    """A piece of a choice.

    Args:
        choice: index of the choice.
        text: new text.
        ids: new token ids.
        ended: STOP, LENGTH or FAILED for the last piece of a choice, otherwise empty.
    """

    choice: int
    text: str
    ids: List[int]
    ended: str


class Choice:
    """One choice of a completion: converts the tokens of a row to text."""

    def __init__(self, index: int, request: Request, codec: Codec, stops: List[str]) -> None:
        self.index, self.request = index, request
        self.pieces, self.stops = codec.pieces(request.prompt), Stops(stops)
        self.made, self.ended, self.last = 0, "", 0.0

    def take(self, token: Token) -> Part:
        """Return the piece that a token adds. A stop string or a token that the tokenizer cannot decode ends the choice, even if the row continues."""
        try:
            return self._taken(token)
        except ValueError as error:
            LOG.error("%s; a choice ended", error)
            self.ended = FAILED
            return Part(self.index, "", [], FAILED)

    def _taken(self, token: Token) -> Part:
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
    """The choices of one HTTP request. May be created on any thread, since it reads the prompts; must be used on the event loop only.

    Args:
        engine: decodes the rows.
        requests: one engine request per choice; choices of the same prompt are consecutive.
        each: number of choices per prompt.
        codec: converts between text and token ids.
        stops: strings that end a choice.
        metrics: metrics of the server.

    Attributes:
        read: number of prompt tokens; each prompt is counted once.
    """

    def __init__(self, engine: Engine, requests: List[Request], each: int, codec: Codec, stops: List[str], metrics: Metrics) -> None:
        self.engine, self.metrics = engine, metrics
        self.read = sum(len(request.prompt) for request in requests[::each])
        self.choices: Dict[Request, Choice] = {request: Choice(index, request, codec, stops) for index, request in enumerate(requests)}
        self.tokens: "asyncio.Queue[Token]" = asyncio.Queue()
        self.begun = time.monotonic()

    @property
    def made(self) -> int:
        """Number of generated tokens of all choices."""
        return sum(choice.made for choice in self.choices.values())

    async def parts(self) -> AsyncIterator[Part]:
        """Yield pieces of the choices until all have ended. Tokens that arrive while a piece is being sent are joined to one piece per choice."""
        while not all(choice.ended for choice in self.choices.values()):
            arrived = [await self.tokens.get()]
            while not self.tokens.empty():
                arrived.append(self.tokens.get_nowait())
            for request in dict.fromkeys(token.request for token in arrived):
                choice = self.choices[request]
                taken = [self._taken(choice, token) for token in arrived if token.request is request and not choice.ended]
                if taken:  # empty if the choice has ended at a stop string, while its row runs until it is cancelled
                    yield Part(choice.index, "".join(part.text for part in taken), [id for part in taken for id in part.ids], taken[-1].ended)

    def end(self) -> None:
        """Cancel the rows that still run, and update the metrics. Must be called once, however the request ends."""
        self.engine.cancel([request for request, choice in self.choices.items() if choice.ended in ("", STOP, FAILED)])
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
