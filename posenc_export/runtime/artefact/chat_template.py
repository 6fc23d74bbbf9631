"""Conversations as prompts: the Jinja chat template of a checkpoint, rendered in a process of its
own, whose time and memory are limited.
"""

import atexit
import contextlib
import copy
import json
import os
import subprocess
import sys
import threading
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Mapping, Sequence

from posenc_export.runtime.artefact import files
from posenc_export.runtime.artefact.manifest import Manifest
from posenc_export.runtime.artefact.tokenizer import Codec, codec
from posenc_export.shared.foreign import brief, explained, json_of, typed
from posenc_export.shared.refusal import refusal

Message = Mapping[str, Any]  # role and content, as in OpenAI's API
TEMPLATE, SETTINGS = "chat_template.jinja", "tokenizer_config.json"
OLD_SETTINGS = "special_tokens_map.json"
# Names that a template can read.
SPECIAL = tuple(f"{name}_token" for name in ("bos", "eos", "unk", "sep", "pad", "cls", "mask"))
SAFE = (3, 1, 6)  # earlier sandboxes of Jinja can be left
ANSWER = "answered"
PROCESS = Path(__file__).with_name("template_process.py")
# Of processor time. Published templates take at most 0.05 s, and 0.5 us for a byte of messages.
SECONDS, SECONDS_PER_BYTE = 0.5, 4e-6
MEMORY = "512 MiB"  # template_process.MEMORY
REMEDY = f"correct {TEMPLATE} of the checkpoint and export it again"
CONVERSATION = "a conversation that the chat template of the model can render"
CHANGE = "change the messages"
ROLES = ("system", "user", "assistant")
# Names of which a template has values of its own.
OWN = ("messages", "tools", "documents", "add_generation_prompt", *SPECIAL)
MOST_BYTES = 1 << 16  # of additional values of a template in JSON


class Exceeded(ValueError):
    """A template takes more time or memory than it may."""


class Renderer:
    """The process that renders templates, started at the first one. Methods are thread-safe."""

    def __init__(self) -> None:
        self._process: subprocess.Popen[bytes] | None = None
        self.forget()

    def forget(self) -> None:
        """Leave the process to the parent, in a child that was forked."""
        self._lock, self._process = threading.Lock(), None

    def ask(self, template: str, values: Mapping[str, Any] | None) -> dict[str, Any]:
        """Return the answer of template_process. Raise Exceeded without one."""
        line = json.dumps({"template": template, "values": values})
        seconds = SECONDS + SECONDS_PER_BYTE * len(line)
        with self._lock:
            process = self._running()
            assert process.stdin is not None and process.stdout is not None
            answer = b""
            try:
                with contextlib.suppress(BrokenPipeError):
                    process.stdin.write(f'{line[:-1]}, "seconds": {seconds}}}\n'.encode())
                    process.stdin.flush()
                answer = process.stdout.readline()
            finally:  # after an interrupt, too, whose answer would be taken for the next one
                if not answer:
                    self.close()
        if not answer:
            rule = f"a chat template that takes at most {seconds:.1f} s and {MEMORY} of memory"
            raise Exceeded(str(refusal("chat", rule, "more", REMEDY)))
        return dict(json.loads(answer))

    def _running(self) -> "subprocess.Popen[bytes]":
        if self._process is None or self._process.poll() is not None:
            self.close()
            path = os.pathsep.join(filter(None, sys.path))
            self._process = subprocess.Popen(
                [sys.executable, "-P", PROCESS],
                env={**os.environ, "PYTHONPATH": path},
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                process_group=0,  # Ctrl-C in a terminal is for the program that talks
            )
        return self._process

    def close(self) -> None:
        """End the process."""
        process, self._process = self._process, None
        if process is not None:
            process.kill()
            process.communicate()


RENDERER = Renderer()
atexit.register(RENDERER.close)
os.register_at_fork(after_in_child=RENDERER.forget)


@dataclass(eq=False)
class ChatCodec:
    """Encoder of conversations to token ids. Raises ValueError for a template that Jinja cannot
    compile, ModuleNotFoundError without jinja2.

    Attributes:
        names: names of values that the template reads, besides those that it always gets.
        ends: ids that end a reply: `stop_ids`, and the special token that the template writes after
            one.
    """

    codec: Codec
    template: str
    special: Mapping[str, str]  # special tokens by name (SPECIAL), as far as the tokenizer has them
    stop_ids: Sequence[int] = ()  # ids that end a text

    def __post_init__(self) -> None:
        from importlib.metadata import version  # 0.03 s

        installed = version("jinja2")
        if tuple(int(part) for part in installed.split(".")[:3] if part.isdigit()) < SAFE:
            rule = f"jinja2 of at least {'.'.join(map(str, SAFE))}, whose sandbox holds"
            raise refusal("chat", rule, installed, "pip install -U jinja2")
        answer = RENDERER.ask(self.template, None)
        if "error" in answer:
            rule, got = "a chat template that Jinja can compile", _error(answer)
            raise refusal("chat", rule, got, REMEDY)
        self.names = tuple(name for name in answer["names"] if name not in OWN)
        self.values: dict[str, Any] = {}
        self._reads = {role: self._contents(role) for role in ROLES}
        self.ends = tuple(dict.fromkeys((*self.stop_ids, *self._turn_end())))

    def text(self, messages: Sequence[Message], reply: bool = True) -> str:
        """Return the prompt of a conversation, with `reply` up to the beginning of a reply. Raise
        ValueError if the template refuses the conversation, or takes too much time or memory.
        """
        with explained(f"chat: expected {CONVERSATION}", CHANGE):
            adapted = [self._adapted(message) for message in messages]
            json.dumps(adapted)
        return self._rendered(adapted, reply)

    def _rendered(self, messages: Sequence[Message], reply: bool) -> str:
        own = {"messages": messages, "tools": None, "documents": None, **self.special}
        values = {**own, **self.values, "add_generation_prompt": reply}
        answer = RENDERER.ask(self.template, values)
        if "error" in answer:
            raise refusal("chat", CONVERSATION, _error(answer), CHANGE)
        return str(answer["text"])

    def given(self, values: Mapping[str, Any]) -> "ChatCodec":
        """Return an encoder that gives further values to the template, such as {"enable_thinking":
        False}. Raise ValueError for names that it does not read.
        """
        where, other = "chat_template_kwargs", copy.copy(self)
        with explained(f"{where}: expected values of JSON", "change them"):
            size = len(json.dumps(dict(values), allow_nan=False))
        if size > MOST_BYTES:
            raise refusal(where, f"at most {MOST_BYTES} bytes of JSON", size, "shorten them")
        unread = [name for name in values if name not in self.names]
        if unread:
            rule = f"names that the chat template reads ({', '.join(self.names) or 'it has none'})"
            raise refusal(where, rule, brief(ValueError(unread[0])), "leave it out")
        other.values = {**self.values, **values}
        return other

    def _tried(self, messages: Sequence[Message]) -> str:
        """Return the text of a conversation; none if it is of another kind than the template's."""
        try:
            return self._rendered(messages, False)
        except Exceeded:
            raise
        except ValueError:
            return ""

    def _contents(self, role: str) -> tuple[bool, bool]:
        """Whether the template reads the content of a role as text, and as a list of parts."""

        def rendered(content: Any) -> str:
            talk = [{"role": role, "content": content}, {"role": "user", "content": "asked"}]
            if role != "system":
                talk = [{"role": "user", "content": "asked"}, {"role": role, "content": content}]
            return self._tried(talk[-1:] if role == "user" else talk)

        plain, parts = rendered(ANSWER), rendered([_part(ANSWER)])
        return ANSWER in plain, ANSWER in parts and (parts == plain or ANSWER not in plain)

    def _adapted(self, message: Message) -> Message:
        """Return a message with its content as the template reads it: text parts for a template
        that reads only text become lines, and text for one that reads only parts becomes one.
        """
        as_text, as_parts = self._reads.get(message.get("role", ""), (True, False))
        content = message.get("content")
        if isinstance(content, str) and as_parts and not as_text:
            return {**message, "content": [_part(content)]}
        if isinstance(content, list) and not as_parts:
            return {**message, "content": "\n".join(part["text"] for part in content)}
        return message

    def encode(self, messages: Sequence[Message]) -> list[int]:
        """Return the token ids of `text`, without special tokens. Raises as `text` does."""
        return self.codec.encode(self.text(messages), special=False)

    def _turn_end(self) -> list[int]:
        """The special token after a reply, if the template writes one."""
        talk = [{"role": "user", "content": "asked"}, {"role": "assistant", "content": ANSWER}]
        text = self._tried([self._adapted(message) for message in talk])
        after = self.codec.encode(text.rpartition(ANSWER)[2].lstrip(), special=False)[:1]
        return [token for token in after if self.codec.is_special(token)]


def _part(text: str) -> dict[str, str]:
    return {"type": "text", "text": text}


def _error(answer: Mapping[str, str]) -> str:
    return f"an error ({brief(ValueError(answer['error']))})"


def chat_codec(folder: Path, manifest: Manifest) -> ChatCodec | None:
    """Return the encoder of conversations of an artefact; None without a chat template. Raise as
    ChatCodec and `codec`, and ValueError for several templates without a default one.
    """
    settings: dict[str, Any] = {}
    for name in (OLD_SETTINGS, SETTINGS):
        if name in manifest.files:
            content = (files.locate(folder) / name).read_bytes()
            settings.update(json_of("chat", name, content, "save the tokenizer again"))
    template: str | None
    if TEMPLATE in manifest.files:
        with explained(f"chat: expected {TEMPLATE} in UTF-8", "save the tokenizer again"):
            template = (files.locate(folder) / TEMPLATE).read_text(encoding="utf-8")
    else:
        template = _template(settings.get("chat_template"))
    if template is None:
        return None
    stored = {name: settings.get(name) for name in SPECIAL}  # a text alone, or with its properties
    texts = {n: t.get("content") if isinstance(t, dict) else t for n, t in stored.items()}
    special = {name: text for name, text in texts.items() if isinstance(text, str)}
    return ChatCodec(codec(folder, manifest), template, special, manifest.stop_ids)


def has_template(folder: Path, manifest: Manifest) -> bool:
    """Whether an artefact seems to have a chat template, which is not read."""
    inside = SETTINGS in manifest.files and (files.locate(folder) / SETTINGS).read_bytes()
    return TEMPLATE in manifest.files or b'"chat_template"' in (inside or b"")


def _template(stored: Any) -> str | None:
    """Return the template under chat_template of tokenizer_config.json, or None. transformers also
    writes several templates there, each {"name", "template"}.
    """
    remedy = f"save one as {TEMPLATE}"
    kind = str | list[dict[str, str]] | None
    templates = typed("chat", f"chat_template of {SETTINGS}", stored, kind, remedy)
    if not isinstance(templates, list):
        return templates
    named = {entry.get("name"): entry.get("template") for entry in templates}
    if not named.get("default"):
        rule = f"{SETTINGS} with a chat template or one with the name default"
        raise refusal("chat", rule, f"{len(templates)} others", remedy)
    return named["default"]


def needed_chat_codec(folder: Path, manifest: Manifest) -> ChatCodec:
    """Return `chat_codec`, or raise ValueError if the artefact has no chat template."""
    if (codec_of_chat := chat_codec(folder, manifest)) is None:
        remedy = "export the instruct version of the model, or use posenc generate"
        raise refusal("chat", f"an artefact with a chat template ({TEMPLATE})", "none", remedy)
    return codec_of_chat
