"""`posenc generate`: continue a text with a decoder, with the tokenizer in its folder, or byte by byte."""

import argparse
import json
from pathlib import Path
from typing import Any, List

import numpy as np

from posenc_export.commands.options import add_folder, add_provider
from posenc_export.commands.terminal import note_unverified


def add_arguments(generating: argparse.ArgumentParser) -> None:
    """Add the arguments of `posenc generate`."""
    add_folder(generating, "a decoder's artefact")
    generating.add_argument("--prompt", required=True, help="text to continue; with --encoder, text for the encoder")
    generating.add_argument("--encoder", type=Path, help="folder of the encoder's artefact, for a decoder that reads one")
    generating.add_argument("--max-tokens", type=int, default=64, help="largest number of tokens to add; fewer if the text ends earlier (default: 64)")
    generating.add_argument("--temperature", type=float, default=0.0, help="divisor of the logits before the softmax; 0 for the likeliest token (default: 0)")
    generating.add_argument("--top-k", type=int, default=0, help="sample from this many of the likeliest tokens; 0 for all (default: 0)")
    generating.add_argument("--top-p", type=float, default=1.0, help="sample from the likeliest tokens with this total probability (default: 1)")
    generating.add_argument("--seed", type=int, default=0, help="seed of the sampling (default: 0)")
    add_provider(generating)


def run(options: argparse.Namespace) -> int:
    """Run the command. Returns the exit status 0."""
    from posenc_export.runtime import load
    from posenc_export.runtime.artefact.tokenizer import codec

    if options.max_tokens < 1:
        raise ValueError(f"generate: expected max-tokens of at least 1, got {options.max_tokens}; give --max-tokens N")
    session = load(options.folder, options.provider).session()
    note_unverified(options.say, options.folder, session.manifest)
    text = codec(options.folder, session.manifest)
    prompt = text.encode(options.prompt)
    pieces, shown = text.pieces(prompt), options.prompt.encode("utf-8", "surrogateescape").decode(errors="replace")
    if not prompt:
        raise ValueError("generate: expected a prompt of at least one character, got an empty one; give --prompt TEXT")
    start, encoder_output = np.array(prompt), None
    if options.encoder is not None:
        start, shown, encoder_output = _start(session.manifest), "", _encoder_output(options, prompt)
    tokens: List[int] = []
    parts: List[str] = []
    for token in session.generate([start], options.max_tokens, options.temperature, options.top_k, options.top_p, options.seed, None, encoder_output):
        parts.append(pieces.push(int(token[0])))
        if not options.json:  # the prompt is printed with the first token, so that a refusal prints nothing
            print(("" if tokens else shown) + parts[-1], end="", flush=True)
        elif len(tokens) % 256 == 255:
            options.say(f"{len(tokens) + 1} of {options.max_tokens} tokens")
        tokens.append(int(token[0]))
    options.say.close()
    parts.append(pieces.rest())
    print(json.dumps({"prompt": shown, "text": "".join(parts), "tokens": tokens}) if options.json else parts[-1])
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
