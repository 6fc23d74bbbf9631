"""Text on sessions: a continuation in pieces of whole characters, conversations, and embeddings of
texts, of which those of similar length are read together.
"""

import os
from pathlib import Path
from typing import Annotated, Any, Dict, Generator, List, Mapping, Optional, Sequence, Union

import numpy as np
from msgspec import Meta, Struct

from posenc_export.runtime.artefact.chat_template import ChatCodec, Message
from posenc_export.runtime.artefact.manifest import Manifest
from posenc_export.runtime.artefact.tokenizer import Codec, codec
from posenc_export.runtime.session import generation
from posenc_export.runtime.session.arguments import at_least, short_repr
from posenc_export.runtime.session.generation import Sampling
from posenc_export.runtime.session.session import Session
from posenc_export.runtime.session.speculation import Speculate
from posenc_export.shared.foreign import json_of, typed
from posenc_export.shared.refusal import refusal

Pieces = Generator[str, None, None]
MAX_TOKENS = 64  # of a continuation, unless the caller says otherwise
OUTPUT = "sentence_embedding"
PROMPTS = "config_sentence_transformers.json"
BATCH = 1024  # default for the largest number of tokens, padding included, that are read together
AGAIN = "correct it in the checkpoint, and export it again"


class Writer:
    """Continues prompts of token ids as text, on a session with one row whose cache it keeps.

    Args:
        session: a new session, of one row.

    Attributes:
        tokens: ids of the last continuation, the one that ended it included.
    """

    def __init__(self, session: Session, tokenizer: Codec) -> None:
        self.session, self.tokenizer = session, tokenizer
        self.tokens: List[int] = []
        self._held: List[int] = []  # ids in the cache

    def write(
        self,
        prompt: Sequence[int],
        sampling: Sampling,
        speculate: Speculate = None,
        encoder: Optional[np.ndarray] = None,
    ) -> Pieces:
        """Yield the continuation in pieces, each of whole characters. Ids that end it give no text.
        If the caller stops early, the session holds what was yielded. encoder: [1,Q,N] of a decoder
        that reads one, with an empty prompt. Raises as Session.generate, with the first piece.
        """
        self.tokens = []
        sampling = sampling.checked(self.session.manifest.stop_ids)
        known = len(os.path.commonprefix([self._held, list(prompt[:-1])]))
        try:
            self.session.rewind(len(self._held) - known)
        except ValueError:  # a state that each call replaces keeps a limited history
            self.session.reset()
            known = 0
        self._held = self._held[:known]
        pieces, before = self.tokenizer.pieces(prompt), [prompt[:known]]
        unread = None if encoder is not None else [prompt[known:]]
        generated = generation.generate(self.session, unread, sampling, encoder, speculate, before)
        try:
            for (token,) in generated:
                self.tokens.append(int(token))
                if token not in (sampling.stop or ()):
                    yield pieces.push(int(token))
            yield pieces.rest()
        finally:
            generated.close()  # takes back what was read and not yielded
            self._held = [*prompt, *self.tokens][: int(self.session.length.sum())]


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
        session: a new session, of one row.
        system: text of the system message; None for none.
        context: largest number of tokens of a conversation; None for the range of positions.
        speculate: as for Session.generate; drafts are looked up in the whole conversation.

    Attributes:
        messages: the messages so far, each {"role", "content"}, with the system message.
        tokens: ids of the last reply, the one that ended it included.
    """

    def __init__(
        self,
        session: Session,
        codec: ChatCodec,
        system: Optional[str] = None,
        context: Optional[int] = None,
        speculate: Speculate = None,
    ) -> None:
        self.session, self.codec, self.speculate = session, codec, speculate
        most = session.manifest.max_positions
        self.context = min(context or most, most)
        self.messages: List[Mapping[str, Any]] = []
        if system is not None:
            self.messages.append({"role": "system", "content": system})
        self._writer = Writer(session, codec.codec)

    @property
    def tokens(self) -> List[int]:
        return self._writer.tokens

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
        pieces, parts = self._writer.write(prompt, sampling, self.speculate), []
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


class Truncation(Struct):
    """How a tokenizer.json cuts texts."""

    max_length: Annotated[int, Meta(ge=0)]


class Tokenizer(Struct):
    """What is read of a tokenizer.json."""

    truncation: Optional[Truncation] = None


class Settings(Struct):
    """What is read of PROMPTS."""

    prompts: Optional[Dict[str, Optional[str]]] = None
    default_prompt_name: Optional[str] = None


def rows_of(model: Any, texts: Sequence[str], prompt: Optional[str] = None) -> List[np.ndarray]:
    """Return the token ids of each text, cut to the maximal length. Raise as Model.embed."""
    check_model(model)
    if isinstance(texts, str) or not all(isinstance(text, str) for text in texts):
        raise refusal("embed", "a list of texts", short_repr(texts), "put one text into a list")
    begin = _prompt(model.folder, prompt)
    tokenizer = codec(model.folder, model.manifest, longest(model))
    return [np.array(tokenizer.encode(begin + text), np.int64) for text in texts]


def embed(model: Any, rows: Sequence[np.ndarray], batch: int = BATCH) -> np.ndarray:
    """Return the embeddings [n,E] float32 of rows of token ids. Raise as Session.read_out."""
    at_least("batch", batch, 1)
    embeddings = np.zeros((len(rows), int(model.manifest.outputs[-1].axes[-1])), np.float32)
    session = model.session()
    for indices in groups([len(row) for row in rows], batch):
        embeddings[indices] = session.read_out([rows[index] for index in indices])
    return embeddings


def check_model(model: Any) -> None:
    """Raise ValueError unless a model comes from an artefact with sentence embeddings."""
    check_embeds(model.manifest)
    if model.folder is None:
        rule, remedy = f"an artefact with output {OUTPUT}", "export it, and load the folder"
        raise refusal("embed", rule, "a module in memory", remedy)


def check_embeds(manifest: Manifest) -> None:
    """Raise ValueError unless a model has the output OUTPUT."""
    if (last := manifest.outputs[-1].name) != OUTPUT:
        remedy = "export a sentence-transformers folder, or call session().prefill"
        raise refusal("embed", f"an artefact with output {OUTPUT}", last, remedy)


def longest(model: Any) -> int:
    """Return the tokens at which the tokenizer cuts a text; the range of positions otherwise."""
    path, most = model.folder / "tokenizer.json", int(model.manifest.max_positions)
    if not path.is_file():
        return most
    content = json_of("embed", path.name, path.read_bytes(), AGAIN)
    cut = typed("embed", path.name, content, Tokenizer, AGAIN).truncation
    return most if cut is None else min(most, cut.max_length)


def groups(lengths: Sequence[int], batch: int) -> List[List[int]]:
    """Return the indices of rows to read together, longest first: as many rows of similar length as
    `batch` tokens with their padding, at least one.
    """
    batches: List[List[int]] = []
    for index in sorted(range(len(lengths)), key=lambda index: -lengths[index]):
        if not batches or (len(batches[-1]) + 1) * lengths[batches[-1][0]] > batch:
            batches.append([])
        batches[-1].append(index)
    return batches


def _prompt(folder: Path, name: Optional[str]) -> str:
    """Return the text of a prompt of the checkpoint, of its default prompt without a name."""
    path = folder / PROMPTS
    content = json_of("embed", path.name, path.read_bytes(), AGAIN) if path.is_file() else {}
    settings = typed("embed", path.name, content, Settings, AGAIN)
    prompts, name = settings.prompts or {}, settings.default_prompt_name if name is None else name
    if name is None:
        return ""
    text = prompts.get(name)
    if text is None:
        rule = f"prompt to be one of {', '.join(prompts) or 'none'}"
        raise refusal("embed", rule, repr(name), "leave it out, or put it before the texts")
    return text
