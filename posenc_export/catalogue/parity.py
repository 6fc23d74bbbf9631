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
INTRODUCTIONS = {
    "decoder": (
        "A two-layer decoder (width 48, 6 heads over 3 kv heads of 16, 1100 positions, float32; "
        "ort-cuda float16 on the CPU provider)."
    ),
    "encoder": (
        "A two-layer post-norm encoder of the same sizes with three segments and bidirectional "
        "attention, without a cache: every call is a whole sequence."
    ),
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
    """One row per target: {"encoding", "model", "target", "tolerance", column: worst error}, or
    {"encoding", "model", "target", "refused": reason}.
    """
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
    """The summary page as Markdown: one line per encoding, one column per target."""
    lines = [
        "# Parity",
        "",
        "Every registered encoding is exported to every target and run through the parity grid",
        "([reliability](reliability.md)). A number is the worst error of all cells as a "
        "share of the",
        "tolerance, so that 1.00 would just pass. The errors of each kind of call stand on "
        "the page of",
        "the encoding and in `docs/parity.json`.",
        "Written by `python -m posenc_export.catalogue.parity`.",
        "",
    ]
    for form in COLUMNS:
        lines += [
            f"## In {'an' if form[0] in 'aeiou' else 'a'} {form}",
            "",
            INTRODUCTIONS[form],
            "",
            "| encoding | " + " | ".join(TARGETS) + " |",
            "|---|" + "---|" * len(TARGETS),
        ]
        of_form = [row for row in rows if row["model"] == form]
        for name in dict.fromkeys(row["encoding"] for row in of_form):
            shares = {row["target"]: _share(row) for row in of_form if row["encoding"] == name}
            lines.append(f"| {name} | " + " | ".join(shares.get(t, "-") for t in TARGETS) + " |")
        refused = {row["refused"]: row for row in of_form if "refused" in row}.values()
        lines += ["", *(f"{row['encoding']} is refused: {row['refused']}." for row in refused), ""]
    return "\n".join(lines).rstrip() + "\n"


def _share(row: Dict[str, Any]) -> str:
    """Return the worst error of a row as a share of its tolerance."""
    if "refused" in row:
        return "refused"
    errors = [row[column] for column in COLUMNS[row["model"]] if row[column] is not None]
    return f"{max(errors) / row['tolerance']:.2f}"


def passes(row: Dict[str, Any]) -> bool:
    """Whether every measured column is within the tolerance."""
    return all(
        row[column] is None or row[column] <= row["tolerance"] for column in COLUMNS[row["model"]]
    )


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
