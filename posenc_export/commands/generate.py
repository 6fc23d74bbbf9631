"""`posenc generate`: continue a text with a decoder."""

import argparse
import json
from pathlib import Path
from typing import Any, List

import numpy as np

from posenc_export.commands.loading import loaded, model_of
from posenc_export.commands.options import (
    PROVIDER,
    SAMPLING,
    SPECULATE,
    TEMPLATE,
    Table,
    option,
    sampling_of,
    template_values,
)
from posenc_export.commands.terminal import print_text
from posenc_export.runtime.artefact.chat_template import needed_chat_codec
from posenc_export.runtime.session.generation import First, Sampling, check_generates, start_token
from posenc_export.runtime.session.text import MAX_TOKENS, Conversation, Writer, prompt_ids

OPTIONS: Table = {
    **model_of("a decoder's artefact"),
    "--prompt": dict(
        action="append", default=[], help="text to continue; with --encoder, text for the encoder"
    ),
    "--encoder": option(
        "folder of the encoder's artefact, for a decoder that reads one", type=Path
    ),
    "--max-tokens": option(
        "largest number of tokens to add; fewer if the text ends earlier", MAX_TOKENS
    ),
    "--chat": option(
        "answer the prompt as a message, by the chat template of the model; several --prompt are "
        "several turns",
        action="store_true",
    ),
    "--system": option("text of the system message, with --chat"),
    **TEMPLATE,
    **SAMPLING,
    **SPECULATE,
    **PROVIDER,
}


def run(options: argparse.Namespace) -> int:
    _check(options)
    model = loaded(options, options.folder, check_generates)
    return (_converse if options.chat else _continue)(options, model, model.session())


def _check(options: argparse.Namespace) -> None:
    encoder = options.encoder is not None
    several = options.system is not None or len(options.prompt) > 1
    got = "--system" if options.system is not None else f"{len(options.prompt)} prompts"
    most = options.max_tokens
    rules = {
        f"max-tokens of at least 1, got {most}; give --max-tokens N": most >= 1,
        "--prompt, got none; give a text": bool(options.prompt),
        "--chat or --encoder, got both; leave one out": not encoder or not options.chat,
        "--chat with --chat-template-kwargs, got none; give it": options.chat
        or options.chat_template_kwargs is None,
        f"one prompt and no system message without --chat, got {got}; give --chat": options.chat
        or not several,
    }
    for rule, holds in rules.items():
        if not holds:
            raise ValueError(f"generate: expected {rule}")


def _continue(options: argparse.Namespace, model: Any, session: Any) -> int:
    """Print the continuation of a prompt."""
    begin = options.prompt[0]
    prompt = prompt_ids(model.tokenizer, begin)
    shown, source = "", First([prompt])
    if options.encoder is None:
        shown = begin.encode("utf-8", "surrogateescape").decode(errors="replace")
    else:
        start_token(session.manifest)
        encoder = loaded(options, options.encoder).session()
        source = First(None, encoder.prefill(np.array([prompt])))
    writer = Writer(session, model.tokenizer)
    parts: List[str] = []
    sampling = Sampling(*sampling_of(options), options.max_tokens)
    for piece in writer.write(source, sampling, options.speculate):
        if not options.json:
            # The prompt is printed with the first piece, so that a refusal prints nothing.
            print_text(("" if parts else shown) + piece)
        elif len(parts) % 256 == 255:
            options.say(f"{len(writer.tokens)} of {options.max_tokens} tokens")
        parts.append(piece)
    options.say.close()
    if options.json:
        print(json.dumps({"prompt": shown, "text": "".join(parts), "tokens": writer.tokens}))
    else:
        print()
    return 0


def _converse(options: argparse.Namespace, model: Any, session: Any) -> int:
    codec = needed_chat_codec(model.folder, model.manifest, template_values(options))
    chat = Conversation(session, codec, options.system, None, options.speculate)
    for prompt in options.prompt:
        for piece in chat.reply(prompt, options.max_tokens, *sampling_of(options)):
            if not options.json:
                print_text(piece)
        if not options.json:
            print()
    if options.json:
        reply = chat.messages[-1]["content"]
        print(json.dumps({"messages": chat.messages, "text": reply, "tokens": chat.tokens}))
    return 0
