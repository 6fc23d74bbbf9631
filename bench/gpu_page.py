"""Tables of docs/runtimes/cuda.md from the results of bench.gpu: python -m bench.gpu_page."""

import statistics
from functools import partial
from pathlib import Path
from typing import Any, Callable, Mapping, Sequence

from bench import json_rows, marked
from posenc_export.runtime.artefact.certificate import format_worst_error

TOP = Path(__file__).parents[1]
RESULTS, PAGE = TOP / "bench/results/gpu.json", TOP / "docs/runtimes/cuda.md"
PROMPTS = """### Prompts

A decoder of Llama's architecture with 12 layers of width 768 (124 M weights), float16, one row.
"After steps" are prompts of a session whose steps were captured, "new length" prompts with a length
that was not read before: cuDNN's attention, which the provider prefers for prompts, plans anew for
each length."""
STEPS = """### Steps

The same architecture in float16. A step includes copying the token to the device and the logits
back."""
NONE = "No device has run it yet.\n"
# Names of the cases of times, and their figures.
OF_PROMPTS = ("contestant", "context"), ("prompt", "after steps", "new length")
OF_STEPS = ("contestant", "weights", "rows", "context"), ("step", "memory")
Row = dict[str, Any]


def write(values: Mapping[str, Any], page: Path) -> None:
    """Replace the measurements of a page: its devices, and a section for each part with rows."""
    sections = [_machines(values["machines"])] if values["rows"] else [NONE]
    for part, (text, table) in SECTIONS.items():
        rows = [row for row in values["rows"] if row["part"] == part]
        sections += [f"{text}\n\n{table(rows)}"] if rows else []
    marked.replace(page, "measurements", "\n".join(sections))


def _machines(machines: Sequence[Row]) -> str:
    names = dict.fromkeys(name for machine in machines for name in machine)
    lines = [[name, *(machine.get(name, "") for machine in machines)] for name in names]
    head = ["", *(f"device {number}" for number in range(1, len(machines) + 1))]
    return _table(head, lines)


def _counts(rows: Sequence[Row]) -> str:
    """One line for each kind of models, and one for each failure."""
    groups: dict[Any, list[Row]] = {}
    for row in rows:
        kind = row["piece"].partition(":")[0]
        groups.setdefault((row["machine"] + 1, kind), []).append(row)
    lines, wrong = [], []
    for (number, kind), those in groups.items():
        right = [row for row in those if row.get("passed")]
        refused = [row for row in those if "refused" in row]
        counts = [len(those), len(right), len(refused), len(those) - len(right) - len(refused)]
        cells = sum(row.get("cells", 0) for row in right)
        lines.append([number, kind, *counts, f"{cells:,}" if cells else ""])
        wrong += [_failure(row) for row in those if row not in right and row not in refused]
    head = ["device", "of", "number", "right", "refused", "wrong", "cells"]
    return _table(head, lines, wrong)


def _failure(row: Row) -> str:
    name = f"`{row.get('model', row['piece'])}`"
    form = " ".join(filter(None, (row.get("target"), row.get("dtype"))))
    error = row.get("error", row.get("worst"))
    said = error if isinstance(error, str) else f"error {format_worst_error(error)}"
    at = f" in '{row['at']}', tolerance {row['tolerance']:.1e}" if "at" in row else ""
    return f"- Device {row['machine'] + 1}: {name} {form}{' ' if form else ''}{said}{at}"


def _times(names: Sequence[str], figures: Sequence[str], rows: Sequence[Row]) -> str:
    """One line for each case: medians of the rounds in microseconds."""
    cases: dict[Any, list[Row]] = {}
    errors = []
    for row in rows:
        if "error" in row:
            errors.append(f"- Device {row['machine'] + 1}: `{row['piece']}`: {row['error']}")
        else:
            cases.setdefault((row["machine"] + 1, *(row[n] for n in names)), []).append(row)
    lines = []
    for case, those in sorted(cases.items(), key=lambda item: tuple(map(str, item[0]))):
        medians = {name: statistics.median(row[name] for row in those) for name in figures}
        cells = [f"{v if k == 'memory' else 1e6 * v:.0f}" for k, v in medians.items()]
        lines.append([*case, *cells, len(those)])
    head = ["device", *names, *(f"{n}, MB" if n == "memory" else f"{n}, us" for n in figures)]
    return _table([*head, "rounds"], lines, errors)


def _table(head: Sequence[str], lines: Sequence[Sequence[Any]], notes: Sequence[str] = ()) -> str:
    return "\n".join([marked.markdown(head, lines), *([""] if notes else []), *notes, ""])


SECTIONS: dict[str, tuple[str, Callable[[Sequence[Row]], str]]] = {
    "repaired": ("### Values: what was repaired without a device", _counts),
    "parity": ("### Values: everything else", _counts),
    "prompts": (PROMPTS, partial(_times, *OF_PROMPTS)),
    "steps": (STEPS, partial(_times, *OF_STEPS)),
}


if __name__ == "__main__":
    write(json_rows.read(RESULTS, {"machines": [], "rows": []}), PAGE)
