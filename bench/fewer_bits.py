"""Trained decoders with weights of few bits, on target ort: size, held-out bits per byte, greedy agreement. Writes bench/results/fewer_bits.json.

    python bench/fewer_bits.py [--preset tiny-rope] [--windows 400]
"""

import argparse
import json
import math
import tempfile
from pathlib import Path
from typing import Any, Dict, List, Optional

import numpy as np

from posenc_export.export import Sources, export
from posenc_export.export.fewer_bits import FORMATS
from posenc_export.models.presets import PRESETS, TRAINED_LENGTH, load_preset
from posenc_export.models.train import corpus
from posenc_export.runtime import load

RESULTS = Path(__file__).parent / "results" / "fewer_bits.json"
ROWS = 50  # windows at a time
ALLOWED = {"int8": 0.01, "int4": 0.03}  # bits per byte above float32


def windows(count: int) -> np.ndarray:
    """Held-out text as windows [count,257] of the trained length and the byte behind it, those of models.train.bits_per_byte."""
    held = corpus()[1].numpy()
    whole = held[: len(held) // (TRAINED_LENGTH + 1) * (TRAINED_LENGTH + 1)].reshape(-1, TRAINED_LENGTH + 1)
    return whole[:count].astype(np.int64)


def logits_of(folder: Path, rows: np.ndarray) -> List[np.ndarray]:
    """Logits [ROWS,256,V] of each group of windows, as the artefact gives them."""
    session, made = load(folder).session(batch=ROWS), []
    for first in range(0, len(rows), ROWS):
        session.reset()
        made.append(session.prefill(rows[first : first + ROWS, :-1], chunk=TRAINED_LENGTH))
    return made


def bits(logits: List[np.ndarray], rows: np.ndarray) -> float:
    """Mean bits per byte."""
    total = 0.0
    for index, part in enumerate(logits):
        wanted, wide = rows[index * ROWS : (index + 1) * ROWS, 1:, None], part.astype(np.float64)
        largest = wide.max(-1, keepdims=True)
        total += float((largest + np.log(np.exp(wide - largest).sum(-1, keepdims=True)) - np.take_along_axis(wide, wanted, -1)).sum())
    return total / (len(rows) * TRAINED_LENGTH) / math.log(2)


def agreement(one: List[np.ndarray], other: List[np.ndarray]) -> float:
    """Share of tokens with the same largest logit."""
    return float(np.mean([a.argmax(-1) == b.argmax(-1) for a, b in zip(one, other, strict=True)]))


def measure(name: str, rows: np.ndarray) -> Dict[str, Any]:
    """Figures of a preset in float32 and in every format, by format."""
    sources, found, plain = Sources(load_preset(name)), {}, []
    for weights in (None, *FORMATS):
        with tempfile.TemporaryDirectory() as place:
            manifest = export(sources, "ort", Path(place) / "made", weights=weights)
            logits = logits_of(Path(place) / "made", rows)
        plain = plain or logits
        assert manifest.certificate is not None
        figures = {"bytes": manifest.files["model.onnx.data"].bytes, "bits_per_byte": round(bits(logits, rows), 4), "agreement": round(agreement(plain, logits), 4)}
        figures |= {"worst_error": max(manifest.certificate["cells"].values()), "tolerance": manifest.certificate["tolerance"]}
        deviation = manifest.weights and manifest.weights.deviation
        found[weights or "float32"] = {**figures, "deviation": deviation.error if deviation else 0.0}
        print(name, weights or "float32", found[weights or "float32"], flush=True)
    return found


def main(given: Optional[List[str]] = None) -> None:
    """Measure the presets and write the results."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--preset", action="append", choices=sorted(PRESETS), help="several times for several (default: all)")
    parser.add_argument("--windows", type=int, default=400, help="of held-out text")
    options = parser.parse_args(given)
    rows = windows(options.windows)
    found = {name: measure(name, rows) for name in options.preset or PRESETS}
    RESULTS.write_text(json.dumps({"windows": len(rows), "length": TRAINED_LENGTH, "presets": found}, indent=1, sort_keys=True) + "\n")


if __name__ == "__main__":
    main()
