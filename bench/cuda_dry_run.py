"""The page of the dry run: `python -m bench.cuda_dry_run WORKDIR ...` joins results, and
writes JSON and PAGE.
"""

import json
import re
import sys
from pathlib import Path
from typing import Any, Dict, List, Sequence

from posenc_export.shared import json_rows

TOP = Path(__file__).parents[1]
JSON, PAGE = TOP / "bench/results/cuda_dry_run.json", TOP / "docs/runtimes/cuda-dry-run.md"
NEEDS_CUDNN = re.compile(r"got no libcudnn\S*, which operator (\w+) needs")
SOME_EXPERTS = re.compile(r"chooses \d+ of \d+ experts")
DEPTH = ", 12 layers", ", 2 layers"
INTRODUCTION = """# CUDA without a GPU

What the CUDA provider of onnxruntime-gpu 1.31.1 does with `ort-cuda` artefacts in float16, on a
machine without a GPU. The provider is the shipped library. Below it stands a CUDA runtime that
reports one H200, runs no kernel and logs every call. **This proves no value**; [CUDA](cuda.md) has
values and times of a GPU. It shows whether a graph loads, which nodes run on the CPU, which copies
between host and device a step makes, and whether a step is captured as a CUDA graph and replayed.

Times are microseconds of CPU time for a step of one row, without kernels and launches, on a machine
with other work. Written by `make cuda-dry-run` and `python -m bench.cuda_dry_run`.
"""


def compact(row: Dict[str, Any]) -> Dict[str, Any]:
    """Return what the page needs of a row of the dry run."""
    step = row.get("step", {})
    kept = {
        "name": row["name"], "kind": row["kind"], "refused": row.get("refused"),
        "error": row.get("error"), "nodes": row.get("nodes"),
        "on_cpu": len(row["on_cpu"]) if "on_cpu" in row else None,
        "copies": len(row["memcpy"]) if "memcpy" in row else None, "cells": row.get("cells"),
        "launches": step.get("launches"),
        "attention": " ".join(step.get("attention", [])) or None, "tf32": step.get("tf32"),
        "us": step.get("host_us"), "capture": row.get("capture"),
        "replayed_us": row.get("replayed_us"), "faults": row.get("faults") or None,
    }  # fmt: skip
    return {key: value for key, value in kept.items() if value is not None}


def page(rows: Sequence[Dict[str, Any]]) -> str:
    """Return the page of compact rows as Markdown."""
    kinds = list(dict.fromkeys(row["kind"] for row in rows))
    lines = [INTRODUCTION, *_layers({row["name"]: row for row in rows})]
    lines += [
        (
            "| models | number | captured | no copy in a step | need cuDNN | refused by export | "
            "cells of the grid | faults |"
        ),
        "|---|---|---|---|---|---|---|---|",
    ]
    for kind in kinds:
        those = [row for row in rows if row["kind"] == kind]
        counts = [
            _captured(those),
            sum(row.get("copies") == 0 for row in those),
            sum("cudnn" in row.get("error", "") for row in those),
        ]
        counts += [
            sum("refused" in row for row in those),
            sum(row.get("cells", 0) for row in those),
            sum("faults" in row for row in those),
        ]
        lines.append(f"| {kind} | {len(those)} | {' | '.join(map(str, counts))} |")
    lines += [
        "",
        "The grid was run where cells are counted. The dry run lacks cuDNN. These models have",
        "nodes on the CPU, copies or faults, or are not captured;",
        "`bench/results/cuda_dry_run.json` has all others:",
        "",
        "| model | nodes on the CPU | copies | launches | us | us replayed | remarks |",
        "|---|---|---|---|---|---|---|",
    ]
    refused: Dict[str, List[str]] = {}
    for row in filter(_remarkable, rows):
        if "refused" in row:
            reason = SOME_EXPERTS.sub("chooses some of its experts", row["refused"])
            refused.setdefault(reason, []).append(f"`{row['name']}`")
        else:
            lines.append(_line(row))
    lines += ["", "Export refuses these models:", ""] if refused else []
    lines += [f"- {', '.join(names)}: {reason}" for reason, names in refused.items()]
    return "\n".join(lines) + "\n"


def _remarkable(row: Dict[str, Any]) -> bool:
    """Return whether a model is refused, does not run as captured, copies, or has nodes on the
    CPU.
    """
    runs = row.get("capture") == "captured" and "error" not in row and "faults" not in row
    return not runs or bool(row.get("on_cpu") or row.get("copies"))


def _captured(rows: Sequence[Dict[str, Any]]) -> int:
    return sum(row.get("capture") == "captured" for row in rows)


def _layers(rows: Dict[str, Dict[str, Any]]) -> List[str]:
    """Return what a layer of width 768 with heads of 64 launches, and the times of 12 of them."""
    lines = [
        "| 12 layers of width 768 | launches per layer | us | us replayed |",
        "|---|---|---|---|",
    ]
    for name in sorted({row.partition(",")[0] for row in rows if row.endswith(DEPTH)}):
        deep, flat = (rows[name + layers] for layers in DEPTH)
        lines.append(
            f"| {name} | {(deep['launches'] - flat['launches']) / 10:.1f} | {deep['us']} | "
            f"{deep['replayed_us']} |"
        )
    return [*lines, ""]


def _line(row: Dict[str, Any]) -> str:
    needing = NEEDS_CUDNN.search(row.get("error", ""))
    remarks = (
        [f"needs cuDNN ({needing[1]})" if needing else row["error"]]
        if "error" in row
        else row.get("faults", [])
    )
    if row.get("capture", "captured") != "captured":
        remarks.append(row["capture"])
    cells = [
        row.get(key, "") for key in ("name", "on_cpu", "copies", "launches", "us", "replayed_us")
    ]
    return f"| {' | '.join(map(str, cells))} | {'; '.join(remarks).replace('|', '/')} |"


def main(workdirs: Sequence[str]) -> None:
    by_name = {row["name"]: row for row in json.loads(JSON.read_text(encoding="utf-8"))}
    for workdir in workdirs:
        for row in json.loads((Path(workdir) / "results.json").read_text(encoding="utf-8")):
            by_name[row["name"]] = compact(row)
    rows = list(by_name.values())
    json_rows.write(JSON, rows)
    PAGE.write_text(page(rows), encoding="utf-8")


if __name__ == "__main__":
    main(sys.argv[1:])
