"""Text on sessions: a continuation in pieces of whole characters, and conversations."""

from dataclasses import replace
from typing import Any, Generator, List, Mapping, Optional, Sequence, Union

from posenc_export.runtime.artefact.chat_template import ChatCodec, Message
from posenc_export.runtime.artefact.tokenizer import Codec
from posenc_export.runtime.session import generation
from posenc_export.runtime.session.argument_arrays import short_repr
from posenc_export.runtime.session.drafts import keep
from posenc_export.runtime.session.first_tokens import First
from posenc_export.runtime.session.generation import Sampling
from posenc_export.runtime.session.session import Session
from posenc_export.runtime.session.speculation import Speculate
from posenc_export.shared.refusal import refusal

Pieces = Generator[str, None, None]
MAX_TOKENS = 64  # of a continuation, unless the caller says otherwise


class Writer:
    """Continues prompts of token ids as text, on a session with one row whose cache it keeps.

    Args:
        session: a session of its own, with one row.
        held: ids in its cache. A prompt that begins with them does not read them again.

    Attributes:
        tokens: ids of the last continuation, the one that ended it included.
        held: ids in the cache.
    """

    def __init__(self, session: Session, tokenizer: Codec, held: Sequence[int] = ()) -> None:
        self.session, self.tokenizer, self.held = session, tokenizer, list(held)
        self.tokens: List[int] = []

    def write(self, first: First, sampling: Sampling, speculate: Speculate = None) -> Pieces:
        """Yield the continuation in pieces, each of whole characters. Ids that end it give no text.
        If the caller stops early, the session holds what was yielded. first: of one row. Raises as
        Session.generate, with the first piece.
        """
        self.tokens = []
        sampling = sampling.checked(self.session.manifest.stop_ids)
        prompt = [] if first.prompt is None else [int(token) for token in first.prompt[0]]
        known = keep(self.session, self.held, prompt)
        self.held = self.held[:known]
        if first.prompt is not None:
            first = replace(first, prompt=[prompt[known:]])
        pieces, before = self.tokenizer.pieces(prompt), [prompt[:known]]
        generated = generation.generate(self.session, first, sampling, speculate, before)
        try:
            for (token,) in generated:
                self.tokens.append(int(token))
                if token not in (sampling.stop or ()):
                    yield pieces.push(int(token))
            yield pieces.rest()
        finally:
            generated.close()  # takes back what was read and not yielded
            self.held = [*prompt, *self.tokens][: int(self.session.length.sum())]


def prompt_ids(tokenizer: Codec, prompt: str) -> List[int]:
    """Return the token ids of a prompt. Raise ValueError for another type, or without a token."""
    if not isinstance(prompt, str):
        remedy = "call session().generate for token ids or several rows"
        raise refusal("generate", "a prompt of text", short_repr(prompt), remedy)
    ids = tokenizer.encode(prompt)
    if not ids:
        rule = "a prompt of at least one character"
        raise refusal("generate", rule, "an empty one", "give a text to continue")
    return ids


class Conversation:
    """A conversation with a decoder. Each turn feeds only the tokens that the cache does not hold,
    and gives the tokens that the whole conversation would give.

    Args:
        session: a session of its own, with one row.
        system: text of the system message; None for none.
        context: largest number of tokens of a conversation; None for the range of positions.
        speculate: as for Session.generate; drafts are looked up in the whole conversation.
        held: ids in the cache of the session.

    Attributes:
        messages: the messages so far, each {"role", "content"}, with the system message.
        tokens: ids of the last reply, the one that ended it included.
        held: ids in the cache, which a conversation that begins with them does not read again.
    """

    def __init__(
        self,
        session: Session,
        codec: ChatCodec,
        system: Optional[str] = None,
        context: Optional[int] = None,
        speculate: Speculate = None,
        held: Sequence[int] = (),
    ) -> None:
        self.session, self.codec, self.speculate = session, codec, speculate
        most = session.manifest.max_positions
        self.context = min(context or most, most)
        self.messages: List[Mapping[str, Any]] = []
        if system is not None:
            self.messages.append({"role": "system", "content": system})
        self._writer = Writer(session, codec.codec, held)

    @property
    def tokens(self) -> List[int]:
        return self._writer.tokens

    @property
    def held(self) -> List[int]:
        return self._writer.held

    def reply(
        self,
        content: Union[str, Sequence[Message]],
        max_tokens: Optional[int] = None,
        temperature: float = 0.0,
        top_k: int = 0,
        top_p: float = 1.0,
        seed: int = 0,
    ) -> Pieces:
        """Add a message of the user, and yield the reply in pieces, each of whole characters. What
        was yielded is the reply if the caller stops early.

        Args:
            content: text of the message, or a list of messages, the last of which is answered.
            max_tokens: largest number of tokens of the reply; None to fill the context.
            temperature, top_k, top_p, seed: as for Session.generate.

        Raises:
            ValueError: the template refuses the conversation, or no token is left in the context.
                The conversation is unchanged. Otherwise as Session.generate.
        """
        messages = [*self.messages, *messages_of(content)]
        prompt = self.codec.encode(messages)
        room = self.context - len(prompt)
        if room < 1:
            rule = f"a conversation below {self.context} tokens"
            raise refusal("chat", rule, len(prompt), "begin a new one")
        most = room if max_tokens is None else min(max_tokens, room)
        sampling = Sampling(temperature, top_k, top_p, seed, most, self.codec.ends)
        pieces, parts = self._writer.write(First([prompt]), sampling, self.speculate), []
        try:
            for piece in pieces:
                parts.append(piece)
                yield piece
        finally:
            pieces.close()
            if self.tokens:
                self.messages = [*messages, {"role": "assistant", "content": "".join(parts)}]


def messages_of(content: Union[str, Sequence[Message]]) -> Sequence[Message]:
    """Return the messages to add. Raise ValueError for others than `reply` takes."""
    if isinstance(content, str):
        return [{"role": "user", "content": content}]
    fits = isinstance(content, Sequence) and all(
        isinstance(message, Mapping) and isinstance(message.get("role"), str) for message in content
    )
    if not content or not fits:
        rule = 'a text, or a list of at least one message {"role": "user", "content": "..."}'
        raise refusal("chat", rule, short_repr(content))
    return content
