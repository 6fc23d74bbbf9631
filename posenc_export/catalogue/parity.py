"""The parity table: worst errors of every encoding on every target, by group of cells of the parity grid.

python -m posenc_export.catalogue.parity [--json docs/parity.json] [--markdown docs/parity.md] [--jobs N]
"""

import argparse
import concurrent.futures
import multiprocessing
import sys
import tempfile
from pathlib import Path
from typing import Any, Dict, List, Sequence, Tuple

from posenc_export.encodings import REGISTRY
from posenc_export.export import TARGETS, Sources, VerificationError, export
from posenc_export.models.config import AnyConfig
from posenc_export.models.presets import seeded
from posenc_export.models.short_forms import block_config, decoder_config, encoder_config
from posenc_export.shared import json_rows

# Parts of the names of cells (runtime/verification/scenarios.py) that belong to a column; a cell may belong to several columns.
COLUMNS: Dict[str, Dict[str, Tuple[str, ...]]] = {
    "decoder": {
        "full": ("past 0,",),
        "chunked": ("chunks of", "past 1,", "past middle,", "cache filled"),
        "decode": ("steps", "past last"),
        "offset": ("start 1000", "start 1064"),
        "padding": ("left padding",),
        "ragged": ("ragged",),
        "rewind": ("rewind", "fork"),
        "guests": ("guests", "come and go"),
        "oracle": ("oracle",),
    },
    "encoder": {
        "full": ("at once",),
        "offset": ("start 1000", "start 1064"),
        "padding": ("padding",),
        "ragged": ("ragged",),
        "segments": ("segments",),
        "oracle": ("oracle",),
    },
}
MAX_POSITIONS = 1100
INTRODUCTIONS = {
    "decoder": "A two-layer decoder (width 48, 6 heads over 3 kv heads of 16, 1100 positions, float32; ort-cuda float16 on the CPU provider).",
    "encoder": "A two-layer post-norm encoder of the same sizes with three segments and bidirectional attention, without a cache: every call is a whole sequence.",
}
# Encodings that cannot be measured in a form, with the reason.
REFUSED = {
    ("complex_order", "encoder"): "its token table is wider than the model; use it in a decoder",
    (
        "integer",
        "encoder",
    ): "LayerNorm subtracts the mean, and with it the digits that x + p keeps in float32",
}


def forms_of(name: str) -> List[str]:
    """The forms of model, "decoder" and "encoder", that an encoding works in."""
    works_in = REGISTRY[name].works_in
    return [
        form
        for form, attention in (("decoder", "causal"), ("encoder", "bidirectional"))
        if attention in works_in
    ]


def config_of(name: str, form: str) -> AnyConfig:
    """Description of a small decoder or encoder with an encoding."""
    block = block_config(
        48,
        6,
        MAX_POSITIONS,
        kv_heads=3,
        head_size=16,
        encoding={"name": name},
        causal=form == "decoder",
    )
    if form == "encoder":
        return encoder_config(61, 2, 40, block, segments=3)
    return decoder_config(61, 2, 40, block, tied=name != "complex_order")


def measured(name: str, form: str) -> List[Dict[str, Any]]:
    """One row per target: {"encoding", "model", "target", "tolerance", column: worst error}, or {"encoding", "model", "target", "refused": reason}."""
    if (name, form) in REFUSED:
        return [
            {"encoding": name, "model": form, "target": target, "refused": REFUSED[name, form]}
            for target in TARGETS
        ]
    sources = Sources(seeded(config_of(name, form)))
    return [
        {"encoding": name, "model": form, "target": target, **_row(sources, form, target)}
        for target in TARGETS
    ]


def _row(sources: Sources, form: str, target: str) -> Dict[str, Any]:
    with tempfile.TemporaryDirectory() as temporary:
        try:
            certificate = export(sources, target, Path(temporary) / "artefact").certificate
        except VerificationError as error:
            certificate = error.certificate
        except ValueError as error:
            return {"refused": str(error)}
    assert certificate is not None
    cells: Dict[str, float] = certificate["cells"]
    columns = {
        column: max(
            (error for cell, error in cells.items() if any(part in cell for part in parts)),
            default=None,
        )
        for column, parts in COLUMNS[form].items()
    }
    return {"tolerance": certificate["tolerance"], **columns}


def table(rows: Sequence[Dict[str, Any]]) -> str:
    """The page with the rows as tables, as Markdown."""
    lines = [
        "# Parity",
        "",
        "Every registered encoding is exported to every target and run through the grid of `posenc_export/runtime/verification/scenarios.py`. Each cell is the worst",
        "error against the eager module, relative to its largest output; `oracle` compares the eager module with the float64 oracle. `offset` is the worst of the cells",
        "that start at position 1000 or 1064, the other columns are the worst over all starts; `guests` are rows of a batch whose other rows come and go.",
        "Written by `python -m posenc_export.catalogue.parity`.",
        "",
    ]
    for form, columns in COLUMNS.items():
        lines += [
            f"## In {'an' if form[0] in 'aeiou' else 'a'} {form}",
            "",
            INTRODUCTIONS[form],
            "",
        ]
        lines += [
            "| encoding | target | " + " | ".join(columns) + " | tolerance | |",
            "|---|---|" + "---|" * (len(columns) + 2),
        ]
        lines += [_line(row, list(columns)) for row in rows if row["model"] == form] + [""]
    return "\n".join(lines)


def _line(row: Dict[str, Any], columns: List[str]) -> str:
    head = f"| {row['encoding']} | {row['target']} | "
    if "refused" in row:
        return head + " | ".join("-" for _ in columns) + f" | - | refused: {row['refused']} |"
    cells = " | ".join("-" if row[column] is None else f"{row[column]:.1e}" for column in columns)
    return head + cells + f" | {row['tolerance']:.1e} | {'passed' if passes(row) else 'FAILED'} |"


def passes(row: Dict[str, Any]) -> bool:
    """Whether every measured column is within the tolerance."""
    return all(
        row[column] is None or row[column] <= row["tolerance"] for column in COLUMNS[row["model"]]
    )


def main(arguments: Sequence[str]) -> int:
    """Measure all encodings and write the files; returns the exit status: 1 if a cell exceeds its tolerance."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--json", type=Path, default=Path("docs/parity.json"))
    parser.add_argument("--markdown", type=Path, default=Path("docs/parity.md"))
    parser.add_argument("--jobs", type=int, default=2)
    options = parser.parse_args(arguments)
    pairs = [(name, form) for name in REGISTRY for form in forms_of(name)]
    rows: List[Dict[str, Any]] = []
    with concurrent.futures.ProcessPoolExecutor(
        options.jobs, mp_context=multiprocessing.get_context("spawn")
    ) as pool:
        for (name, form), of_targets in zip(
            pairs, pool.map(measured, *zip(*pairs, strict=True)), strict=True
        ):
            rows += of_targets
            print(f"{name} in {form}", file=sys.stderr, flush=True)
    json_rows.write(options.json, rows)
    options.markdown.write_text(table(rows), encoding="utf-8")
    return 0 if all("refused" in row or passes(row) for row in rows) else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
