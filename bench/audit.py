"""Audit what other exporters make of tiny random checkpoints of 20 families.

    python -m bench.audit [--exporters NAME...] [--families NAME...] [--environments FILE]

Each exporter runs in its own process with the Python of a table of environments, JSON with
{"optimum": "/path/to/bin/python"}; without an entry, in this Python. An exporter whose package is
absent is named and skipped. What build/audit has is not exported again. The faults of
tests/auditing/exporter_faults.py are planted in what FAULTY read and write. Needs transformers.
"""

import argparse
import functools
import itertools
import json
import re
import subprocess
import sys
import time
from collections import Counter
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from typing import Any, Iterator, Sequence

from bench import json_rows, marked
from bench.audit_exporters import EXPORTERS
from posenc_export.auditing import audit
from tests.auditing import families
from tests.auditing.exporter_faults import OF_CHECKPOINTS, OF_GRAPHS

PAGE, RESULTS, WORK = map(
    Path, ("docs/audit-results.md", "bench/results/audit.json", "build/audit")
)
FAULTY = ("transformers", "optimum", "genai", "torch-dynamo", "torchscript")
ONNX = ("transformers", "optimum", "torch-dynamo", "torchscript")  # whose graphs get faults
SECONDS = 3600  # of one exporter
COUNTED = ("right", "wrong", "refused", "not possible")


def exported(
    name: str, python: str, checkpoints: Path, output: Path, of: Sequence[str]
) -> list[dict[str, Any]]:
    """Export all families with one exporter; return its rows, and one for each family at which its
    process ended. Rows are kept beside the output.
    """
    script = str(Path(__file__).with_name("audit_exporters.py"))
    kept = output.with_name(f"{output.name}.json")
    rows: list[dict[str, Any]] = json_rows.read(kept, [])
    while remaining := [family for family in of if family not in {row["family"] for row in rows}]:
        command = [python, script, name, str(checkpoints), str(output), *remaining]
        process = subprocess.run(command, capture_output=True, text=True, timeout=SECONDS)
        lines = [line for line in process.stdout.splitlines() if line.startswith('{"family"')]
        rows += map(json.loads, lines)
        if len(lines) < len(remaining):
            said = (process.stderr.strip().splitlines() or [f"exit {process.returncode}"])[-1]
            rows.append({"family": remaining[len(lines)], "refused": f"process ended: {said}"})
    output.mkdir(parents=True, exist_ok=True)
    kept.write_text(json.dumps(rows), encoding="utf-8")
    return [{"exporter": name, **row} for row in rows if row["family"] in of]


def audited(row: dict[str, Any], checkpoint: Path) -> dict[str, Any]:
    """Add the answer to a row: verdict, sentence, cause, and the number of cells of each status."""
    if "file" not in row:
        message = re.sub(r"\x1b\[\d+m", "", row["refused"]).strip().splitlines()[0]
        refused = message.replace(f"{checkpoint.parent}/", "")[:300]
        return {**row, "verdict": "not exported", "refused": refused}
    row = dict(row)
    file = row.pop("file")
    try:
        result = audit(file, checkpoint)
    except ValueError as error:  # ONNX Runtime does not load it, or an input has no clear meaning
        return {**row, "verdict": "not audited", "refused": str(error).replace(file, "it")[:400]}
    counts = {kind: sum(cell.status == kind for cell in result.cells) for kind in COUNTED}
    if result.claims:
        row["claims"] = dict(Counter(claim.status for claim in result.claims))
    failures = sorted({cell.message for cell in result.cells if cell.status == "refused"})
    row |= {"verdict": result.verdict, "sentence": result.sentence, "cause": result.cause}
    return {**row, "cells": counts, "failures": [text[:300] for text in failures]}


def of_checkpoints(name: str, python: str, checkpoints: Path) -> Iterator[dict[str, Any]]:
    """Export checkpoints with planted faults, and audit them against the right ones."""
    faulty = checkpoints.with_name("faulty")
    faults = {fault.replace(" ", "_"): fault for fault in OF_CHECKPOINTS}
    planted = [folder for folder in faults if (faulty / folder).exists()]
    for row in exported(name, python, faulty, faulty.with_name(f"faulty {name}"), planted):
        fault = faults[row["family"]]
        family, causes = OF_CHECKPOINTS[fault].family, OF_CHECKPOINTS[fault].causes
        answered = audited(row, checkpoints / family)
        named = answered.get("cause") in causes
        yield {**answered, "fault": fault, "family": family, "named": named}


def of_graphs(rows: Sequence[dict[str, Any]], checkpoints: Path) -> Iterator[dict[str, Any]]:
    """Plant faults in graphs, and audit them."""
    by_family = {row["family"]: row for row in rows if "file" in row}
    for name, fault in OF_GRAPHS.items():
        if row := by_family.get(fault.family):
            file = Path(row["file"]).with_name("faulty.onnx")
            fault.plant(Path(row["file"]), file)
            answered = audited({**row, "file": str(file)}, checkpoints / fault.family)
            yield {**answered, "fault": name, "named": answered.get("cause") in fault.causes}


def _faults(rows: Sequence[dict[str, Any]], names: Sequence[str]) -> str:
    """Return the table of planted faults: whether each was named, for each exporter."""
    cells = {}
    for row in (row for row in rows if "cause" in row):
        cells[row["fault"], row["exporter"]] = "named" if row["named"] else row["verdict"]
    tried = {row["exporter"] for row in rows}
    names, lines = [name for name in names if name in tried], []
    for fault, planted in (*OF_CHECKPOINTS.items(), *OF_GRAPHS.items()):
        lines.append([fault, planted.family, *(cells.get((fault, name), "-") for name in names)])
    return marked.markdown(["fault", "family", *names], lines)


def table(rows: Sequence[dict[str, Any]]) -> str:
    """Return the page: a table of answers, and the wrong rows."""
    planted = [row for row in rows if "fault" in row]
    rows = [row for row in rows if "fault" not in row]
    names = list(dict.fromkeys(row["exporter"] for row in rows))
    by_place = {(row["family"], row["exporter"]): row for row in rows}
    rows_of = dict.fromkeys(row["family"] for row in rows)
    lines = [[of, *(_cell(by_place.get((of, name))) for name in names)] for of in rows_of]
    wrong = [row for row in rows if row["verdict"] == "wrong"]
    known = {row["exporter"]: row["versions"].items() for row in rows if "versions" in row}
    versions = {name: ", ".join(f"{k} {v}" for k, v in pairs) for name, pairs in known.items()}
    return marked.text("audit").format(
        table=marked.markdown(["family", *names], lines),
        faults=_faults(planted, names),
        wrong="\n".join(map(_wrong, wrong)) or "None.",
        versions="\n".join(f"- {name}: {text}" for name, text in versions.items()),
        exporters=len(names),
        families=len(rows_of),
    )


def _cell(row: Any) -> str:
    if row is None:
        return ""
    if row["verdict"] not in ("right", "wrong", "refused"):
        return {"not exported": "-", "not audited": "not loaded"}[row["verdict"]]
    cells = row["cells"]
    if row["cause"] == "half precision":
        return f"small errors {cells['wrong']}/{cells['wrong'] + cells['right']}"
    if row["verdict"] == "wrong":
        return f"**wrong** {cells['wrong']}/{cells['wrong'] + cells['right']}"
    counts = {"right": f"{cells['right']}", "refused": f"{cells['refused']} fail"}
    return ", ".join(text for status, text in counts.items() if cells[status])


def _wrong(row: dict[str, Any]) -> str:
    return f"- {row['exporter']}, {row['family']}: {row['sentence']}."


def available(name: str, python: str) -> bool:
    """Whether an environment has an exporter's packages."""
    code = f"import importlib.metadata as m; [m.version(p) for p in {EXPORTERS[name][1]!r}]"
    return subprocess.run([python, "-c", code], capture_output=True).returncode == 0


def of_exporter(
    name: str, python: str, checkpoints: Path, of: Sequence[str]
) -> list[dict[str, Any]]:
    """Export and audit with one exporter, without and with faults; print and return its rows."""
    if not available(name, python):
        lacks = f"{python} lacks one of {', '.join(EXPORTERS[name][1])}"
        print(f"{name}: skipped, {lacks}")
        return []
    rows, made = [], exported(name, python, checkpoints, checkpoints.with_name(name), of)
    for row in itertools.chain(
        (audited(row, checkpoints / row["family"]) for row in made),
        of_checkpoints(name, python, checkpoints) if name in FAULTY else (),
        of_graphs(made, checkpoints) if name in ONNX else (),
    ):
        rows.append(row)
        answer = row.get("sentence") or row["refused"]
        fault = f" with {row['fault']}" if "fault" in row else ""
        print(f"{name}, {row['family']}{fault}: {row['verdict']}: {answer}", flush=True)
    return rows


def main() -> None:
    """Export and audit, and write the results."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--exporters", nargs="*", choices=EXPORTERS, default=list(EXPORTERS))
    parser.add_argument("--families", nargs="*", choices=families.EDGES, default=families.EDGES)
    parser.add_argument("--environments", type=Path, help="JSON: Python of each exporter")
    options = parser.parse_args()
    pythons = json_rows.read(options.environments) if options.environments else {}
    checkpoints, begin = WORK.absolute() / "checkpoints", time.time()
    for family in options.families:
        families.save(family, checkpoints / family)
    for name, fault in OF_CHECKPOINTS.items():
        faulty = checkpoints.with_name("faulty") / name.replace(" ", "_")
        if fault.family in options.families and not faulty.exists():
            fault.plant(checkpoints / fault.family, faulty)
    work = functools.partial(of_exporter, checkpoints=checkpoints, of=options.families)
    python = [pythons.get(name, sys.executable) for name in options.exporters]
    with ProcessPoolExecutor(2, get_context("spawn")) as pool:
        rows = [row for part in pool.map(work, options.exporters, python) for row in part]
    print(f"{len(rows)} rows in {(time.time() - begin) / 60:.1f} minutes")
    if set(options.exporters) == set(EXPORTERS) and set(options.families) == set(families.EDGES):
        json_rows.write(RESULTS, rows)
        PAGE.write_text(table(rows), encoding="utf-8")


if __name__ == "__main__":
    main()
