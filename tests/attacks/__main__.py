"""Give every attack of the grammar, every threat, and mutated files of each suffix to the commands:
`python -m tests.attacks [--mutations 500] [--seed 1] [--only pt2]`.

The commands run in child processes that may end or hang where the audit's own child process would:
what does so is tried again with that process. Prints one line for each format. Returns 1 if there
is a finding.
"""

import argparse
import multiprocessing
import random
import resource
import sys
import tempfile
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, NamedTuple

from tests.attacks import grammar, harness
from tests.attacks.threats import THREATS
from tests.fuzz.edits import flip_bytes, splice, truncate

BATCH, HANGS, MEMORY = 100, 60.0, 8 << 30  # jobs of a process, its seconds and bytes for one
AS_FILES, AS_ARTEFACTS = ("audit", "export", "verify"), ("load", "verify", "page")


class Job(NamedTuple):
    """A file for a command."""

    title: str
    write: Any
    command: str
    refused: bool = False
    confined: bool = False


class Mutated(NamedTuple):
    """A right file of a format after an edit of its bytes."""

    format: str
    seed: str

    def write(self, folder: Path, trace: Path) -> Path:
        chance, path = random.Random(self.seed), folder / f"model.{self.format}"
        path.write_bytes(grammar.right(self.format))
        chance.choice((flip_bytes, truncate, splice))(path, chance)
        return path


def jobs(mutations: int, seed: int) -> list[tuple[str, Job]]:
    """Return all jobs with their formats."""
    result = []
    for attack in grammar.attacks():
        result += [(attack.format, Job(str(attack), attack.write, name)) for name in AS_FILES]
        if attack.format in ("onnx", "pt2"):
            whole = attack.write_artefact
            result += [(attack.format, Job(str(attack), whole, name)) for name in AS_ARTEFACTS]
    for name, threat in THREATS.items():
        for command in threat.commands or harness.COMMANDS:
            job = Job(name, threat.write, command, threat.refused, threat.ends)
            result.append(("threats", job))
    for format in ("onnx", "pt2", "pt"):
        for number in range(mutations):
            mutated = Mutated(format, f"{format} {seed} {number}")
            result += [(format, Job(mutated.seed, mutated.write, name)) for name in AS_FILES[:2]]
    return result


def _child(jobs: list[Job], around: Path, to: Connection) -> None:
    resource.setrlimit(resource.RLIMIT_DATA, (MEMORY, MEMORY))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    for number, job in enumerate(jobs):
        folder = around / str(number)
        to.send(harness.tried(job.write, job.command, folder, job.refused, job.confined))


def run(jobs: list[Job]) -> list[list[str] | None]:
    """Return the findings of each job; None where the process ended or did not answer."""
    results: list[list[str] | None] = []
    while len(results) < len(jobs):
        with tempfile.TemporaryDirectory() as temporary:
            here, there = multiprocessing.get_context("fork").Pipe(duplex=False)
            part = jobs[len(results) : len(results) + BATCH]
            child = multiprocessing.get_context("fork").Process(
                target=_child, args=(part, Path(temporary).resolve(), there)
            )
            child.start()
            there.close()
            try:
                for _ in part:
                    results.append(here.recv() if here.poll(HANGS) else None)
                    if results[-1] is None:
                        break
            except EOFError:
                results.append(None)
            child.kill()
            child.join()
            here.close()
    return results


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--mutations", type=int, default=500, help="of each suffix")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--only", help="a format")
    options = parser.parse_args()
    every, failed = jobs(options.mutations, options.seed), 0
    for format in dict.fromkeys(name for name, _ in every):
        if options.only not in (None, format):
            continue
        own = [job for name, job in every if name == format]
        results = run(own)
        ended = [job for job, found in zip(own, results, strict=True) if found is None]
        again = run([job._replace(confined=True) for job in ended])
        found = [(job, r) for job, r in zip([*own, *ended], [*results, *again], strict=True)]
        wrong = [f"{job.title}: {line}" for job, r in found for line in r or ()]
        wrong += [f"{j.title}: {j.command} ended" for j, r in found[len(own) :] if r is None]
        failed += len(wrong)
        files = len({job.title for job in own})
        said = f"{len(ended)} ended or hung here and not in the command's own process"
        print(f"{format}: {files} files, {len(own)} calls, {len(wrong)} findings; {said}")
        print("".join(f"  {line}\n" for line in wrong), end="", flush=True)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
