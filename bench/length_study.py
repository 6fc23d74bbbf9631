"""Measure length extrapolation: one small decoder per encoding, trained at 256 bytes and evaluated
up to 2048 bytes through its `ort` artefact.

    python -m bench.length_study train ENCODING FOLDER [--steps N]    train a decoder; weights to
    FOLDER/ENCODING.safetensors python -m bench.length_study tune SCALING FOLDER [--steps N]
    fine-tune the decoder of rope at 2048; weights to FOLDER/SCALING-tuned.safetensors python -m
    bench.length_study evaluate FOLDER [--json FILE]        evaluate every row of the table whose
    weights exist

Weights that are missing in FOLDER are taken from the package. Rows without weights keep the figures
that FILE already has. Evaluation reads held-out text by chunked prefill through a session, and
reports bits per byte over the last TAIL bytes of each context.
"""

import argparse
import json
import math
import platform
import sys
import tempfile
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any, Dict, Iterator, List, Mapping, Optional, Sequence, Tuple

import numpy as np
import torch
from safetensors.torch import load_file

from bench.train import corpus, fit, initialise, save
from posenc_export.export import export
from posenc_export.models import presets
from posenc_export.models.presets import PRESETS, TRAINED_LENGTH, copy_weights, small
from posenc_export.models.stack import Stack
from posenc_export.runtime import load
from posenc_export.shared import json_rows

POSITIONS = 2048
SEED = 0
STEPS, BATCH, RATE = 1600, 16, 3e-3
# Chen et al. 2023 (positional interpolation) fine-tune for up to 1000 steps, Peng et al. 2024
# (YaRN) for 400, both at a much lower rate than in training.
TUNING_STEPS, TUNING_BATCH, TUNING_RATE, TUNING_WARM_UP = 100, 1, 5e-4, 10
CONTEXTS = (256, 288, 320, 384, 512, 768, 1024, 2048)
TAIL = 128  # evaluated bytes, at the end of each context
WINDOWS = 48  # contexts of each length
CHUNK = 256
TRAINED: Dict[str, Dict[str, Any]] = {
    "nope": {"name": "nope"},
    "learned": {"name": "learned"},
    "sinusoidal": {"name": "sinusoidal", "scale": math.sqrt(PRESETS["small-rope"].width)},
    **{
        name: dict(PRESETS[f"small-{name}"].kinds[0].attention.encodings[0])
        for name in ("rope", "alibi", "t5", "fire")
    },
}
# Encodings with which the weights trained with rope are evaluated beyond the trained length.
FACTOR = POSITIONS / TRAINED_LENGTH
SCALED: Dict[str, Dict[str, Any]] = {
    "linear": {"name": "rope_linear", "factor": FACTOR},
    "ntk": {"name": "rope_ntk", "factor": FACTOR},
    "yarn": {"name": "rope_yarn", "factor": FACTOR, "original_max_positions": TRAINED_LENGTH},
    "dynamic": {"name": "rope_dynamic", "factor": FACTOR, "original_max_positions": TRAINED_LENGTH},
}
# Encodings of the fine-tuned decoders; unscaled rope is the baseline for the three scalings.
TUNED: Dict[str, Dict[str, Any]] = {
    "unscaled": {"name": "rope"},
    **{name: SCALED[name] for name in ("linear", "ntk", "yarn")},
}


@dataclass(frozen=True)
class Row:
    """A row of the table.

    Args:
        label: name of the row.
        scaling: scaling of rope in evaluation; empty for the encoding of training.
        weights: file name of the weights without suffix.
        encoding: encoding in evaluation.
        tuned: whether the weights were fine-tuned at POSITIONS.
    """

    label: str
    scaling: str
    weights: str
    encoding: Mapping[str, Any]
    tuned: bool = False

    def line(self, bits: Mapping[str, float]) -> Dict[str, Any]:
        """Return the row in the form of the JSON file."""
        return {
            "encoding": self.label,
            "scaling": self.scaling,
            "tuned": self.tuned,
            "bits": dict(bits),
        }


def rows() -> Iterator[Row]:
    for name, encoding in TRAINED.items():
        yield Row(name, "", name, encoding)
    for name, encoding in SCALED.items():
        yield Row(f"rope, {name}", name, "rope", encoding)
    for name, encoding in TUNED.items():
        yield Row(f"rope, {name}, tuned", name, f"{name}-tuned", encoding, tuned=True)


def weights_of(name: str, folder: Path) -> Optional[Mapping[str, torch.Tensor]]:
    """Return the weights in `folder`, or those of the package if there are none; None if neither
    exists.
    """
    own = folder / f"{name}.safetensors"
    return load_file(own) if own.exists() else presets.weights_of(f"small-{name}")


def train(name: str, folder: Path, steps: int) -> None:
    torch.manual_seed(SEED)
    model = Stack(small(TRAINED[name]))
    initialise(model)
    fit(
        model,
        corpus()[0],
        lambda step: step / steps,
        BATCH,
        RATE,
        lambda line: print(f"{name}: {line}", flush=True),
    )
    folder.mkdir(parents=True, exist_ok=True)
    save(model, folder / f"{name}.safetensors")


def tune(name: str, folder: Path, steps: int) -> None:
    """Fine-tune the decoder of rope with a scaled rotation, at the length that the scaling
    extends to.
    """
    torch.manual_seed(SEED)
    model, trained = Stack(small(TUNED[name])), weights_of("rope", folder)
    assert trained is not None, (
        "length_study: expected the weights of rope, got none; train rope first, or install "
        "posenc-export-presets"
    )
    copy_weights(model, trained, "rope")

    def say(line: str) -> None:
        print(f"{name}: {line}", flush=True)

    fit(
        model,
        corpus()[0],
        lambda step: step / steps,
        TUNING_BATCH,
        TUNING_RATE,
        say,
        POSITIONS - 1,
        TUNING_WARM_UP,
    )
    folder.mkdir(parents=True, exist_ok=True)
    save(model, folder / f"{name}-tuned.safetensors")


def bits(model: Stack, held: np.ndarray) -> Dict[int, float]:
    """Return the bits per byte of the last TAIL bytes for each context, computed by the exported
    artefact.
    """
    with tempfile.TemporaryDirectory() as temporary:
        export(model, "ort", Path(temporary) / "artefact")
        session = load(Path(temporary) / "artefact", provider="cpu").session()
        return {context: _bits_at(session, held, context) for context in CONTEXTS}


def _bits_at(session: Any, held: np.ndarray, context: int) -> float:
    starts = (
        np.linspace(0, len(held) - POSITIONS - 1, WINDOWS).astype(int) + POSITIONS - context
    )  # contexts of all lengths end at the same bytes of the text
    nats: List[float] = []
    for start in starts:
        window = held[start : start + context + 1].astype(np.int64)
        session.reset()
        logits = session.prefill(window[None, :-1], chunk=min(CHUNK, session.manifest.chunk))[
            0, -TAIL:
        ].astype(np.float64)
        shifted = logits - logits.max(-1, keepdims=True)
        chosen = shifted[np.arange(TAIL), window[-TAIL:]] - np.log(np.exp(shifted).sum(-1))
        nats.append(-float(chosen.mean()))
    return float(np.mean(nats)) / math.log(2)


def evaluate(folder: Path, earlier: Mapping[str, Dict[str, Any]]) -> List[Dict[str, Any]]:
    """Return the rows of the table: evaluated if their weights exist, otherwise those of
    `earlier`, which holds rows by label.
    """
    held, found = corpus()[1].numpy(), []
    for row in rows():
        weights = weights_of(row.weights, folder)
        if weights is not None:
            model = Stack(small(row.encoding))
            copy_weights(model, weights, row.weights)
            measured = bits(model.eval(), held)
            found.append(
                row.line({str(context): round(value, 3) for context, value in measured.items()})
            )
            print(
                f"{row.label:22} "
                + "  ".join(f"{context}: {value:.3f}" for context, value in measured.items()),
                flush=True,
            )
        elif row.label in earlier:
            found.append(row.line(earlier[row.label]["bits"]))
    return found


def conditions() -> Dict[str, Any]:
    """Return library versions and settings of training and evaluation."""
    versions = {
        "python": platform.python_version(),
        **{name: metadata.version(name) for name in ("torch", "onnxruntime", "numpy")},
    }
    training = {
        "length": TRAINED_LENGTH,
        "steps": STEPS,
        "batch": BATCH,
        "rate": RATE,
        "seed": SEED,
    }
    tuning = {
        "length": POSITIONS - 1,
        "steps": TUNING_STEPS,
        "batch": TUNING_BATCH,
        "rate": TUNING_RATE,
        "warm_up": TUNING_WARM_UP,
        "seed": SEED,
    }
    return {
        "versions": versions,
        "training": training,
        "tuning": tuning,
        "factor": FACTOR,
        "tail": TAIL,
        "windows": WINDOWS,
        "chunk": CHUNK,
    }


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    commands = parser.add_subparsers(dest="command", required=True)
    actions: Tuple[Tuple[str, Any, Mapping[str, Any], int], ...] = (
        ("train", train, TRAINED, STEPS),
        ("tune", tune, TUNED, TUNING_STEPS),
    )
    for command, action, names, steps in actions:
        training = commands.add_parser(command)
        training.add_argument("name", choices=names)
        training.add_argument("folder", type=Path)
        training.add_argument("--steps", type=int, default=steps)
        training.set_defaults(action=action)
    evaluating = commands.add_parser("evaluate")
    evaluating.add_argument("folder", type=Path)
    evaluating.add_argument("--json", type=Path)
    options = parser.parse_args(arguments)
    if options.command != "evaluate":
        options.action(options.name, options.folder, options.steps)
        return 0
    earlier = (
        json.loads(options.json.read_text(encoding="utf-8"))["rows"]
        if options.json and options.json.exists()
        else []
    )
    found = evaluate(options.folder, {row["encoding"]: row for row in earlier})
    if options.json:
        json_rows.write(options.json, {**conditions(), "rows": found})
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
