"""Train a preset on the source code of the Python standard library and write its artefact: python
-m bench.train tiny-rope

About one file in twenty, chosen by a hash of its path, is held out, and its bits per byte printed.
"""

import argparse
import hashlib
import math
import sysconfig
import time
from pathlib import Path
from typing import Tuple

import torch
from torch import Tensor

from bench import presets
from posenc_export.models.presets import PRESETS, TRAINED_LENGTH, load_preset
from posenc_export.models.stack import Stack
from posenc_export.shared.preset_folders import SOURCE_TREE

EXCLUDED = {"site-packages", "test", "tests", "idlelib", "lib2to3", "__pycache__"}
EXCLUDED |= {"encodings", "pydoc_data"}
WARM_UP = 100  # steps in which the learning rate rises


def corpus() -> Tuple[Tensor, Tensor]:
    """Return the bytes of the training files and of the held-out files, uint8."""
    top = Path(sysconfig.get_paths()["stdlib"])
    parts: Tuple[list, list] = ([], [])
    for path in sorted(top.rglob("*.py")):
        name = path.relative_to(top)
        if not EXCLUDED & set(name.parts):
            is_held_out = hashlib.sha256(name.as_posix().encode()).digest()[0] % 20 == 0
            parts[is_held_out].append(path.read_bytes())
    train, held_out = (bytearray(b"\0".join(texts)) for texts in parts)
    return torch.frombuffer(train, dtype=torch.uint8), torch.frombuffer(held_out, dtype=torch.uint8)


def loss_of(model: Stack, tokens: Tensor) -> Tensor:
    """Return the mean cross entropy in nats of tokens [B,S+1] int64, each row in one full pass."""
    x, target = tokens[:, :-1], tokens[:, 1:]
    return torch.nn.functional.cross_entropy(model(x).flatten(0, 1), target.flatten())


@torch.no_grad()
def bits_per_byte(model: Stack, held_out: Tensor, limit: int = 400) -> float:
    """Return the bits per byte over the first `limit` windows of TRAINED_LENGTH held-out bytes."""
    size = TRAINED_LENGTH + 1
    rows = held_out[: len(held_out) // size * size].view(-1, size)[:limit].long()
    nats = sum(float(loss_of(model, part)) * len(part) for part in rows.split(50))
    return nats / len(rows) / math.log(2)


def initialise(model: Stack) -> None:
    """Draw projections with standard deviation 0.02, as GPT-2; encodings keep their own."""
    for name, parameter in model.named_parameters():
        if parameter.dim() == 2 and "encoding." not in name:
            torch.nn.init.normal_(parameter, std=0.02)


def fit(model: Stack, data: Tensor, minutes: float, batch: int, rate: float) -> int:
    """Train on batches of random windows of TRAINED_LENGTH of the bytes `data` until the time is
    over, and return the number of steps. The learning rate rises to `rate` in WARM_UP steps, then
    decays as a cosine. Every 200 steps a line is printed.
    """
    optimiser = torch.optim.AdamW(model.parameters(), lr=rate, betas=(0.9, 0.95), weight_decay=0.05)
    step, shown, start, length = 0, 0.0, time.monotonic(), TRAINED_LENGTH
    while (spent := (time.monotonic() - start) / (60 * minutes)) < 1:
        decay = 0.05 + 0.95 * 0.5 * (1 + math.cos(math.pi * spent))  # to a twentieth
        for group in optimiser.param_groups:
            group["lr"] = rate * min(1.0, (step + 1) / WARM_UP) * decay
        starts = torch.randint(len(data) - length - 1, (batch,)).tolist()
        loss = loss_of(model, torch.stack([data[s : s + length + 1] for s in starts]).long())
        optimiser.zero_grad(set_to_none=True)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimiser.step()
        step, shown = step + 1, 0.95 * shown + 0.05 * loss.item() if step else loss.item()
        if step % 200 == 0:
            print(f"{spent:4.0%} step {step} loss {shown / math.log(2):.3f} bits", flush=True)
    return step


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("name", choices=sorted(PRESETS))
    parser.add_argument("--minutes", type=float, default=30.0)
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--rate", type=float, default=2e-3)
    parser.add_argument("--resume", action="store_true", help="continue from the preset's weights")
    options = parser.parse_args()
    if not SOURCE_TREE.is_dir():
        rule = "the source tree, where its artefact is written"
        parser.error(f"expected {rule}, got an installed package; run this in a checkout")
    torch.manual_seed(options.seed)
    train, held_out = corpus()

    print(f"{len(train) / 1e6:.1f} MB to train on, {len(held_out) / 1e6:.2f} MB held out")
    decoder = load_preset(options.name).train() if options.resume else Stack(PRESETS[options.name])
    if not options.resume:
        initialise(decoder)
    steps = fit(decoder, train, options.minutes, options.batch, options.rate)
    presets.write(options.name, decoder.eval(), SOURCE_TREE)
    print(f"{steps} steps, held out {bits_per_byte(decoder, held_out):.3f} bits per byte")
