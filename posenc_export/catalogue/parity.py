"""The parity table: worst errors of every encoding on every target, by group of cells of the parity
grid.

python -m posenc_export.catalogue.parity [--json docs/parity.json] [--markdown docs/parity.md]
[--jobs N]
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

# Parts of the names of cells (runtime/verification/scenarios.py) that belong to a column; a cell
# may belong to several columns.
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
PAGE = """# Parity

Every encoding is exported to every target, in a decoder and in an encoder, and run through the parity grid
([reliability](reliability.md)). The table has the largest error of all encodings and calls, as a share of the tolerance,
and the encoding that has it. Numbers up to 1.00 pass.

{table}

`docs/parity.json` has the errors of each encoding, target and kind of call.

Not supported:

{refused}

The decoder has two layers, width 48, 6 heads over 3 kv heads of size 16 and 1100 positions, in float32; `ort-cuda` has
float16 and runs on the CPU provider. The encoder has the same sizes, norms after attention and MLP, three segments and
no cache: every call is a whole sequence. Written by `python -m posenc_export.catalogue.parity`.
"""
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
    """One row per target: {"encoding", "model", "target", "tolerance", column: worst error}, or
    {"encoding", "model", "target", "refused": reason}.
    """
    heads = [{"encoding": name, "model": form, "target": target} for target in TARGETS]
    if (name, form) in REFUSED:
        return [{**head, "refused": REFUSED[name, form]} for head in heads]
    sources = Sources(seeded(config_of(name, form)))
    return [{**head, **_row(sources, form, head["target"])} for head in heads]


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
    row: Dict[str, Any] = {"tolerance": certificate["tolerance"]}
    for column, parts in COLUMNS[form].items():
        errors = [error for cell, error in cells.items() if any(part in cell for part in parts)]
        row[column] = max(errors, default=None)
    return row


def table(rows: Sequence[Dict[str, Any]]) -> str:
    """The summary page as Markdown: the worst encoding of each form and target, and why encodings
    are refused.
    """
    lines = ["| target | in a decoder | in an encoder |", "|---|---|---|"]
    for target in TARGETS:
        worst = [
            max(_share(row) for row in rows if (row["target"], row["model"]) == (target, form))
            for form in COLUMNS
        ]
        cells = " | ".join(f"{share:.2f} (`{name}`)" for share, name in worst)
        lines.append(f"| `{target}` | {cells} |")
    reasons = {row["refused"]: row for row in rows if "refused" in row}.values()
    refused = [f"- `{row['encoding']}` ({row['model']}): {row['refused']}" for row in reasons]
    return PAGE.format(table="\n".join(lines), refused="\n".join(refused))


def _share(row: Dict[str, Any]) -> Tuple[float, str]:
    """The worst error of a row as a share of its tolerance, and its encoding."""
    errors = [row.get(column) or 0.0 for column in COLUMNS[row["model"]]]
    return max(errors) / row.get("tolerance", 1.0), row["encoding"]


def passes(row: Dict[str, Any]) -> bool:
    """Whether every measured column is within the tolerance."""
    return _share(row)[0] <= 1


def main(arguments: Sequence[str]) -> int:
    """Measure all encodings and write the files; returns the exit status: 1 if a cell exceeds
    its tolerance.
    """
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--json", type=Path, default=Path("docs/parity.json"))
    parser.add_argument("--markdown", type=Path, default=Path("docs/parity.md"))
    parser.add_argument("--jobs", type=int, default=2)
    options = parser.parse_args(arguments)
    pairs = [(name, form) for name in REGISTRY for form in forms_of(name)]
    rows: List[Dict[str, Any]] = []
    context = multiprocessing.get_context("spawn")
    with concurrent.futures.ProcessPoolExecutor(options.jobs, mp_context=context) as pool:
        for of_targets in pool.map(measured, *zip(*pairs, strict=True)):
            rows += of_targets
            print("{encoding} in {model}".format(**rows[-1]), file=sys.stderr, flush=True)
    json_rows.write(options.json, rows)
    options.markdown.write_text(table(rows), encoding="utf-8")
    return 0 if all(map(passes, rows)) else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
