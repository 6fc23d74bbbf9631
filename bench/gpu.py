"""What a machine with a GPU decides: parity, prompts and steps on the CUDA provider.

    python -m bench.gpu [--minutes 25] [--rehearse]

It installs nothing: a runtime that is missing is a row that says so. Each piece runs in a process
of its own, so that a crash or a hang ends one piece, and its rows are written to the JSON file at
once; the same command again continues with what is missing. Parts come in the order of what they
decide. Then docs/runtimes/cuda.md is written from the file (bench/gpu_page.py).

--rehearse runs one piece of each part with a small decoder, on the CPU or on the dry run of the
provider (tests/cuda_dry_run); its errors and times mean nothing.
"""

import argparse
import functools
import json
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from importlib import metadata
from pathlib import Path
from typing import Any, Callable, Iterator, NamedTuple, Sequence

from bench import gpu_page, gpu_proofs, gpu_times, json_rows
from posenc_export.runtime.artefact import machine

PIECE = 240  # most seconds of a process
ROUNDS, LAYERS = 3, 12
SMALL = {"vocab_size": 64, "hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 4}
PACKAGES = ("onnxruntime-gpu", "onnxruntime", "onnxruntime-genai-cuda", "torch", "transformers")


class Part(NamedTuple):
    """A part of the measurements."""

    keys: Callable[[], list[str]]  # returns the names of its pieces
    workers: int = 1  # processes at the same time; 1 where times are measured


def _rounds(times: Sequence[Sequence[Any]]) -> list[str]:
    return [json.dumps([number, *key]) for number in range(ROUNDS) for key in times]


PARTS = {
    "repaired": Part(lambda: list(gpu_proofs.REPAIRED), workers=8),
    "prompts": Part(lambda: _rounds(gpu_times.PROMPTING)),
    "steps": Part(lambda: _rounds(gpu_times.STEPPING)),
    "parity": Part(
        lambda: [n for n in gpu_proofs.models() if n not in gpu_proofs.REPAIRED], workers=8
    ),
}


def piece(part: str, key: str, folder: Path, rehearse: bool) -> Iterator[dict[str, Any]]:
    """Run a piece in this process and yield its rows."""
    if part in ("repaired", "parity"):
        yield from gpu_proofs.proof(key, rehearse)
    else:
        layers, sizes = (1, SMALL) if rehearse else (LAYERS, {})
        gpu_times.prepare(folder, layers, **sizes)
        yield from gpu_times.rows(part, key, folder, rehearse)


def in_process(
    folder: Path, rehearse: bool, part: str, key: str, seconds: float
) -> list[dict[str, Any]]:
    """Run a piece in a process of its own. Return its rows, and a row {"error"} if it failed; none
    if the time that is left was shorter than that of a piece.
    """
    command = [sys.executable, "-W", "ignore", "-m", "bench.gpu", "--piece", part, key]
    command += ["--folder", str(folder), *(["--rehearse"] if rehearse else [])]
    try:
        ran = subprocess.run(command, capture_output=True, text=True, timeout=min(PIECE, seconds))
    except subprocess.TimeoutExpired:
        return [{"error": f"no result within {PIECE} s"}] if seconds > PIECE else []
    rows = [json.loads(line) for line in ran.stdout.splitlines() if line.startswith("{")]
    if ran.returncode:
        lines = ran.stderr.strip().splitlines() or [f"exit status {ran.returncode}"]
        rows.append({"error": lines[-1][:300]})
    return rows


class Results:
    """The rows that were measured so far, in a file that is written after each piece.

    Args:
        path: of the file.
        here: description of this machine. Rows of other machines stay.
    """

    def __init__(self, path: Path, here: dict[str, str]) -> None:
        self.path, self._lock = path, threading.Lock()
        self.values = json_rows.read(path, {"machines": [], "rows": []})
        if here not in self.values["machines"]:
            self.values["machines"].append(here)
        self.machine = self.values["machines"].index(here)

    def missing(self, part: str, keys: Sequence[str]) -> list[str]:
        """Return the pieces of a part that this machine has no rows of."""
        rows = [row for row in self.values["rows"] if row["machine"] == self.machine]
        known = {row["piece"] for row in rows if row["part"] == part}
        return [key for key in keys if key not in known]

    def add(self, part: str, key: str, rows: Sequence[dict[str, Any]]) -> None:
        """Add the rows of a piece, and replace the file. Several threads may call it."""
        named = [{"machine": self.machine, "part": part, "piece": key, **row} for row in rows]
        self.path.parent.mkdir(parents=True, exist_ok=True)
        with self._lock:
            self.values["rows"] += named
            written = self.path.with_suffix(".part")
            json_rows.write(written, self.values)
            written.replace(self.path)
        errors = sum("error" in row and "case" not in row for row in named)
        print(f"{part}: {key}: {len(rows)} rows, {errors} errors", file=sys.stderr, flush=True)


Run = Callable[[str, str, float], list[dict[str, Any]]]  # of a piece, within some seconds


def measure(results: Results, minutes: float, rehearse: bool, run: Run) -> bool:
    """Run the pieces that are missing within the time. Return whether none is left."""
    end, complete = time.monotonic() + 60 * minutes, True
    for name, part in PARTS.items():
        keys = part.keys()[: 1 if rehearse else None]

        def timed(key: str, name: str = name) -> None:
            remaining = end - time.monotonic()
            if rows := run(name, key, remaining) if remaining > 0 else []:
                results.add(name, key, rows)

        with ThreadPoolExecutor(part.workers) as pool:
            list(pool.map(timed, results.missing(name, keys)))
        complete = complete and not results.missing(name, keys)
    return complete


def here(rehearse: bool) -> dict[str, str]:
    """Return the device, its driver, the versions and the commit of what is measured."""
    known = {"device": "a rehearsal" if rehearse else machine.gpu()}
    known["driver"] = gpu_times.device("driver_version")
    commit = ["git", "rev-parse", "--short", "HEAD"]
    with suppress(OSError, subprocess.CalledProcessError):
        said = subprocess.run(commit, capture_output=True, text=True, check=True).stdout
        known["commit"] = said.strip()
    for package in PACKAGES:
        with suppress(metadata.PackageNotFoundError):
            known[package] = metadata.version(package)
    return known


def main() -> None:
    as_is = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=as_is)
    add = parser.add_argument
    add("--minutes", type=float, default=25.0, help="start nothing after this time (default: 25)")
    add("--folder", type=Path, default=Path("build/gpu"), help="of the measured decoder")
    add("--rehearse", action="store_true", help="one small piece of each part, also without a GPU")
    add("--piece", nargs=2, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.piece:
        for row in piece(*options.piece, options.folder, options.rehearse):
            print(json.dumps(row), flush=True)
        return
    path = options.folder / "rehearsal.json" if options.rehearse else gpu_page.RESULTS
    results = Results(path, here(options.rehearse))

    run = functools.partial(in_process, options.folder, options.rehearse)
    complete = measure(results, options.minutes, options.rehearse, run)
    if not options.rehearse:
        gpu_page.write(results.values, gpu_page.PAGE)
    if not complete:
        print("The time is over. Run the same command again to continue.", file=sys.stderr)


if __name__ == "__main__":
    main()
