"""The page of the results of bench.gpu."""

import statistics
from typing import Any, Dict, List, Sequence

from bench.gpu_contestants import CONTEXTS
from posenc_export.runtime.artefact.certificate import format_worst_error

Row = Dict[str, Any]


def page(values: Dict[str, Any]) -> str:
    """Return the results as Markdown."""
    lines = ["# CUDA", "", "Written by `python -m bench.gpu`.", ""]
    if values.get("rehearsal"):
        lines += ["A rehearsal without a GPU: no error and no time means anything.", ""]
    if values["parity"]:
        lines += _parity(values["parity"])
    if values["latency"]:
        contexts = CONTEXTS[: 1 if values.get("rehearsal") else None]
        lines += _latency(values["latency"], values["layers"], contexts)
    return "\n".join(lines) + "\n"


def _parity(rows: Sequence[Row]) -> List[str]:
    """Return a line for each artefact: its largest error, or why there is none."""
    passed = sum(row.get("passed", False) for row in rows)
    lines = [f"{passed} of {len(rows)} artefacts passed on CUDA.", ""]
    lines += ["| model | target | dtype | largest error | tolerance | cell |", "|---" * 6 + "|"]
    for row in sorted(rows, key=lambda row: row["model"]):
        cells = [row["model"], row.get("target", ""), row.get("dtype", "")]
        reason = row.get("refused") or row.get("error")
        if reason:
            cells += [reason, "", ""]
        else:
            failed = "" if row["passed"] else " (failed)"
            error = f"{format_worst_error(row['worst'])}{failed}"
            cells += [error, f"{row['tolerance']:.1e}", row["at"]]
        lines.append(f"| {' | '.join(cells)} |")
    return lines


def _latency(rows: Sequence[Row], layers: int, contexts: Sequence[int]) -> List[str]:
    """Return a line for each contestant."""
    columns = [(what, str(context)) for what in ("step", "prefill") for context in contexts]
    devices = ", ".join(sorted({row["device"] for row in rows if "device" in row}))
    heads = [f"{what}, {context} tokens" for what, context in columns]
    lines = ["", f"A decoder of {layers} layers of width 768, float16, one row, on {devices}."]
    lines += ["Medians of the rounds, with the least and the largest.", ""]
    lines += [f"| contestant | {' | '.join(heads)} | rounds |", "|" + "---|" * (len(heads) + 2)]
    for name in dict.fromkeys(row["contestant"] for row in rows):
        rounds = [row for row in rows if row["contestant"] == name]
        measured = [row for row in rounds if "error" not in row]
        cells = [_spread([row[what][context] for row in measured]) for what, context in columns]
        cells = cells if measured else [rounds[0]["error"][-120:]]
        lines.append(f"| {' | '.join([name, *cells, str(len(measured))])} |")
    return lines


def _spread(seconds: Sequence[float]) -> str:
    if not seconds:
        return ""
    median, *ends = (
        f"{1e6 * value:.0f}" for value in (statistics.median(seconds), min(seconds), max(seconds))
    )
    return f"{median} us ({' .. '.join(ends)})"
