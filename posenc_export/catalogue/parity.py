"""The parity table: every encoding on every target through the whole grid, worst error by the way a sequence is cut.

    python -m posenc_export.catalogue.parity [--json docs/parity.json] [--markdown docs/parity.md] [--jobs N]
"""

import argparse
import concurrent.futures
import json
import multiprocessing
import sys
import tempfile
from pathlib import Path
from typing import Any, Dict, List, Sequence, Tuple

from posenc_export.encodings import REGISTRY

# Which cells of a certificate (export/scenarios.py) belong to a column; a cell may belong to several.
COLUMNS: Dict[str, Tuple[str, ...]] = {
    "full": ("past 0,",),
    "chunked": ("chunks of", "past 1,", "past middle,", "cache filled"),
    "decode": ("steps", "past last"),
    "padding": ("left padding",),
    "ragged": ("ragged",),
    "rewind": ("rewind", "fork"),
    "oracle": ("oracle",),
}
MAX_POSITIONS = 1100


def measured(name: str, target: str) -> Dict[str, Any]:
    """{"encoding", "target", "tolerance", column: worst error} of a two-layer decoder, or {"encoding", "target", "refused": reason}."""
    from posenc_export.export import VerificationError, export
    from posenc_export.models.config import AttentionConfig, DecoderConfig
    from posenc_export.models.presets import seeded

    attention = AttentionConfig(48, 6, MAX_POSITIONS, kv_heads=3, head_size=16, encoding={"name": name})
    where = {"encoding": name, "target": target}
    with tempfile.TemporaryDirectory() as temporary:
        try:
            certificate = export(seeded(DecoderConfig(61, 2, 40, attention, tied=name != "complex_order")), target, Path(temporary) / "artefact").certificate
        except VerificationError as error:
            certificate = error.certificate
        except ValueError as error:
            return {**where, "refused": str(error)}
    assert certificate is not None
    cells: Dict[str, float] = certificate["cells"]
    columns = {column: max(error for cell, error in cells.items() if any(part in cell for part in parts)) for column, parts in COLUMNS.items()}
    columns["offset"] = max(error for cell, error in cells.items() if "start 0" not in cell)
    return {**where, "tolerance": certificate["tolerance"], **columns}


def _both(pair: Tuple[str, str]) -> Dict[str, Any]:
    return measured(*pair)


def table(rows: Sequence[Dict[str, Any]]) -> str:
    """The rows as a page of Markdown."""
    columns = [*COLUMNS, "offset"]
    columns.insert(columns.index("padding"), columns.pop())
    lines = [
        "# Parity",
        "",
        "Every registered encoding on every target: a two-layer decoder (width 48, 6 heads over 3 kv heads of 16, 1100 positions, float32; ort-cuda float16 on the",
        "CPU provider), exported and driven through the grid of `posenc_export/export/scenarios.py`. Each cell is the worst error against the eager module,",
        "relative to its largest output; `oracle` is the eager module against the float64 oracle. `offset` is the worst of the cells that start at position",
        "1000 or 1064, the others are the worst over all starts.",
        "Written by `python -m posenc_export.catalogue.parity`.",
        "",
        "| encoding | target | " + " | ".join(columns) + " | tolerance | |",
        "|---|---|" + "---|" * (len(columns) + 2),
    ]
    for row in rows:
        head = f"| {row['encoding']} | {row['target']} | "
        if "refused" in row:
            lines.append(head + " | ".join("-" for _ in columns) + f" | - | refused: {row['refused']} |")
            continue
        passed = all(row[column] <= row["tolerance"] for column in columns)
        lines.append(head + " | ".join(f"{row[column]:.1e}" for column in columns) + f" | {row['tolerance']:.1e} | {'passed' if passed else 'FAILED'} |")
    return "\n".join(lines) + "\n"


def main(arguments: Sequence[str]) -> int:
    from posenc_export.export import TARGETS

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, default=Path("docs/parity.json"))
    parser.add_argument("--markdown", type=Path, default=Path("docs/parity.md"))
    parser.add_argument("--jobs", type=int, default=2)
    options = parser.parse_args(arguments)
    pairs = [(name, target) for name in REGISTRY for target in TARGETS]
    rows: List[Dict[str, Any]] = []
    with concurrent.futures.ProcessPoolExecutor(options.jobs, mp_context=multiprocessing.get_context("spawn")) as pool:
        for row in pool.map(_both, pairs):
            rows.append(row)
            print(f"{len(rows)} of {len(pairs)}: {row['encoding']} on {row['target']}", file=sys.stderr, flush=True)
    options.json.write_text(json.dumps(rows, indent=1) + "\n", encoding="utf-8")
    options.markdown.write_text(table(rows), encoding="utf-8")
    worst = [row for row in rows if "refused" not in row and any(row[column] > row["tolerance"] for column in (*COLUMNS, "offset"))]
    return 1 if worst else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
