"""Length extrapolation, measured: one small decoder per encoding, trained at 256 bytes, read through its exported `ort` artefact up to 2048.

    python bench/length_study.py train ENCODING FOLDER [--steps N]   weights to FOLDER/ENCODING.safetensors
    python bench/length_study.py evaluate FOLDER [--json FILE]         all weights in FOLDER; scalings of rope from the weights of rope

Evaluation decodes held-out text by chunked prefill through the session, as a deployment would, and gives bits per byte over the last TAIL bytes of each context.
"""

import argparse
import json
import math
import sys
import tempfile
from pathlib import Path
from typing import Any, Dict, List, Sequence

import numpy as np
import torch

from posenc_export.export import export
from posenc_export.models.presets import PRESETS, TRAINED_LENGTH, read, small
from posenc_export.models.stack import Stack
from posenc_export.models.train import corpus, fit, initialise, save
from posenc_export.runtime import load

POSITIONS = 2048
STEPS, BATCH = 1600, 16
CONTEXTS = (256, 512, 1024, 2048)
TAIL = 128  # bytes at the end of each context that count
WINDOWS = 48  # contexts of each length
CHUNK = 256
TRAINED: Dict[str, Dict[str, Any]] = {
    "nope": {"name": "nope"},
    "learned": {"name": "learned"},
    "sinusoidal": {"name": "sinusoidal", "scale": math.sqrt(PRESETS["small-rope"].width)},
    **{name: dict(PRESETS[f"small-{name}"].kinds[0].attention.encodings[0]) for name in ("rope", "alibi", "t5", "fire")},
}
# What the weights of rope are read with, past the length they were trained at.
FACTOR = POSITIONS / TRAINED_LENGTH
SCALED: Dict[str, Dict[str, Any]] = {
    "rope, linear": {"name": "rope_linear", "factor": FACTOR},
    "rope, ntk": {"name": "rope_ntk", "factor": FACTOR},
    "rope, yarn": {"name": "rope_yarn", "factor": FACTOR, "original_max_positions": TRAINED_LENGTH},
    "rope, dynamic": {"name": "rope_dynamic", "factor": FACTOR, "original_max_positions": TRAINED_LENGTH},
}


def train(name: str, folder: Path, steps: int) -> None:
    torch.manual_seed(0)
    data, _ = corpus()
    model = Stack(small(TRAINED[name]))
    initialise(model)
    fit(model, data, lambda step: step / steps, BATCH, 3e-3, lambda line: print(f"{name}: {line}", flush=True))
    folder.mkdir(parents=True, exist_ok=True)
    save(model, folder / f"{name}.safetensors")


def bits(model: Stack, held: np.ndarray) -> Dict[int, float]:
    """Bits per byte of the last TAIL bytes at each context, through the exported artefact."""
    with tempfile.TemporaryDirectory() as temporary:
        export(model, "ort", Path(temporary) / "artefact")
        session = load(Path(temporary) / "artefact", provider="cpu").session()
        return {context: _bits_at(session, held, context) for context in CONTEXTS}


def _bits_at(session: Any, held: np.ndarray, context: int) -> float:
    starts = np.linspace(0, len(held) - POSITIONS - 1, WINDOWS).astype(int) + POSITIONS - context  # contexts of all lengths end at the same bytes
    nats: List[float] = []
    for start in starts:
        window = held[start : start + context + 1].astype(np.int64)
        session.reset()
        logits = session.prefill(window[None, :-1], chunk=min(CHUNK, session.manifest.chunk))[0, -TAIL:].astype(np.float64)
        shifted = logits - logits.max(-1, keepdims=True)
        chosen = shifted[np.arange(TAIL), window[-TAIL:]] - np.log(np.exp(shifted).sum(-1))
        nats.append(-float(chosen.mean()))
    return float(np.mean(nats)) / math.log(2)


def evaluate(folder: Path) -> List[Dict[str, Any]]:
    held = corpus()[1].numpy()
    rows = []
    for label, weights, encoding in [*((n, n, e) for n, e in TRAINED.items()), *((n, "rope", e) for n, e in SCALED.items())]:
        model = Stack(small(encoding))
        read(model, folder / f"{weights}.safetensors")
        found = bits(model.eval(), held)
        rows.append({"encoding": label, "trained": TRAINED_LENGTH, "bits": {str(context): round(value, 3) for context, value in found.items()}})
        print(f"{label:14} " + "  ".join(f"{context}: {value:.3f}" for context, value in found.items()), flush=True)
    return rows


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    training = commands.add_parser("train")
    training.add_argument("name", choices=TRAINED)
    training.add_argument("folder", type=Path)
    training.add_argument("--steps", type=int, default=STEPS)
    evaluating = commands.add_parser("evaluate")
    evaluating.add_argument("folder", type=Path)
    evaluating.add_argument("--json", type=Path)
    options = parser.parse_args(arguments)
    if options.command == "train":
        train(options.name, options.folder, options.steps)
        return 0
    rows = evaluate(options.folder)
    if options.json:
        how = {"steps": STEPS, "batch": BATCH, "tail": TAIL, "windows": WINDOWS, "chunk": CHUNK}
        options.json.write_text(json.dumps({**how, "rows": rows}, indent=1) + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
