"""`posenc generate`: continue a text with a decoder."""

import argparse
import json
from pathlib import Path

import numpy as np

from posenc_export.commands.loading import loaded, model_of
from posenc_export.commands.options import PROVIDER, SAMPLING, SPECULATE, Table, option, sampling_of
from posenc_export.commands.terminal import note, print_text
from posenc_export.runtime.artefact.tokenizer import ByteCodec
from posenc_export.runtime.session.generation import Sampling, check_generates, start_token
from posenc_export.runtime.session.model import MAX_TOKENS, Writer, prompt_ids

OPTIONS: Table = {
    **model_of("a decoder's artefact"),
    "--prompt": option("text to continue; with --encoder, text for the encoder", required=True),
    "--encoder": option(
        "folder of the encoder's artefact, for a decoder that reads one", type=Path
    ),
    "--max-tokens": option(
        "largest number of tokens to add; fewer if the text ends earlier", MAX_TOKENS, least=1
    ),
    **SAMPLING,
    **SPECULATE,
    **PROVIDER,
}


def run(options: argparse.Namespace) -> int:
    """Print the continuation of a prompt. Returns the exit status 0."""
    model = reader = loaded(options, options.folder, check_generates)
    session = model.session()
    if options.encoder is not None:
        start_token(session.manifest)
        reader = loaded(options, options.encoder)
    prompt = prompt_ids(model.tokenizer, options.prompt, reader.manifest.max_positions)
    if model.manifest.kind == "module" and isinstance(model.tokenizer, ByteCodec):
        note(f"{options.folder} has no tokenizer; its 256 token ids are read as the bytes of UTF-8")
    shown, beside = "", None
    if reader is model:
        shown = options.prompt.encode("utf-8", "surrogateescape").decode(errors="replace")
    else:
        beside, prompt = reader.session().prefill(np.array([prompt])), []
    writer = Writer(session, model.tokenizer)
    parts: list[str] = []
    sampling = Sampling(*sampling_of(options), options.max_tokens)
    for piece in writer.write(prompt, sampling, options.speculate, beside):
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
