"""Dry run of all artefacts of target ort-cuda, and of the table of kernels that the static check
reads.

    python -m tests.cuda_dry_run WORKDIR [--kind KIND ...] [--only NAME ...] [--no-grid] [--resume]
    [--write-table]

Prepares WORKDIR (setup.sh), exports each model, runs it in a process with the stub libraries, and
compares what the provider does with what the static check says
(posenc_export/runtime/graphs/cuda_placement.py). Writes WORKDIR/results.json after each model; the
exit status is 1 if they differ, if a graph does not load, or if a cell of the grid has an error
that the provider reports, a launch beyond a limit of the device, or a shifted mask.
"""

import argparse
import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any, Collection, Iterator, Sequence

from bench import json_rows
from posenc_export.export import export
from posenc_export.runtime.graphs import cuda_placement
from tests.cuda_models import KINDS, weights_of

TOP = Path(__file__).parents[2]


def in_stub(workdir: Path, *arguments: object) -> subprocess.CompletedProcess[str]:
    """Run a module of this folder with the GPU package and the stub libraries."""
    paths = {
        "DRY_RUN": str(workdir),
        "LD_LIBRARY_PATH": str(workdir / "stub"),
        "PYTHONPATH": os.pathsep.join(map(str, (workdir / "site", TOP))),
    }
    command = [sys.executable, "-W", "ignore", "-m", *map(str, arguments)]
    environment = {**os.environ, **paths}
    return subprocess.run(command, cwd=TOP, env=environment, capture_output=True, text=True)


def faults_of(found: dict[str, Any], expected: cuda_placement.Placement) -> list[str]:
    """Return what is wrong with an artefact, as lines."""
    if "error" in found:  # without cuDNN
        return [] if "libcudnn" in found["error"] else [f"does not run: {found['error']}"]
    cells = found.get("faults", {}).items()
    faults = [f"{count} cells, such as {cell}: {text}" for text, (count, cell) in cells]
    both = [(found["on_cpu"], len(found["memcpy"])), (sorted(expected.on_cpu), expected.copied)]
    if both[0] != both[1]:
        got, wanted = (f"{', '.join(names) or 'nothing'} and {count}" for names, count in both)
        faults.append(f"on the CPU, and copies: {got}, expected {wanted}")
    if "capture" in found and (found["capture"] == "captured") != expected.captured:
        wanted = "captured" if expected.captured else "a refusal"
        faults.append(f"capture of a step: {found['capture']}, expected {wanted}")
    if found.get("step", {}).get("tf32"):
        faults.append(f"{found['step']['tf32']} products of a step in TF32")
    return faults


def results(
    workdir: Path,
    kinds: Sequence[str],
    only: Sequence[str],
    with_grid: bool,
    known: Collection[str],
) -> Iterator[dict[str, Any]]:
    """Yield one row for each artefact that is not known: {"name", "kind", "static", "faults",
    ...}, or {"name", "kind", "refused"} if export refuses the model.
    """
    models = {
        name: (kind, make)
        for kind in kinds
        for name, make in KINDS[kind]().items()
        if name not in known and (not only or name in only)
    }
    for name, (kind, make) in models.items():
        folder = workdir / "artefacts" / re.sub(r"[^a-zA-Z0-9_.-]+", "-", name)
        shutil.rmtree(folder, ignore_errors=True)
        try:
            export(make(), "ort-cuda", folder, verify=False, weights=weights_of(name))
        except ValueError as error:
            yield {"name": name, "kind": kind, "refused": str(error)}
            continue
        expected = cuda_placement.placed(folder / "model.onnx")
        more = [] if with_grid else ["--no-grid"]
        ran = in_stub(workdir, "tests.cuda_dry_run.check", folder, *more)
        content: dict[str, Any] = {"error": ran.stderr[-400:]}
        if ran.returncode == 0:
            content = json.loads(ran.stdout.splitlines()[-1])
        content["faults"] = faults_of(content, expected)
        shutil.rmtree(folder)
        yield {"name": name, "kind": kind, "static": expected.said(), **content}


def line(row: dict[str, Any]) -> str:
    if "refused" in row:
        return f"{row['name']:28} refused: {row['refused']}"
    step, ran = row.get("step"), row.get("error", "")
    if step:
        ran = f"{row.get('cells', 0)} cells, a step: {step['launches']} launches, "
        ran += f"{step['host_us']} us, {step['copies']}, {row['capture'][:40]}, "
        ran += f"{row.get('replayed_us', '-')} us"
    faults = [f"    FAULT {fault}" for fault in row["faults"]]
    return "\n".join([f"{row['name']:28} {row['static']}; {ran}", *faults])


def table_differs(workdir: Path, write: bool) -> bool:
    """Whether the committed table of kernels is not that of the provider. write: replace it."""
    result = workdir / "kernels.json"
    ran = in_stub(workdir, "tests.cuda_dry_run.tables", result)
    if ran.returncode:
        raise SystemExit(
            f"dry run: expected the provider to list its kernels, got\n{ran.stderr[-2000:]}"
        )
    if write:
        shutil.copy(result, cuda_placement.TABLE)
    return result.read_text(encoding="utf-8") != cuda_placement.TABLE.read_text(encoding="utf-8")


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("workdir", type=Path)
    parser.add_argument("--kind", choices=list(KINDS), nargs="*", default=["decoders", "presets"])
    parser.add_argument("--only", nargs="*", default=[], help="names of models")
    parser.add_argument("--no-grid", action="store_true", help="skip the parity grid")
    resumed = "keep the rows of WORKDIR/results.json, and run the models without one"
    parser.add_argument("--resume", action="store_true", help=resumed)
    parser.add_argument("--write-table", action="store_true", help="replace the table of kernels")
    options = parser.parse_args()
    workdir = options.workdir.resolve()
    environment = {**os.environ, "PYTHON": sys.executable}
    subprocess.run([Path(__file__).with_name("setup.sh"), workdir], check=True, env=environment)
    differs = table_differs(workdir, options.write_table)
    print(f"kernels: the table is {'not ' if differs else ''}that of the provider", flush=True)
    file = workdir / "results.json"
    resumes = options.resume and file.exists()
    rows: list[dict[str, Any]] = json.loads(file.read_text("utf-8")) if resumes else []
    known = {row["name"] for row in rows}
    for row in results(workdir, options.kind, options.only, not options.no_grid, known):
        rows.append(row)
        print(line(row), flush=True)
        json_rows.write(file, rows)
    faulty = [row["name"] for row in rows if row.get("faults")]
    print(f"{len(rows)} artefacts, {len(faulty)} with faults", *faulty)
    return int(differs or bool(faulty))


if __name__ == "__main__":
    sys.exit(main())
