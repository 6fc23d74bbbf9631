"""Training of small byte-level decoders, for presets and for comparisons of encodings."""

import hashlib
import math
import sysconfig
from pathlib import Path
from typing import Callable

import torch
from torch import Tensor

from posenc_export.models.stack import Stack
from posenc_export.shared.progress import Progress, Steps

EXCLUDED = {"site-packages", "test", "tests", "idlelib", "lib2to3", "__pycache__"}
EXCLUDED |= {"encodings", "pydoc_data"}
HELD_OUT = 20  # one file in so many
WARM_UP = 100  # steps in which the learning rate rises, or a tenth of all if that is less
BATCH = 16


def python_source() -> tuple[Tensor, Tensor]:
    """Return the bytes of the source files of Python's standard library for training, and those
    of one file in HELD_OUT, chosen by a hash of its path, uint8.
    """
    top = Path(sysconfig.get_paths()["stdlib"])
    parts: tuple[list, list] = ([], [])
    for path in sorted(top.rglob("*.py")):
        name = path.relative_to(top)
        if not EXCLUDED & set(name.parts):
            drawn = hashlib.sha256(name.as_posix().encode()).digest()[0]
            parts[drawn % HELD_OUT == 0].append(path.read_bytes())
    train, held_out = (bytearray(b"\0".join(texts)) for texts in parts)
    return torch.frombuffer(train, dtype=torch.uint8), torch.frombuffer(held_out, dtype=torch.uint8)


def initialise(model: Stack) -> None:
    """Draw projections with standard deviation 0.02, as GPT-2; encodings keep their own."""
    for name, parameter in model.named_parameters():
        if parameter.dim() == 2 and "encoding." not in name:
            torch.nn.init.normal_(parameter, std=0.02)


def fit(model: Stack, data: Tensor, steps: int, length: int, rate: float, say: Progress) -> None:
    """Train on BATCH random windows of the bytes `data` in each step. The learning rate rises to
    `rate`, then decays as a cosine to a twentieth.

    Args:
        data: uint8, more than `length` bytes.
        length: tokens of context.
        say: called with lines of progress.
    """
    optimiser = torch.optim.AdamW(model.parameters(), lr=rate, betas=(0.9, 0.95), weight_decay=0.05)
    done, rise = Steps(say, "training", steps, "steps"), min(WARM_UP, steps // 10 + 1)
    for step in range(steps):
        decay = 0.05 + 0.95 * 0.5 * (1 + math.cos(math.pi * step / steps))
        for group in optimiser.param_groups:
            group["lr"] = rate * min(1.0, (step + 1) / rise) * decay
        starts = torch.randint(len(data) - length, (BATCH,)).tolist()
        rows = torch.stack([data[start : start + length + 1] for start in starts]).long()
        loss = losses(model, rows).mean()
        optimiser.zero_grad(set_to_none=True)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimiser.step()
        done.advance()


def losses(model: Callable[[Tensor], Tensor], rows: Tensor) -> Tensor:
    """Return the cross entropy in nats [B,S] of the last S of S + 1 tokens, each after those before
    it. rows: int64 [B,S+1].
    """
    return torch.nn.functional.cross_entropy(
        model(rows[:, :-1]).transpose(1, 2), rows[:, 1:], reduction="none"
    )


@torch.no_grad()
def bits_per_byte(
    model: Stack, text: Tensor, length: int, places: int, last: int, room: int
) -> float:
    """Return the bits per byte of the `last` of `length` + 1 bytes at `places` places of a text,
    spread evenly. The same bytes are predicted for every length up to `room`.

    Args:
        text: uint8, more than `room` bytes.

    Raises:
        ValueError: a text that is too short.
    """
    ends = torch.linspace(room + 1, len(text), places).long().tolist()
    rows = torch.stack([text[end - length - 1 : end] for end in ends]).long()
    parts = [losses(model, part)[:, -last:] for part in rows.split(8)]
    return float(torch.cat(parts).mean()) / math.log(2)
