"""Train a draft model for a decoder: a small one of the same ids, taught what the decoder would choose next on the documentation of Python (pydoc_data.topics).

    python -m bench.draft ARTEFACT OUTPUT [--minutes 15] [--width 192] [--layers 4]

Minutes are processor time of one thread, at most a third of them for the choices of ARTEFACT. A twentieth of the windows is held out, and the share of its choices
that the draft model makes too is printed. Ids that do not occur have embeddings of 0. OUTPUT is an artefact of target ort in int4, without a certificate.
`python -m bench.speculation ARTEFACT --draft OUTPUT` measures what it gains.
"""

import argparse
import math
import pydoc_data.topics
import sys
import time
from pathlib import Path
from typing import Any, Callable, Sequence, Tuple

import numpy as np
import torch
from msgspec.structs import replace
from torch import Tensor

from bench.train import initialise
from posenc_export import block_config, decoder_config
from posenc_export.export import export
from posenc_export.models.stack import Stack
from posenc_export.runtime import load
from posenc_export.runtime.artefact.tokenizer import codec

WINDOW, BATCH, RATE, WARM_UP = 256, 4, 3e-3, 50
LABELS = 1 / 3  # share of the time for the choices of the decoder


def labelled(model: Any, folder: Path, spent: Callable[[], float]) -> Tuple[np.ndarray, np.ndarray]:
    """Return windows of ids [n,WINDOW], and the id that the decoder would choose after each."""
    ids = codec(folder, model.manifest).encode("\n".join(pydoc_data.topics.topics.values()))
    windows = np.array(ids[: len(ids) // WINDOW * WINDOW]).reshape(-1, WINDOW)
    windows = np.random.default_rng(0).permutation(windows)
    session, choices = model.session(capacity=WINDOW), []
    for window in windows:
        if spent() > LABELS:
            break
        session.reset()
        choices.append(session.prefill(window[None])[0].argmax(-1))
    return windows[: len(choices)], np.array(choices)


def fit(model: Stack, x: Tensor, y: Tensor, spent: Callable[[], float]) -> int:
    """Train until `spent` is 1. Return the number of steps."""
    optimiser, step, begun = (
        torch.optim.AdamW(model.parameters(), lr=RATE, betas=(0.9, 0.95), weight_decay=0.05),
        0,
        spent(),
    )
    while (share := (spent() - begun) / (1 - begun)) < 1:
        for group in optimiser.param_groups:
            group["lr"] = (
                RATE
                * min(1.0, (step + 1) / WARM_UP)
                * (0.05 + 0.95 * 0.5 * (1 + math.cos(math.pi * share)))
            )
        some = torch.randint(len(x), (BATCH,))
        loss = torch.nn.functional.cross_entropy(model(x[some]).flatten(0, 1), y[some].flatten())
        optimiser.zero_grad(set_to_none=True)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimiser.step()
        step += 1
        if step % 50 == 0:
            print(f"{share:4.0%} step {step} loss {loss.item():.2f}", flush=True)
    return step


def widened(model: Stack, used: np.ndarray, vocabulary: int) -> Stack:
    """Return the model with all ids, where the ids `used` have the embeddings of a model of these alone."""
    config, weights = model.config, model.state_dict()
    whole = Stack(replace(config, tokens=replace(config.tokens, vocabulary=vocabulary)))
    table = torch.zeros(vocabulary, config.width)
    table[torch.from_numpy(used)] = weights["tokens.embedding.weight"]
    whole.load_state_dict(
        {name: table if len(value) == len(used) else value for name, value in weights.items()}
    )
    return whole.eval()


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("artefact", type=Path)
    parser.add_argument("output", type=Path)
    parser.add_argument("--minutes", type=float, default=15.0)
    parser.add_argument("--width", type=int, default=192)
    parser.add_argument("--layers", type=int, default=4)
    options = parser.parse_args(arguments)
    torch.manual_seed(0)
    torch.set_num_threads(1)
    begun = time.process_time()

    def spent() -> float:
        return (time.process_time() - begun) / (60 * options.minutes)

    teacher = load(options.artefact, "cpu", 1)
    windows, choices = labelled(teacher, options.artefact, spent)
    used = np.unique(np.concatenate((windows.ravel(), choices.ravel())))
    x, y = (torch.from_numpy(np.searchsorted(used, ids)) for ids in (windows, choices))
    held = max(len(x) // 20, 1)
    print(f"{x.numel()} tokens of {len(used)} ids, {held * WINDOW} held out", flush=True)
    block = block_config(
        options.width,
        options.width // 64,
        teacher.manifest.max_positions,
        encoding={"name": "rope"},
    )
    model = Stack(
        decoder_config(len(used), options.layers, 8 * options.width // 3 // 64 * 64, block)
    )
    initialise(model)
    steps = fit(model, x[held:], y[held:], spent)
    with torch.no_grad():
        agreed = float((model(x[:held]).argmax(-1) == y[:held]).float().mean())
    whole = widened(model, used, teacher.manifest.vocabulary)
    print(
        f"{steps} steps, {sum(each.numel() for each in whole.parameters()) / 1e6:.1f} M weights, {agreed:.3f} of the held-out choices",
        flush=True,
    )
    export(whole, "ort", options.output, verify=False, weights="int4")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
