"""Trained decoders with quantized weights and caches on target ort: size, held-out bits per byte, greedy agreement.

Writes bench/results/preset_bits.json and the table of docs/fewer-bits.md.

    python -m bench.preset_bits [--preset tiny-rope] [--format int8] [--windows 400]

Figures of other presets and formats are kept.
"""

import argparse
import json
import math
import tempfile
from pathlib import Path
from typing import Any, Dict, List, Optional, Sequence

import numpy as np

from bench.train import corpus
from posenc_export.export import Sources, export
from posenc_export.models.presets import PRESETS, TRAINED_LENGTH, load_preset
from posenc_export.runtime import load
from posenc_export.shared import json_rows
from posenc_export.shared.numerics import worst_error

RESULTS = Path(__file__).parent / "results" / "preset_bits.json"
ROWS = 50  # windows per batch
PAGE = Path(__file__).parents[1] / "docs" / "fewer-bits.md"
BEGIN, END = "<!-- results -->\n", "<!-- end of results -->"
COLUMNS = (
    "decoder",
    "weights",
    "KB on disk",
    "bits per byte",
    "above float32",
    "agreement",
    "worst error",
)
SAMPLE = 128 * TRAINED_LENGTH  # bytes of the text that was trained on
# Formats of weights and caches, and whether calibration data is used
MEASURED: Dict[str, Dict[str, Any]] = {
    "float32": {},
    "int8": {"weights": "int8"},
    "int4": {"weights": "int4"},
    "int4, calibrated": {"weights": "int4", "calibrate": True},
    "float32, cache int8": {"cache": "int8", "calibrate": True},
}


def windows(count: int) -> np.ndarray:
    """Return held-out text as windows [count,257], the trained length plus the next byte; the same windows as bench.train.bits_per_byte."""
    held = corpus()[1].numpy()
    whole = held[: len(held) // (TRAINED_LENGTH + 1) * (TRAINED_LENGTH + 1)].reshape(
        -1, TRAINED_LENGTH + 1
    )
    return whole[:count].astype(np.int64)


def sample(folder: Path) -> Path:
    """Write calibration text to a file and return its path. It is part of the training text, not of the held-out text."""
    train = corpus()[0].numpy()
    (folder / "sample").write_bytes(train[len(train) // 2 :][:SAMPLE].tobytes())
    return folder / "sample"


def logits_of(folder: Path, rows: np.ndarray) -> List[np.ndarray]:
    """Return the artefact's logits [ROWS,256,V] for each batch of windows."""
    session, made = load(folder).session(batch=ROWS), []
    for first in range(0, len(rows), ROWS):
        session.reset()
        made.append(session.prefill(rows[first : first + ROWS, :-1], chunk=TRAINED_LENGTH))
    return made


def bits(logits: List[np.ndarray], rows: np.ndarray) -> float:
    """Return the mean bits per byte."""
    total = 0.0
    for index, part in enumerate(logits):
        wanted, wide = rows[index * ROWS : (index + 1) * ROWS, 1:, None], part.astype(np.float64)
        largest = wide.max(-1, keepdims=True)
        total += float(
            (
                largest
                + np.log(np.exp(wide - largest).sum(-1, keepdims=True))
                - np.take_along_axis(wide, wanted, -1)
            ).sum()
        )
    return total / (len(rows) * TRAINED_LENGTH) / math.log(2)


def agreement(one: List[np.ndarray], other: List[np.ndarray]) -> float:
    """Return the share of tokens with the same largest logit."""
    return float(np.mean([a.argmax(-1) == b.argmax(-1) for a, b in zip(one, other, strict=True)]))


def measure(name: str, formats: Sequence[str], rows: np.ndarray) -> Dict[str, Any]:
    """Measure a preset in float32 and in the given formats; return the figures by format."""
    sources, found = Sources(load_preset(name)), {}
    plain: List[np.ndarray] = []
    for label in dict.fromkeys(("float32", *formats)):
        given = MEASURED[label]
        with tempfile.TemporaryDirectory() as place:
            how = {**given, "calibrate": sample(Path(place))} if "calibrate" in given else given
            manifest = export(sources, "ort", Path(place) / "made", verify=False, **how)
            logits = logits_of(Path(place) / "made", rows)
        plain = plain or logits
        figures = {
            "bytes": sum(manifest.files[file].bytes for file in ("model.onnx", "model.onnx.data")),
            "bits_per_byte": round(bits(logits, rows), 4),
        }
        figures |= {
            "agreement": round(agreement(logits, plain), 4),
            "worst_error": round(worst_error(np.concatenate(logits), np.concatenate(plain)), 4),
        }
        found[label] = figures
        print(name, label, figures, flush=True)
    return found


def table(presets: Dict[str, Any]) -> str:
    """Return the figures of all presets as a Markdown table."""
    lines = [f"| {' | '.join(COLUMNS)} |", "|---" * len(COLUMNS) + "|"]
    for name, formats in presets.items():
        for weights, found in formats.items():
            cells = [name, weights, f"{found['bytes'] / 1000:.0f}", f"{found['bits_per_byte']:.4f}"]
            if formats["float32"] is not found:
                cells += [
                    f"{found['bits_per_byte'] - formats['float32']['bits_per_byte']:+.4f}",
                    f"{found['agreement']:.1%}",
                ]
                cells.append(f"{found['worst_error']:.3f}")
            lines.append(f"| {' | '.join([*cells, *[''] * (len(COLUMNS) - len(cells))])} |")
    return "\n".join(lines) + "\n"


def main(given: Optional[List[str]] = None) -> None:
    """Measure the presets and write the results."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--preset",
        action="append",
        choices=sorted(PRESETS),
        help="may be given several times (default: all)",
    )
    parser.add_argument(
        "--windows", type=int, default=400, help="number of windows of held-out text (default: 400)"
    )
    parser.add_argument(
        "--format",
        action="append",
        choices=MEASURED,
        help="may be given several times (default: all)",
    )
    options = parser.parse_args(given)
    rows, found = windows(options.windows), committed()
    for name in options.preset or PRESETS:
        figures = {**found.get(name, {}), **measure(name, options.format or list(MEASURED), rows)}
        found[name] = figures
        write(found, len(rows))


def committed() -> Dict[str, Any]:
    """Return the figures of the results file by preset and format."""
    stored: Dict[str, Any] = json.loads(RESULTS.read_text(encoding="utf-8"))["presets"]
    return stored


def write(presets: Dict[str, Any], count: int) -> None:
    """Write the results of `count` windows and the table of the page, in the order of PRESETS and MEASURED."""
    ordered = {
        name: {label: presets[name][label] for label in MEASURED if label in presets[name]}
        for name in PRESETS
        if name in presets
    }
    before, _, rest = PAGE.read_text(encoding="utf-8").partition(BEGIN)
    PAGE.write_text(
        before + BEGIN + table(ordered) + END + rest.partition(END)[2], encoding="utf-8"
    )
    json_rows.write(RESULTS, {"windows": count, "length": TRAINED_LENGTH, "presets": presets})


if __name__ == "__main__":
    main()
