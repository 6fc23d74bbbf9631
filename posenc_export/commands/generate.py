"""`posenc generate`: continue a text with a decoder, or transcribe what an encoder reads."""

import argparse
import json
from pathlib import Path
from typing import Any, List, Tuple

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
from posenc_export.runtime.session import saved
from posenc_export.runtime.session.generation import First, Sampling, check_generates, start_token
from posenc_export.runtime.session.text import MAX_TOKENS, Conversation, Writer, prompt_ids
from posenc_export.shared.refusal import refusal

OPTIONS: Table = {
    **model_of("a decoder's artefact"),
    "--prompt": dict(
        action="append", default=[], help="text to continue; with --encoder, text for the encoder"
    ),
    "--encoder": option(
        "folder of the encoder's artefact, for a decoder that reads one", type=Path
    ),
    "--features": option(
        "in place of --prompt, features for the encoder, such as the spectrogram of Whisper: "
        ".npy with float32 [channels,frames] or [1,channels,frames]",
        type=Path,
        metavar="FILE",
    ),
    "--language": option(
        "language of the speech for Whisper, such as en (default: that of the checkpoint, or the "
        "one that the model detects)"
    ),
    "--task": option("transcribe or translate, for Whisper (default: that of the checkpoint)"),
    "--max-tokens": option(
        "largest number of tokens to add; fewer if the text ends earlier", MAX_TOKENS
    ),
    "--endless": option(
        "keep at most N tokens in the cache, and read the last N / 2 again when it is full, so "
        "that a text is not limited by the range of positions",
        type=int,
        metavar="N",
    ),
    "--chat": option(
        "answer the prompt as a message, by the chat template of the model; several --prompt are "
        "several turns",
        action="store_true",
    ),
    "--system": option("text of the system message, with --chat"),
    **TEMPLATE,
    "--cache": option(
        "keep what was read in FILE, so that a text that begins alike is not read again",
        type=Path,
        metavar="FILE",
    ),
    **SAMPLING,
    **SPECULATE,
    **PROVIDER,
}


def run(options: argparse.Namespace) -> int:
    _check(options)
    model = loaded(options, options.folder, check_generates)
    session, held = _opened(options, model)
    if options.chat:
        return _converse(options, model, session, held)
    return _continue(options, model, session, held)


def _check(options: argparse.Namespace) -> None:
    encoder, sources = options.encoder is not None, bool(options.prompt) + bool(options.features)
    of_encoder = bool(options.features or options.language or options.task)
    several = options.system is not None or len(options.prompt) > 1
    got = "--system" if options.system is not None else f"{len(options.prompt)} prompts"
    most = options.max_tokens
    rules = {
        f"max-tokens of at least 1, got {most}; give --max-tokens N": most >= 1,
        f"--prompt or --features, got {'both' if sources else 'neither'}; give one": sources == 1,
        "--encoder with --features, --language or --task, got none; give the folder of the "
        "encoder's artefact": encoder or not of_encoder,
        "--cache or --encoder, got both; leave one out": not encoder or options.cache is None,
        "--chat or --encoder, got both; leave one out": not encoder or not options.chat,
        "--chat with --chat-template-kwargs, got none; give it": options.chat
        or options.chat_template_kwargs is None,
        "--endless without --chat and --cache, got both; leave one out": options.endless is None
        or (options.cache is None and not options.chat),
        f"one prompt and no system message without --chat, got {got}; give --chat": options.chat
        or not several,
    }
    for rule, holds in rules.items():
        if not holds:
            raise ValueError(f"generate: expected {rule}")


def _continue(options: argparse.Namespace, model: Any, session: Any, held: List[int]) -> int:
    """Print the continuation of a prompt, or the text of features. held: ids in the session."""
    begin = "" if options.features else options.prompt[0]
    prompt = [] if options.features else prompt_ids(model.tokenizer, begin)
    shown, source = "", First([prompt], endless=options.endless is not None)
    if options.encoder is None:
        shown = begin.encode("utf-8", "surrogateescape").decode(errors="replace")
    else:
        start_token(session.manifest)
        output = _encoder_output(options, prompt)
        source = First(None, output, options.language, options.task)
    writer = Writer(session, model.tokenizer, held)
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
    if options.cache is not None:
        session.save(options.cache, [writer.held])
    if options.json:
        print(json.dumps({"prompt": shown, "text": "".join(parts), "tokens": writer.tokens}))
    else:
        print()
    return 0


def _opened(options: argparse.Namespace, model: Any) -> Tuple[Any, List[int]]:
    """Return a session, and the ids in its cache. Raise ValueError as Model.restore does."""
    cache = options.cache
    if cache is None or not cache.exists():
        return model.session(capacity=options.endless), []
    rows = saved.tokens(cache, model.manifest)
    if rows is None or len(rows) != 1:
        got = "no ids" if rows is None else f"{len(rows)} rows"
        rule = "a session of one row with its ids"
        raise refusal(f"restore {cache}", rule, got, "give another file")
    return model.restore(cache), rows[0].tolist()


def _converse(options: argparse.Namespace, model: Any, session: Any, held: List[int]) -> int:
    codec = needed_chat_codec(model.folder, model.manifest, template_values(options))
    chat = Conversation(session, codec, options.system, None, options.speculate, held)
    for prompt in options.prompt:
        for piece in chat.reply(prompt, options.max_tokens, *sampling_of(options)):
            if not options.json:
                print_text(piece)
        if not options.json:
            print()
    if options.cache is not None:
        session.save(options.cache, [chat.held])
    if options.json:
        reply = chat.messages[-1]["content"]
        print(json.dumps({"messages": chat.messages, "text": reply, "tokens": chat.tokens}))
    return 0


def _encoder_output(options: argparse.Namespace, prompt: List[int]) -> np.ndarray:
    """Output of the encoder, [1,Q,N]. Raise ValueError for a source that it does not read."""
    encoder = loaded(options, options.encoder).session()
    source = encoder.manifest.inputs[0]
    if bool(encoder.manifest.vocabulary) == bool(options.features):
        got, remedy = ("--features", "--prompt") if options.features else ("--prompt", "--features")
        rule = f"the source that the encoder takes, {source.name}"
        raise refusal("generate", rule, got, f"give {remedy}")
    if options.features:
        return encoder.prefill(_read_features(options.features, int(source.axes[-1])))
    return encoder.prefill(np.array([prompt]))


def _read_features(path: Path, size: int) -> np.ndarray:
    """Return two frames of features for each token, [1,frames / 2,size]. size: 2 * channels."""
    try:
        features = np.load(path, allow_pickle=False)
    except (OSError, ValueError) as error:
        rule = f"{path.name} to be an array in .npy"
        raise refusal("generate", rule, f"an error ({error})", "write it with numpy.save") from None
    if features.ndim == 3 and len(features) == 1:
        features = features[0]
    fits = features.ndim == 2 and features.shape[0] * 2 == size and features.shape[1] % 2 == 0
    if features.dtype != np.float32 or not fits:
        raise ValueError(
            f"generate: expected features float32 [{size // 2},frames] with an even number of "
            f"frames, got {features.dtype} {list(features.shape)}; use the feature extractor of "
            "the checkpoint"
        )
    return np.ascontiguousarray(features.T).reshape(1, -1, size)
