"""Conversations as prompts: the Jinja chat template of a checkpoint, rendered in a sandbox."""

import datetime
import functools
import json
from importlib.metadata import version
from pathlib import Path
from typing import Any, Dict, List, Mapping, Optional, Sequence, Union

import msgspec

from posenc_export.runtime.artefact import files
from posenc_export.runtime.artefact.manifest import Manifest
from posenc_export.runtime.artefact.tokenizer import Codec, codec
from posenc_export.shared.foreign import explained, json_of, typed

Message = Mapping[str, Any]  # role and content, as in OpenAI's API
TEMPLATE, SETTINGS = "chat_template.jinja", "tokenizer_config.json"
OLD_SETTINGS = "special_tokens_map.json"
# Names that a template can read.
SPECIAL = tuple(f"{name}_token" for name in ("bos", "eos", "unk", "sep", "pad", "cls", "mask"))
SAFE = (3, 1, 6)  # earlier sandboxes of Jinja can be left
ANSWER = "answered"


class NamedTemplate(msgspec.Struct):
    """A template in transformers' format of several templates."""

    name: str
    template: str


class ChatCodec:
    """Encoder of conversations to token ids. Raises ValueError for a template that Jinja cannot
    compile, ModuleNotFoundError without jinja2.

    Args:
        special: texts of special tokens by name (SPECIAL), as far as the tokenizer has them.
        stop_ids: ids that end a text.

    Attributes:
        ends: ids that end a reply: `stop_ids`, and the special token that the template writes after
            one.
    """

    def __init__(
        self, codec: Codec, template: str, special: Mapping[str, str], stop_ids: Sequence[int] = ()
    ) -> None:
        from jinja2 import TemplateError

        self.codec, self.template, self.special = codec, template, dict(special)
        self._error = TemplateError
        remedy = f"correct {TEMPLATE} of the checkpoint and export it again"
        rule = "chat: expected a chat template that Jinja can compile"
        with explained(rule, remedy, self._error):
            self._template = _environment().from_string(template)
        self.ends = tuple(dict.fromkeys((*stop_ids, *self._turn_end())))

    def text(self, messages: Sequence[Message], reply: bool = True) -> str:
        """Return the prompt of a conversation, with `reply` up to the beginning of a reply. Raise
        ValueError if the template refuses the conversation, or its sandbox the template.
        """
        rule = "chat: expected a conversation that the chat template of the model can render"
        remedy = "change the messages, or give a prompt without --chat"
        values = {"messages": list(messages), "tools": None, "documents": None, **self.special}
        with explained(rule, remedy, self._error):
            return str(self._template.render(**values, add_generation_prompt=reply))

    def encode(self, messages: Sequence[Message]) -> List[int]:
        """Return the token ids of `text`, without special tokens. Raises as `text` does."""
        return self.codec.encode(self.text(messages), special=False)

    def _turn_end(self) -> List[int]:
        """The special token after a reply, if the template writes one."""
        talk = [{"role": "user", "content": "asked"}, {"role": "assistant", "content": ANSWER}]
        try:
            text = self.text(talk, reply=False)
        except ValueError:  # a template for conversations of another kind
            return []
        after = self.codec.encode(text.rpartition(ANSWER)[2].lstrip(), special=False)[:1]
        return [token for token in after if self.codec.is_special(token)]


def chat_codec(folder: Path, manifest: Manifest) -> Optional[ChatCodec]:
    """Return the encoder of conversations of an artefact; None without a chat template. Raise as
    ChatCodec and `codec`, and ValueError for several templates without a default one.
    """
    settings: Dict[str, Any] = {}
    for name in (OLD_SETTINGS, SETTINGS):
        if name in manifest.files:
            content = (files.locate(folder) / name).read_bytes()
            settings.update(json_of("chat", name, content, "save the tokenizer again"))
    template: Optional[str]
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


def _template(stored: Any) -> Optional[str]:
    """Return the template under chat_template of tokenizer_config.json, or None."""
    remedy = f"save one as {TEMPLATE}"
    kind = Union[str, List[NamedTemplate], None]
    templates = typed("chat", f"chat_template of {SETTINGS}", stored, kind, remedy)
    if not isinstance(templates, list):
        return templates
    named = {entry.name: entry.template for entry in templates}
    if "default" not in named:
        rule = f"{SETTINGS} with a chat template or one with the name default"
        raise ValueError(f"chat: expected {rule}, got {len(templates)} others; {remedy}")
    return named["default"]


def needed_chat_codec(folder: Path, manifest: Manifest) -> ChatCodec:
    """Return `chat_codec`, or raise ValueError if the artefact has no chat template."""
    codec_of_chat = chat_codec(folder, manifest)
    if codec_of_chat is None:
        rule = f"chat: expected an artefact with a chat template ({TEMPLATE})"
        remedy = "export the instruct version of the model, or use posenc generate"
        raise ValueError(f"{rule}, got none; {remedy}")
    return codec_of_chat


@functools.cache
def _environment() -> Any:
    """The environment of transformers: the same options, filters and functions."""
    import jinja2
    from jinja2.ext import loopcontrols
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    installed = version("jinja2")
    if tuple(int(part) for part in installed.split(".")[:3] if part.isdigit()) < SAFE:
        rule = f"jinja2 of at least {'.'.join(map(str, SAFE))}, whose sandbox holds"
        raise ValueError(f"chat: expected {rule}, got {installed}; pip install -U jinja2")

    def refuse(message: str) -> None:
        raise jinja2.TemplateError(message)

    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_generation(), loopcontrols]
    )
    environment.filters["tojson"] = _tojson
    environment.globals.update(
        raise_exception=refuse,
        strftime_now=lambda form: datetime.datetime.now().strftime(form),
        namespace=_namespace(),
    )
    return environment


def _generation() -> Any:
    """The block {% generation %}, which marks a reply for training and does not change the text."""
    from jinja2 import nodes
    from jinja2.ext import Extension

    class Generation(Extension):
        tags = {"generation"}

        def parse(self, parser: Any) -> Any:
            line = next(parser.stream).lineno
            parsed = parser.parse_statements(("name:endgeneration",), drop_needle=True)
            return nodes.Scope(parsed).set_lineno(line)

    return Generation


def _namespace() -> Any:
    """namespace() without names that begin with an underscore, which reach Python's internals."""
    from jinja2.exceptions import SecurityError
    from jinja2.utils import Namespace

    def check(names: Any) -> None:
        if any(str(name).startswith("_") for name in names):
            raise SecurityError("a name in a namespace begins with an underscore")

    class Names(Namespace):
        def __init__(self, *values: Any, **named: Any) -> None:
            check(dict(*values, **named))
            super().__init__(*values, **named)

        def __setitem__(self, name: str, value: Any) -> None:
            check([name])
            super().__setitem__(name, value)

    return Names


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: Any = None,
    separators: Any = None,
    sort_keys: bool = False,
) -> str:
    """JSON without the escapes of HTML that Jinja's own filter writes."""
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )
