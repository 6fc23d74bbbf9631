"""Load random mutations of an artefact in child processes: `python -m tests.fuzz.mutations --target
ort --count 1000 --seed 1 [--resealed]`.

With the hashes unchanged, no mutation may load. With all hashes recomputed (--resealed), a mutation
loads or is refused with a message of one line. It must not raise other exceptions, crash, hang, run
code or open a file outside its folder. If it loads, verification must detect whether its outputs
changed (judge.py).
"""

import argparse
import collections
import hashlib
import json
import multiprocessing
import os
import random
import shutil
import sys
import tempfile
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, Callable, Counter, Dict, List, Optional

from posenc_export.export import TARGETS, export
from posenc_export.models.presets import seeded
from posenc_export.runtime import load
from posenc_export.runtime.artefact import files
from posenc_export.runtime.artefact import manifest as manifests
from tests.fuzz.edits import EDITS, RESEALED_EDITS
from tests.fuzz.judge import DISPROVED, PROVED, Judge
from tests.tiny import block

LIMIT = 60.0  # most seconds for one mutation; a load takes less than one second
BATCH = 50  # number of mutations per child process
REFUSED = "refused"
GOOD = (REFUSED, PROVED, DISPROVED)
# Audit events that must not occur while an artefact is loaded, once the libraries are imported.
FORBIDDEN = (
    "os.system subprocess.Popen os.exec os.posix_spawn os.fork socket.connect "
    "pickle.find_class os.remove os.rename shutil.rmtree"
).split()


@dataclass(frozen=True)
class Case:
    """One mutation, determined by its seed and number."""

    seed: int
    number: int
    resealed: bool

    def write(self, source: Path, folder: Path) -> str:
        """Copy source to folder and apply a random edit. Return the name of the edit."""
        shutil.rmtree(folder, ignore_errors=True)
        shutil.copytree(source, folder)
        before = _content(folder)
        edits = RESEALED_EDITS if self.resealed else EDITS
        for attempt in range(100):  # an edit may have no effect
            source_of_chance = random.Random(f"{self.seed} {self.number} {attempt}")
            name = source_of_chance.choice(sorted(edits))
            try:
                edits[name](folder, source_of_chance)
            except RecursionError:  # nested more deeply than json can write
                continue
            if self.resealed:
                reseal(folder)
            if _content(folder) != before:
                return name
        raise RuntimeError(f"mutation {self.number} of seed {self.seed} changes nothing")


def _content(folder: Path) -> Dict[str, Any]:
    """Return the content of all files; that of the manifest as parsed JSON."""
    result: Dict[str, Any] = {path.name: path.read_bytes() for path in sorted(folder.iterdir())}
    return {**result, manifests.FILE_NAME: _parsed(folder) or result.get(manifests.FILE_NAME)}


def _parsed(folder: Path) -> Optional[Dict[str, Any]]:
    """Return the manifest, or None if it is not a JSON object."""
    try:
        content = json.loads((folder / manifests.FILE_NAME).read_bytes())
    except (FileNotFoundError, ValueError, RecursionError):
        return None
    return content if isinstance(content, dict) else None


def reseal(folder: Path) -> None:
    """Update the hashes and the seal of the manifest, if it is still a JSON object."""
    content = _parsed(folder)
    if content is None:
        return
    listed, there = content.get("files"), {path.name for path in folder.iterdir() if path.is_file()}
    for name, entry in listed.items() if isinstance(listed, dict) else ():
        if name in there and isinstance(entry, dict):
            file = (folder / name).read_bytes()
            entry.update(sha256=hashlib.sha256(file).hexdigest(), bytes=len(file))
    content.pop("seal", None)
    try:
        content["seal"] = hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()
        sealed = json.dumps(content)
    except RecursionError:  # nested more deeply than json can write: keep the edited file
        return
    (folder / manifests.FILE_NAME).write_text(sealed)


def outcome(folder: Path, resealed: bool, judge: Callable[[Path], str]) -> str:
    """Load an artefact. Return REFUSED, PROVED or DISPROVED; any other text describes a finding."""
    try:
        load(folder, provider="cpu", threads=1)
    except (ValueError, RuntimeError) as refusal:
        line = str(refusal)
        ours = type(refusal) in (ValueError, RuntimeError) and line.startswith(
            ("artefact ", "runtime: ", "session: ")
        )
        return (
            REFUSED
            if ours and "\n" not in line and len(line) < 2000
            else f"raised {type(refusal).__name__}: {line[:200]!r}"
        )
    except Exception as error:  # noqa: BLE001  any other exception is a finding
        return f"raised {type(error).__name__}: {str(error)[:200]!r}"
    if not resealed:
        return "loaded although a hash differs"
    return judge(folder)


class Watch:
    """An audit hook that records code execution, and files opened outside a folder."""

    def __init__(self, around: Path) -> None:
        self.around, self.heard = str(around), ""
        self._libraries = tuple(
            str(Path(path).resolve())
            for path in {sys.prefix, sys.base_prefix, Path(__file__).parents[2]}
        )

    def hear(self, event: str, arguments: Any) -> None:
        if event in FORBIDDEN:
            self.heard = f"{event} {str(arguments)[:100]}"
        elif event == "open" and isinstance(arguments[0], str):
            path = os.path.realpath(arguments[0])
            if not path.startswith((self.around, "/dev/", "/proc/", "/sys/", *self._libraries)):
                self.heard = f"opened {path}"


def _child(source: Path, around: Path, cases: List[Case], to: Connection) -> None:
    """Run cases in a child process. For each, send (number, edit, outcome), preceded by messages
    without an outcome.
    """
    # Results of kernels are not kept: no file may be written.
    os.environ |= {"OMP_NUM_THREADS": "1", files.CACHE: os.devnull}
    judge = Judge(source)  # also imports all libraries before the audit hook is added
    watch, folder = Watch(around), around / "mutated"
    sys.addaudithook(watch.hear)
    for case in cases:
        to.send((case.number, "", None))
        edit = case.write(source, folder)
        to.send((case.number, edit, None))
        watch.heard = ""
        result = outcome(folder, case.resealed, judge)
        to.send((case.number, edit, watch.heard or result))


def run(
    source: Path, cases: List[Case], keep: Optional[Path] = None, limit: float = LIMIT
) -> "Report":
    """Load every mutation of an artefact.

    Args:
        keep: folder for copies of the artefacts of findings.
        limit: most seconds for one mutation.
    """
    report, waiting = Report(), list(cases)
    while waiting:
        with tempfile.TemporaryDirectory() as temporary:
            done = _batch(source, Path(temporary).resolve(), waiting[:BATCH], limit, report)
        waiting = waiting[done:]
    for finding in report.findings if keep else ():
        assert keep is not None
        finding.case.write(
            source, keep / f"{source.name}-{finding.case.seed}-{finding.case.number}"
        )
    return report


def _batch(source: Path, around: Path, cases: List[Case], limit: float, report: "Report") -> int:
    """Run cases in one child process until it ends. Return the number of finished cases."""
    here, there = multiprocessing.get_context("fork").Pipe(duplex=False)
    child = multiprocessing.get_context("fork").Process(
        target=_child, args=(source, around, cases, there)
    )
    child.start()
    there.close()
    edit, done = "", 0
    try:
        while done < len(cases):
            if not here.poll(limit):
                report.add(cases[done], edit, f"hangs: no answer in {limit:.0f} s")
                return done + 1
            _, edit, result = here.recv()
            if result is not None:
                report.add(cases[done], edit, result)
                done += 1
    except EOFError:
        child.join()
        report.add(cases[done], edit, f"crash: the process ended with {child.exitcode}")
        return done + 1
    finally:
        child.kill()
        child.join()
        here.close()
    return done


@dataclass(frozen=True)
class Finding:
    """A mutation with a wrong outcome."""

    case: Case
    edit: str
    outcome: str


class Report:
    """Counts of outcomes, and all findings."""

    def __init__(self) -> None:
        self.counts: Counter[str] = collections.Counter()
        self.edits: Counter[str] = collections.Counter()
        self.findings: List[Finding] = []

    def add(self, case: Case, edit: str, found: str) -> None:
        good = found in GOOD
        self.counts[found if good else "finding"] += 1
        self.edits[f"{edit}: {found if good else 'finding'}"] += 1
        if not good:
            self.findings.append(Finding(case, edit, found))


def main(arguments: Optional[List[str]] = None) -> int:
    """Run the mutations. Returns the exit status: 0, or 1 if there is a finding."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--target", required=True, choices=list(TARGETS))
    parser.add_argument("--count", type=int, default=1000)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--first", type=int, default=0, help="number of the first mutation")
    parser.add_argument("--resealed", action="store_true", help="recompute every hash")
    parser.add_argument("--keep", type=Path, help="folder for copies of the artefacts of findings")
    options = parser.parse_args(arguments)
    with tempfile.TemporaryDirectory() as temporary:
        source = Path(temporary) / options.target
        export(seeded(block("rope", max_positions=64)), options.target, source, verify=False)
        cases = [
            Case(options.seed, number, options.resealed)
            for number in range(options.first, options.first + options.count)
        ]
        report = run(source, cases, options.keep)
    print(
        f"target {options.target}, seed {options.seed}, {options.count} mutations, "
        f"{'resealed' if options.resealed else 'hashes unchanged'}"
    )
    for name, count in sorted(report.counts.items()):
        print(f"{count:6} {name}")
    for name, count in sorted(report.edits.items()):
        print(f"       {count:6} {name}")
    for finding in report.findings:
        print(
            f"finding: --first {finding.case.number} --count 1, {finding.edit}: {finding.outcome}"
        )
    return 1 if report.findings else 0


if __name__ == "__main__":
    sys.exit(main())
