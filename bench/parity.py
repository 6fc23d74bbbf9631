"""The parity table: worst errors of every encoding on every target, by group of cells of the parity
grid.

python -m bench.parity
"""

import concurrent.futures
import multiprocessing
import sys
import tempfile
from pathlib import Path
from typing import Any, Sequence

from bench import json_rows
from bench.marked import markdown, text
from posenc_export.encodings import REGISTRY
from posenc_export.export import TARGETS, Sources, VerificationError, export
from posenc_export.models.config import AnyConfig
from posenc_export.models.presets import seeded
from posenc_export.models.short_forms import block_config, decoder_config, encoder_config

# Parts of the names of cells (runtime/verification/scenarios.py) that belong to a column; a cell
# may belong to several columns.
COLUMNS: dict[str, dict[str, tuple[str, ...]]] = {
    "decoder": {
        "full": ("at once",),
        "chunked": ("chunks of", "past middle,", "cache filled"),
        "decode": ("steps",),
        "offset": ("starts 0, 1000, 1064",),
        "padding": ("left padding",),
        "ragged": ("ragged",),
        "rewind": ("rewind", "fork"),
        "guests": ("come and go",),
        "oracle": ("oracle",),
    },
    "encoder": {
        "full": ("at once",),
        "offset": ("starts 0, 1000, 1064",),
        "padding": ("padding",),
        "ragged": ("ragged",),
        "oracle": ("oracle",),
    },
}
MAX_POSITIONS = 1100
# Encodings that cannot be measured in a form, with the reason.
REFUSED = {
    ("complex_order", "encoder"): "its token table is wider than the model; use it in a decoder",
    ("integer", "encoder"): "LayerNorm subtracts the mean, and with it the digits that x + p keeps "
    "in float32",
}


def config_of(name: str, form: str) -> AnyConfig:
    """Description of a small decoder or encoder with an encoding."""
    how: dict[str, Any] = {"encoding": {"name": name}, "causal": form == "decoder"}
    block = block_config(48, 6, MAX_POSITIONS, kv_heads=3, head_size=16, **how)
    if form == "encoder":
        return encoder_config(61, 2, 40, block)
    return decoder_config(61, 2, 40, block, tied=name != "complex_order")


def measured(name: str, form: str) -> list[dict[str, Any]]:
    """One row per target: {"encoding", "model", "target", "tolerance", column: worst error}, or
    {"encoding", "model", "target", "refused": reason}.
    """
    refused, rows = REFUSED.get((name, form)), []
    sources = None if refused else Sources(seeded(config_of(name, form)))
    for target in TARGETS:
        row = _measured(sources, form, target) if sources else {"refused": refused}
        rows.append({"encoding": name, "model": form, "target": target, **row})
    return rows


def _measured(sources: Sources, form: str, target: str) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as temporary:
        try:
            certificate = export(sources, target, Path(temporary) / "artefact").certificate
        except VerificationError as error:
            certificate = error.certificate
        except ValueError as error:
            return {"refused": str(error)}
    assert certificate is not None
    # Without those of other tolerances, where activations are rounded.
    cells = {k: v for k, v in certificate["cells"].items() if k not in certificate["bounds"]}
    row: dict[str, Any] = {"tolerance": certificate["tolerance"]}
    for column, parts in COLUMNS[form].items():
        errors = [error for cell, error in cells.items() if any(part in cell for part in parts)]
        row[column] = max(errors, default=None)
    return row


def table(rows: Sequence[dict[str, Any]]) -> str:
    """The page as Markdown: the worst encoding of each form and target, and refusals."""
    lines = []
    for target in dict.fromkeys(row["target"] for row in rows):
        own = [row for row in rows if row["target"] == target]
        worst = [max(_share(row) for row in own if row["model"] == form) for form in COLUMNS]
        lines.append([f"`{target}`", *(f"{share:.2f} (`{name}`)" for share, name in worst)])
    reasons = {row["refused"]: row for row in rows if "refused" in row}.values()
    refused = [f"- `{row['encoding']}` ({row['model']}): {row['refused']}" for row in reasons]
    worst_of = markdown(["target", "in a decoder", "in an encoder"], lines)
    return text("parity").format(table=worst_of, refused="\n".join(refused))


def _share(row: dict[str, Any]) -> tuple[float, str]:
    """The worst error of a row as a share of its tolerance, and its encoding."""
    errors = [row.get(column) or 0.0 for column in COLUMNS[row["model"]]]
    return max(errors) / row.get("tolerance", 1.0), row["encoding"]


def passes(row: dict[str, Any]) -> bool:
    """Whether every measured column is within the tolerance."""
    return _share(row)[0] <= 1


def main() -> int:
    """Measure all encodings and write the files; returns 1 if a cell exceeds its tolerance."""
    forms = {"decoder": "causal", "encoder": "bidirectional"}
    pairs = [
        (n, form) for n, of in REGISTRY.items() for form in forms if forms[form] in of.works_in
    ]
    rows: list[dict[str, Any]] = []
    context = multiprocessing.get_context("spawn")
    with concurrent.futures.ProcessPoolExecutor(2, context) as pool:
        for of_targets in pool.map(measured, *zip(*pairs, strict=True)):
            rows += of_targets
            print("{encoding} in {model}".format(**rows[-1]), file=sys.stderr, flush=True)
    json_rows.write(Path("docs/parity.json"), rows)
    Path("docs/parity.md").write_text(table(rows), encoding="utf-8")
    return 0 if all(map(passes, rows)) else 1


if __name__ == "__main__":
    sys.exit(main())
