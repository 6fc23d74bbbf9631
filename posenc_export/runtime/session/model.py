"""A loaded artefact: one graph with its weights, shared by any number of sessions. On them, texts
are continued in pieces of whole characters, and texts of similar length are embedded together.
"""

import functools
import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Generator, Mapping, Sequence

import numpy as np
from msgspec import Struct

from posenc_export.runtime.artefact.chat_template import ChatCodec, Message, needed_chat_codec
from posenc_export.runtime.artefact.manifest import Manifest
from posenc_export.runtime.artefact.tokenizer import Codec, codec
from posenc_export.runtime.session import generation
from posenc_export.runtime.session.arguments import at_least, short_repr
from posenc_export.runtime.session.generation import Sampling, Speculate
from posenc_export.runtime.session.session import REWIND, Session
from posenc_export.shared.foreign import json_of, typed
from posenc_export.shared.refusal import refusal

Pieces = Generator[str, None, None]
MAX_TOKENS = 64  # of a continuation, unless the caller says otherwise
OUTPUT = "sentence_embedding"
PROMPTS = "config_sentence_transformers.json"
BATCH = 1024  # default for the largest number of tokens, padding included, that are read together
AGAIN = "correct it in the checkpoint, and export it again"


class Model:
    """A loaded artefact, as returned by `load`. Threads may share a model; each session must be
    used by one thread at a time.

    Args:
        graph: OrtGraph or TorchGraph.
        folder: folder of the artefact; None for a module in memory.
    """

    def __init__(self, graph: Any, folder: Path | None = None) -> None:
        self.graph, self.folder = graph, folder

    @property
    def manifest(self) -> Manifest:
        """The manifest of the artefact."""
        return self.graph.manifest

    @property
    def provider(self) -> str:
        """The provider that runs the graph, as `load` takes it, never "auto"."""
        return str(self.graph.provider)

    def session(self, batch: int = 1, capacity: int | None = None, rewind: int = REWIND) -> Session:
        """Open a session with empty caches on this graph.

        Args:
            batch: number of rows to allocate caches for. If a prefill or an admit needs more rows,
                the caches are moved to larger memory.
            capacity: largest number of tokens per row in caches that are written in place; None
                allows the whole range of positions.
            rewind: number of tokens below the longest length a row has had, down to which
                `Session.rewind` can shorten it if states are replaced by each call (recurrent
                encodings, linear attention), or if caches of windows keep the last tokens only.
                Memory grows with it.

        Raises:
            ValueError: an argument is not a whole number of at least 1.
        """
        most = 1 if capacity is None else capacity
        for name, value in (("batch", batch), ("capacity", most), ("rewind", rewind)):
            at_least(name, value, 1)
        return Session(self.graph, batch, capacity, rewind)

    @functools.cached_property
    def tokenizer(self) -> Codec:
        """The tokenizer of the artefact, with `encode(text)` and `decode(ids)`. Without
        tokenizer.json, token ids are the bytes of a text in UTF-8.

        Raises:
            ValueError: the artefact has no tokenizer, and its vocabulary is not 256 bytes.
            ModuleNotFoundError: tokenizers is not installed.
        """
        return codec(self._folder("a tokenizer"), self.manifest)

    def generate(
        self,
        prompt: str,
        max_tokens: int = MAX_TOKENS,
        temperature: float = 0.0,
        top_k: int = 0,
        top_p: float = 1.0,
        seed: int = 0,
        speculate: Speculate = None,
    ) -> str:
        """Return the continuation of a text, without the text itself. Each call reads the whole
        prompt in a session of its own; threads may call it on one model.

        Args:
            max_tokens: largest number of tokens to add; fewer if the text or the positions end.
            temperature, top_k, top_p, seed, speculate: as for Session.generate.

        Raises:
            ValueError: the model is no decoder or reads an encoder, the artefact has no tokenizer,
                the prompt is empty or too long, or an argument is outside its range.
            ModuleNotFoundError: tokenizers is not installed.
            GraphError: the graph failed.
        """
        pieces = self.stream(prompt, max_tokens, temperature, top_k, top_p, seed, speculate)
        return "".join(pieces)

    def stream(
        self,
        prompt: str,
        max_tokens: int = MAX_TOKENS,
        temperature: float = 0.0,
        top_k: int = 0,
        top_p: float = 1.0,
        seed: int = 0,
        speculate: Speculate = None,
    ) -> Generator[str, None, None]:
        """Yield the text that `generate` returns in pieces, each of whole characters, as they are
        generated. Arguments and errors as for `generate`.
        """
        session, most = self._of_text(), self.manifest.max_positions
        ids = prompt_ids(self.tokenizer, prompt, most)
        sampling = Sampling(temperature, top_k, top_p, seed, max_tokens)
        return Writer(session, self.tokenizer).write(ids, sampling, speculate)

    def chat(
        self,
        messages: str | Sequence[Message],
        max_tokens: int | None = None,
        temperature: float = 0.0,
        top_k: int = 0,
        top_p: float = 1.0,
        seed: int = 0,
    ) -> str:
        """Return the reply to a conversation, by the chat template of the artefact. Each call reads
        the whole conversation; `conversation` keeps what it has read.

        Args:
            messages: a list of {"role": "user", "content": "..."}, or the text of one message.
            max_tokens, temperature, top_k, top_p, seed: as for Conversation.reply.

        Raises:
            ValueError, ModuleNotFoundError, GraphError: as `conversation` and Conversation.reply.
        """
        conversation = self.conversation()
        pieces = conversation.reply(messages, max_tokens, temperature, top_k, top_p, seed)
        return "".join(pieces)

    def chat_ids(self, messages: str | Sequence[Message]) -> list[int]:
        """Return the token ids that `chat` reads for a conversation, up to the beginning of the
        reply, for calls of a session. Arguments and errors as for `chat`.
        """
        return self._chat_codec.encode(messages_of(messages))

    def conversation(
        self,
        system: str | None = None,
        context: int | None = None,
        speculate: Speculate = None,
        chat_template_kwargs: Mapping[str, Any] = {},
    ) -> "Conversation":
        """Begin a conversation, which keeps its cache between turns.

        Args:
            system: text of the system message; None for none.
            context: largest number of tokens of the conversation; None for the range of positions.
            speculate: as for Session.generate; drafts are looked up in the whole conversation.
            chat_template_kwargs: values for the chat template by names that it reads, such as
                {"enable_thinking": False}.

        Raises:
            ValueError: the model is no decoder, the artefact has no chat template or no tokenizer,
                or the template does not read a name.
            ModuleNotFoundError: tokenizers or jinja2 is not installed.
        """
        session, of_chat = self._of_text(context), self._chat_codec.given(chat_template_kwargs)
        return Conversation(session, of_chat, system, context, speculate)

    def embed(
        self, texts: Sequence[str], prompt: str | None = None, batch: int = BATCH
    ) -> np.ndarray:
        """Return the sentence embeddings of texts [n,E] float32, in their order.

        The tokenizer of the artefact cuts texts to the maximal length of the checkpoint. Threads
        may call it on one model.

        Args:
            prompt: name of a prompt of the checkpoint to put before each text; None for its default
                prompt, which most checkpoints do not have.
            batch: largest number of tokens, padding included, that are read together. Texts are
                sorted by length first.

        Raises:
            ValueError: the artefact has no output sentence_embedding or no tokenizer, texts are not
                a list of text, or there is no such prompt.
            ModuleNotFoundError: tokenizers is not installed.
            GraphError: the graph failed.
        """
        return embed(self, rows_of(self, texts, prompt), batch)

    @functools.cached_property
    def cutting_tokenizer(self) -> Codec:
        """The tokenizer, which cuts texts to the maximal length of the checkpoint."""
        folder = self._folder("a tokenizer")
        return codec(folder, self.manifest, int(self.manifest.max_positions))

    @functools.cached_property
    def _chat_codec(self) -> ChatCodec:
        return needed_chat_codec(self._folder("a chat template"), self.manifest)

    def _of_text(self, capacity: int | None = None) -> Session:
        """Open a session. Raise ValueError if the model does not generate from token ids alone."""
        generation.check_generates(self.manifest)
        if self.manifest.encoder:
            remedy = "call session().generate with encoder, or posenc generate --encoder"
            got = "one that reads the outputs of an encoder"
            raise refusal("generate", "a decoder of text alone", got, remedy)
        return self.session(capacity=capacity)

    def _folder(self, what: str) -> Path:
        if self.folder is None:
            rule = f"the folder of an artefact for {what}"
            raise refusal("text", rule, "a module in memory", "export it, and load the folder")
        return self.folder


@dataclass(eq=False)
class Writer:
    """Continues prompts of token ids as text, on a session with one row whose cache it keeps."""

    session: Session  # new, of one row
    tokenizer: Codec
    # Ids of the last continuation, the one that ended it included.
    tokens: list[int] = field(default_factory=list)
    _held: list[int] = field(default_factory=list)  # ids in the cache

    def write(
        self,
        prompt: Sequence[int],
        sampling: Sampling,
        speculate: Speculate = None,
        encoder: np.ndarray | None = None,
    ) -> Pieces:
        """Yield the continuation in pieces, each of whole characters. Ids that end it give no text.
        If the caller stops early, the session holds what was yielded. encoder: [1,Q,N] of a decoder
        that reads one, with an empty prompt. Raises as Session.generate, with the first piece.
        """
        self.tokens = []
        sampling = sampling.checked(self.session.manifest.stop_ids)
        known = len(os.path.commonprefix([self._held, list(prompt[:-1])]))  # noqa: RUF071 - of ids
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


def prompt_ids(tokenizer: Codec, prompt: str, most: int) -> list[int]:
    """Return the token ids of a prompt. Raise ValueError for another type, without a token, or with
    more than `most` tokens.
    """
    if not isinstance(prompt, str):
        remedy = "call session().generate for token ids or several rows"
        raise refusal("generate", "a prompt of text", short_repr(prompt), remedy)
    ids = tokenizer.encode(prompt)
    if not 1 <= len(ids) <= most:
        remedy = "change its length, or export with larger max_positions"
        raise refusal("generate", f"a prompt of 1 .. {most} tokens", len(ids), remedy)
    return ids


class Conversation(Writer):
    """A conversation with a decoder. Each turn feeds only the tokens that the cache does not hold,
    and gives the tokens that the whole conversation would give.

    Args:
        session: a new session, of one row.
        system, context, speculate: as for Model.conversation.

    Attributes:
        messages: the messages so far, each {"role", "content"}, with the system message.
        tokens: ids of the last reply, the one that ended it included.
    """

    def __init__(
        self,
        session: Session,
        codec: ChatCodec,
        system: str | None = None,
        context: int | None = None,
        speculate: Speculate = None,
    ) -> None:
        super().__init__(session, codec.codec)
        self.codec, self.speculate = codec, speculate
        most = session.manifest.max_positions
        self.context = min(context or most, most)
        self.messages: list[Mapping[str, Any]] = []
        if system is not None:
            self.messages.append({"role": "system", "content": system})

    def reply(
        self,
        content: str | Sequence[Message],
        max_tokens: int | None = None,
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
        pieces, parts = self.write(prompt, sampling, self.speculate), []
        try:
            for piece in pieces:
                parts.append(piece)
                yield piece
        finally:
            pieces.close()
            if self.tokens:
                self.messages = [*messages, {"role": "assistant", "content": "".join(parts)}]


def messages_of(content: str | Sequence[Message]) -> Sequence[Message]:
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


class Settings(Struct):
    """What is read of PROMPTS."""

    prompts: dict[str, str | None] | None = None
    default_prompt_name: str | None = None


def rows_of(model: Any, texts: Sequence[str], prompt: str | None = None) -> list[np.ndarray]:
    """Return the token ids of each text, cut to the maximal length. Raise as Model.embed."""
    check_embeds(model.manifest)
    encode = model.cutting_tokenizer.encode
    if isinstance(texts, str) or not all(isinstance(text, str) for text in texts):
        raise refusal("embed", "a list of texts", short_repr(texts), "put one text into a list")
    begin = _prompt(model.folder, prompt)
    return [np.array(encode(begin + text), np.int64) for text in texts]


def embed(model: Any, rows: Sequence[np.ndarray], batch: int = BATCH) -> np.ndarray:
    """Return the embeddings [n,E] float32 of rows of token ids. Raise as Session.read_out."""
    at_least("batch", batch, 1)
    embeddings = np.zeros((len(rows), int(model.manifest.outputs[-1].axes[-1])), np.float32)
    session = model.session()
    for indices in groups([len(row) for row in rows], batch):
        embeddings[indices] = session.read_out([rows[index] for index in indices])
    return embeddings


def check_embeds(manifest: Manifest) -> None:
    """Raise ValueError unless a model has the output OUTPUT."""
    if (last := manifest.outputs[-1].name) != OUTPUT:
        remedy = "export a sentence-transformers folder, or run it by posenc inspect --runtime"
        raise refusal("embed", f"an artefact with output {OUTPUT}", last, remedy)


def groups(lengths: Sequence[int], batch: int) -> list[list[int]]:
    """Divide rows into groups to read together, longest first, and return their indices. A group
    has at most `batch` tokens, padding included, or one row.
    """
    batches: list[list[int]] = []
    for index in sorted(range(len(lengths)), key=lambda index: -lengths[index]):
        if not batches or (len(batches[-1]) + 1) * lengths[batches[-1][0]] > batch:
            batches.append([])
        batches[-1].append(index)
    return batches


def _prompt(folder: Path, name: str | None) -> str:
    """Return the text of a prompt of the checkpoint; without a name, that of its default prompt."""
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
