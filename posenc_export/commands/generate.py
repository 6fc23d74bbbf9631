"""`posenc generate`: continue a text with a decoder, with the tokenizer in its folder, or byte by byte."""

import argparse
import json
from pathlib import Path
from typing import Any, List, Optional, Tuple

import numpy as np

from posenc_export.commands.options import add_folder, add_provider, add_sampling, add_speculate, drafting
from posenc_export.commands.terminal import note_unverified


def add_arguments(generating: argparse.ArgumentParser) -> None:
    """Add the arguments of `posenc generate`."""
    add_folder(generating, "a decoder's artefact")
    generating.add_argument("--prompt", required=True, action="append", help="text to continue; with --encoder, text for the encoder")
    generating.add_argument("--encoder", type=Path, help="folder of the encoder's artefact, for a decoder that reads one")
    generating.add_argument("--max-tokens", type=int, default=64, help="largest number of tokens to add; fewer if the text ends earlier (default: 64)")
    generating.add_argument("--chat", action="store_true", help="answer the prompt as a message, by the chat template of the model; several --prompt are several turns")
    generating.add_argument("--system", help="text of the system message, with --chat")
    add_sampling(generating)
    add_speculate(generating)
    generating.add_argument("--cache", type=Path, metavar="FILE", help="keep what was read in FILE, so that a text that begins alike is not read again")
    add_provider(generating)


def run(options: argparse.Namespace) -> int:
    """Run the command. Returns the exit status 0."""
    from posenc_export.runtime import load
    from posenc_export.runtime.artefact.tokenizer import codec
    from posenc_export.runtime.session.chat import keep

    if options.max_tokens < 1:
        raise ValueError(f"generate: expected max-tokens of at least 1, got {options.max_tokens}; give --max-tokens N")
    _check_chat(options)
    session, held = _opened(load(options.folder, options.provider), options.cache)
    note_unverified(options.say, options.folder, session.manifest)
    if options.chat:
        return _converse(options, session, held)
    text = codec(options.folder, session.manifest)
    prompt = text.encode(options.prompt[0])
    pieces, shown = text.pieces(prompt), options.prompt[0].encode("utf-8", "surrogateescape").decode(errors="replace")
    if not prompt:
        raise ValueError("generate: expected a prompt of at least one character, got an empty one; give --prompt TEXT")
    kept = keep(session, held, prompt) if held else 0
    start, encoder_output = np.array(prompt[kept:]), None
    if options.encoder is not None:
        start, shown, encoder_output = _start(session.manifest), "", _encoder_output(options, prompt)
    tokens: List[int] = []
    parts: List[str] = []
    sampling = (options.temperature, options.top_k, options.top_p, options.seed)
    for token in session.generate([start], options.max_tokens, *sampling, None, encoder_output, drafting(options), [prompt[:kept]]):
        parts.append(pieces.push(int(token[0])))
        if not options.json:  # the prompt is printed with the first token, so that a refusal prints nothing
            print(("" if tokens else shown) + parts[-1], end="", flush=True)
        elif len(tokens) % 256 == 255:
            options.say(f"{len(tokens) + 1} of {options.max_tokens} tokens")
        tokens.append(int(token[0]))
    options.say.close()
    if options.cache is not None:
        session.save(options.cache, [[*prompt, *tokens][: int(session.length[0])]])
    parts.append(pieces.rest())
    print(json.dumps({"prompt": shown, "text": "".join(parts), "tokens": tokens}) if options.json else parts[-1])
    return 0


def _opened(model: Any, cache: Optional[Path]) -> Tuple[Any, List[int]]:
    """Return a session, and the ids in its cache: those of the file `cache` if there is one. Raise ValueError as Model.restore does."""
    from posenc_export.runtime.session import saved

    if cache is None or not cache.exists():
        return model.session(), []
    rows = saved.tokens(cache, model.manifest.digest)
    if rows is None or len(rows) != 1:
        raise ValueError(f"restore {cache}: expected a session of one row with its ids, got {'no ids' if rows is None else f'{len(rows)} rows'}; give another file")
    return model.restore(cache), rows[0].tolist()


def _check_chat(options: argparse.Namespace) -> None:
    """Raise ValueError for options that need --chat, or do not go with it."""
    if options.cache is not None and options.encoder is not None:
        raise ValueError("generate: expected --cache or --encoder, got both; leave one out")
    if options.chat and options.encoder is not None:
        raise ValueError("generate: expected --chat or --encoder, got both; leave one out")
    if not options.chat and (options.system is not None or len(options.prompt) > 1):
        got = "--system" if options.system is not None else f"{len(options.prompt)} prompts"
        raise ValueError(f"generate: expected one prompt and no system message without --chat, got {got}; give --chat")


def _converse(options: argparse.Namespace, session: Any, held: List[int]) -> int:
    """Print a reply to each prompt."""
    from posenc_export.runtime.artefact.chat_template import needed_chat_codec
    from posenc_export.runtime.session.chat import Chat

    chat = Chat(session, needed_chat_codec(options.folder, session.manifest), options.system, None, drafting(options), held)
    for prompt in options.prompt:
        for piece in chat.reply(prompt, options.max_tokens, options.temperature, options.top_k, options.top_p, options.seed):
            if not options.json:
                print(piece, end="", flush=True)
        if not options.json:
            print()
    if options.cache is not None:
        session.save(options.cache, [chat.held])
    if options.json:
        print(json.dumps({"messages": chat.messages, "text": chat.messages[-1]["content"], "tokens": chat.tokens}))
    return 0


def _start(manifest: Any) -> np.ndarray:
    """The start tokens [n] of a decoder that reads an encoder.

    Raises:
        ValueError: a decoder that reads no encoder, or an artefact without start_ids.
    """
    if not manifest.encoder or not manifest.start_ids:
        other = "one that reads none" if not manifest.encoder else "one without start_ids"
        raise ValueError(f"generate: expected a decoder that reads an encoder and has start_ids, got {other}; leave --encoder out, or use posenc_export.load")
    return np.array(manifest.start_ids)


def _encoder_output(options: argparse.Namespace, prompt: List[int]) -> np.ndarray:
    """Output of the encoder for the prompt, [1,Q,N].

    Raises:
        ValueError: an encoder that reads no token ids.
    """
    from posenc_export.runtime import load

    encoder = load(options.encoder, options.provider).session()
    note_unverified(options.say, options.encoder, encoder.manifest)
    if not encoder.manifest.vocabulary:
        taken = encoder.manifest.inputs[0].name
        raise ValueError(f"generate: expected an encoder that takes token ids, got one that takes {taken}; use posenc_export.load")
    return encoder.prefill(np.array([prompt]))
