"""Join results of the dry run, write JSON and PAGE: python -m bench.cuda_dry_run WORKDIR ..."""

import re
import sys
from pathlib import Path
from typing import Any, Callable, Sequence

from bench import json_rows, marked

TOP = Path(__file__).parents[1]
JSON, PAGE = TOP / "bench/results/cuda_dry_run.json", TOP / "docs/runtimes/cuda-dry-run.md"
NEEDS_CUDNN = re.compile(r"got no libcudnn\S*, which operator (\w+) needs")
DEPTH = ", 12 layers", ", 2 layers"
# What is shown of a model, with the headings.
SHOWN = {
    "name": "model", "on_cpu": "nodes on the CPU", "copies": "copies", "launches": "launches",
    "us": "us", "replayed_us": "us replayed",
}  # fmt: skip


def compact(row: dict[str, Any]) -> dict[str, Any]:
    """Return what the page needs of a row of the dry run."""
    step = row.get("step", {})
    kept = {key: row.get(key) for key in ("name", "kind", "refused", "error", "nodes")}
    kept |= {"on_cpu": len(row["on_cpu"]), "copies": len(row["memcpy"])} if "on_cpu" in row else {}
    kept |= {"cells": row.get("cells"), "launches": step.get("launches")}
    kept |= {"attention": " ".join(step.get("attention", [])) or None, "tf32": step.get("tf32")}
    kept |= {"us": step.get("host_us"), "capture": row.get("capture")}
    kept |= {"replayed_us": row.get("replayed_us"), "faults": row.get("faults") or None}
    return {key: value for key, value in kept.items() if value is not None}


def page(rows: Sequence[dict[str, Any]]) -> str:
    """Return the page of compact rows as Markdown."""
    models: list[list[Any]] = []
    refused: dict[str, list[str]] = {}
    for row in filter(_remarkable, rows):
        if "refused" in row:
            refused.setdefault(row["refused"], []).append(f"`{row['name']}`")
        else:
            models.append(_line(row))
    written = marked.text("cuda-dry-run").format(
        layers=_layers({row["name"]: row for row in rows}),
        kinds=_kinds(rows),
        models=marked.markdown([*SHOWN.values(), "remarks"], models),
    )
    reasons = [f"- {', '.join(names)}: {reason}\n" for reason, names in refused.items()]
    return "".join([written, "\nExport refuses these models:\n\n" if reasons else "", *reasons])


def _remarkable(row: dict[str, Any]) -> bool:
    """Whether a model is refused, does not run as captured, or copies."""
    runs = row.get("capture") == "captured" and "error" not in row and "faults" not in row
    return not runs or bool(row.get("copies"))


def _kinds(rows: Sequence[dict[str, Any]]) -> str:
    """Return the numbers of models of each kind."""
    columns: dict[str, Callable[[dict[str, Any]], int]] = {
        "number": lambda row: 1,
        "captured": lambda row: row.get("capture") == "captured",
        "no copy in a step": lambda row: row.get("copies") == 0,
        "no node on the CPU": lambda row: row.get("on_cpu") == 0,
        "need cuDNN": lambda row: "cudnn" in row.get("error", ""),
        "refused by export": lambda row: "refused" in row,
        "cells of the grid": lambda row: row.get("cells", 0),
        "faults": lambda row: "faults" in row,
    }
    lines = []
    for kind in dict.fromkeys(row["kind"] for row in rows):
        of_kind = [row for row in rows if row["kind"] == kind]
        lines.append([kind, *(sum(map(count, of_kind)) for count in columns.values())])
    return marked.markdown(["models", *columns], lines)


def _layers(rows: dict[str, dict[str, Any]]) -> str:
    """Return what a layer of width 768 with heads of 64 launches, and the times of 12 of them."""
    lines = []
    for name in sorted({row.partition(",")[0] for row in rows if row.endswith(DEPTH)}):
        deep, flat = (rows[name + layers] for layers in DEPTH)
        launches = f"{(deep['launches'] - flat['launches']) / 10:.1f}"
        lines.append([name, launches, deep["us"], deep["replayed_us"]])
    return marked.markdown(
        ["12 layers of width 768", "launches per layer", "us", "us replayed"], lines
    )


def _line(row: dict[str, Any]) -> list[Any]:
    needing = NEEDS_CUDNN.search(row.get("error", ""))
    remarks = [f"needs cuDNN ({needing[1]})"] if needing else [row.get("error")]
    remarks = remarks if "error" in row else list(row.get("faults", []))
    if row.get("capture", "captured") != "captured":
        remarks.append(row["capture"])
    return [*(row.get(key, "") for key in SHOWN), "; ".join(remarks).replace("|", "/")]


if __name__ == "__main__":
    by_name = {row["name"]: row for row in json_rows.read(JSON)}
    for workdir in sys.argv[1:]:
        for row in json_rows.read(Path(workdir) / "results.json"):
            by_name[row["name"]] = compact(row)
    json_rows.write(JSON, [*by_name.values()])
    PAGE.write_text(page([*by_name.values()]), encoding="utf-8")
