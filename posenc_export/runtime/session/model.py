"""A loaded artefact: one graph with its weights, shared by any number of sessions."""

import functools
from pathlib import Path
from typing import Any, Generator, List, Mapping, Optional, Sequence, Union

import numpy as np

from posenc_export.runtime.artefact import chat_template
from posenc_export.runtime.artefact.manifest import Manifest
from posenc_export.runtime.artefact.tokenizer import Codec, codec
from posenc_export.runtime.session import generation, text
from posenc_export.runtime.session.arguments import at_least
from posenc_export.runtime.session.session import REWIND, Session
from posenc_export.runtime.session.speculation import Speculate
from posenc_export.shared.refusal import refusal


class Model:
    """A loaded artefact, as returned by `load`. Threads may share a model; each session must be
    used by one thread at a time.

    Args:
        graph: OrtGraph or TorchGraph.
        folder: folder of the artefact; None for a module in memory.
    """

    def __init__(self, graph: Any, folder: Optional[Path] = None) -> None:
        self.graph, self.folder = graph, folder

    @property
    def manifest(self) -> Manifest:
        """The manifest of the artefact."""
        return self.graph.manifest

    @property
    def provider(self) -> str:
        """The provider that runs the graph, as `load` takes it, never "auto"."""
        return str(self.graph.provider)

    def session(
        self, batch: int = 1, capacity: Optional[int] = None, rewind: int = REWIND
    ) -> Session:
        """Open a session with empty caches on this graph.

        Args:
            batch: number of rows to allocate caches for. If a prefill or an admit needs more rows,
                the caches are moved to larger memory.
            capacity: largest number of tokens per row in caches that are written in place; None
                allows the whole range of positions.
            rewind: number of tokens, counted from the longest length a row has had, that
                `Session.rewind` can take back if states are replaced by each call (recurrent
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
            ValueError: the artefact has no tokenizer, and not the 256 token ids of bytes.
            ModuleNotFoundError: tokenizers is not installed.
        """
        return codec(self._folder("a tokenizer"), self.manifest)

    def generate(
        self,
        prompt: str,
        max_tokens: int = text.MAX_TOKENS,
        temperature: float = 0.0,
        top_k: int = 0,
        top_p: float = 1.0,
        seed: int = 0,
        speculate: Speculate = None,
    ) -> str:
        """Return the continuation of a text, without the text itself. Each call reads the whole
        prompt in a session of its own; threads may call it on one model.

        Args:
            max_tokens: largest number of tokens to add; fewer if the text ends earlier.
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
        max_tokens: int = text.MAX_TOKENS,
        temperature: float = 0.0,
        top_k: int = 0,
        top_p: float = 1.0,
        seed: int = 0,
        speculate: Speculate = None,
    ) -> Generator[str, None, None]:
        """Yield the text that `generate` returns in pieces, each of whole characters, as they are
        generated. Arguments and errors as for `generate`.
        """
        session, ids = self._of_text(), text.prompt_ids(self.tokenizer, prompt)
        sampling = generation.Sampling(temperature, top_k, top_p, seed, max_tokens)
        return text.Writer(session, self.tokenizer).write(ids, sampling, speculate)

    def chat(
        self,
        messages: Union[str, Sequence[chat_template.Message]],
        max_tokens: Optional[int] = None,
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

    def chat_ids(self, messages: Union[str, Sequence[chat_template.Message]]) -> List[int]:
        """Return the token ids that `chat` reads for a conversation, up to the beginning of the
        reply, for calls of a session. Arguments and errors as for `chat`.
        """
        return self._chat_codec.encode(text.messages_of(messages))

    def conversation(
        self,
        system: Optional[str] = None,
        context: Optional[int] = None,
        speculate: Speculate = None,
        chat_template_kwargs: Mapping[str, Any] = {},
    ) -> text.Conversation:
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
        session, values = self._of_text(context), chat_template_kwargs
        of_chat = self._codec_of_chat(values) if values else self._chat_codec
        return text.Conversation(session, of_chat, system, context, speculate)

    def embed(
        self, texts: Sequence[str], prompt: Optional[str] = None, batch: int = text.BATCH
    ) -> np.ndarray:
        """Return the sentence embeddings of texts [n,E] float32, in their order.

        The tokenizer of the artefact cuts texts to the maximal length of the checkpoint. Threads
        may call it on one model.

        Args:
            prompt: name of a prompt of the checkpoint to put before each text; None for its default
                prompt, which most checkpoints do not have.
            batch: largest number of tokens, padding included, that are read together. Texts of
                similar length are.

        Raises:
            ValueError: the artefact has no output sentence_embedding or no tokenizer, texts are not
                a list of text, or there is no such prompt.
            ModuleNotFoundError: tokenizers is not installed.
            GraphError: the graph failed.
        """
        return text.embed(self, text.rows_of(self, texts, prompt), batch)

    @functools.cached_property
    def _chat_codec(self) -> chat_template.ChatCodec:
        return self._codec_of_chat({})

    def _codec_of_chat(self, values: Mapping[str, Any]) -> chat_template.ChatCodec:
        folder = self._folder("a chat template")
        return chat_template.needed_chat_codec(folder, self.manifest, values)

    def _of_text(self, capacity: Optional[int] = None) -> Session:
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
