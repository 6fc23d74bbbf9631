"""Conversations on a session, which keeps the cache between turns."""

from typing import Dict, Iterator, List, Optional, Sequence

from posenc_export.runtime.artefact.chat_template import ChatCodec
from posenc_export.runtime.session.drafts import keep
from posenc_export.runtime.session.session import Session
from posenc_export.runtime.session.speculation import Speculate
from posenc_export.shared.refusal import refusal


class Chat:
    """A conversation with a decoder. Each turn feeds only the tokens that the cache does not hold,
    and gives the tokens that the whole conversation would give.

    Args:
        session: a session of its own, with one row.
        context: largest number of tokens of a conversation; None for the range of positions.
        speculate: as for Session.generate; drafts are looked up in the whole conversation.

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
        self.messages: List[Dict[str, str]] = []
        if system is not None:
            self.messages.append({"role": "system", "content": system})
        self.tokens: List[int] = []
        self.held = list(held)

    def reply(
        self,
        content: str,
        max_tokens: Optional[int] = None,
        temperature: float = 0.0,
        top_k: int = 0,
        top_p: float = 1.0,
        seed: int = 0,
    ) -> Iterator[str]:
        """Add a message of the user, and yield the reply in pieces, each of whole characters. What
        was yielded is the reply if the caller stops early. Arguments as for Session.generate;
        without max_tokens, it may fill the context.

        Raises:
            ValueError: the template refuses the conversation, or no token is left in the context.
                The conversation is unchanged. Otherwise as Session.generate.
        """
        messages = [*self.messages, {"role": "user", "content": content}]
        prompt = self.codec.encode(messages)
        room = self.context - len(prompt)
        if room < 1:
            rule = f"a conversation below {self.context} tokens"
            raise refusal("chat", rule, len(prompt), "begin a new one")
        self.held = self.held[: keep(self.session, self.held, prompt)]
        pieces, parts, self.tokens = self.codec.codec.pieces(prompt), [""], []
        most = room if max_tokens is None else min(max_tokens, room)
        start, before = [prompt[len(self.held) :]], [prompt[: len(self.held)]]
        sampling, ends = (temperature, top_k, top_p, seed), self.codec.ends
        generated = self.session.generate(
            start, most, *sampling, ends, speculate=self.speculate, before=before
        )
        try:
            for (token,) in generated:
                self.tokens.append(int(token))
                if token not in ends:
                    parts.append(pieces.push(int(token)))
                    yield parts[-1]
            parts.append(pieces.rest())
            yield parts[-1]
        finally:
            generated.close()  # takes back what was read and not yielded
            self.held = [*prompt, *self.tokens][: int(self.session.length.sum())]
            if self.tokens:
                self.messages = [*messages, {"role": "assistant", "content": "".join(parts)}]
