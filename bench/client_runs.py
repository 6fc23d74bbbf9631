"""How bench/clients.py runs the programs of other runtimes: in an environment of their own, as a process, on one artefact."""

import json
import os
import shutil
import subprocess
import venv
from dataclasses import dataclass
from pathlib import Path
from typing import Callable, List, Optional, Sequence

import numpy as np

from posenc_export.clients import program
from posenc_export.numerics import worst_error
from posenc_export.runtime import Manifest

TOP = Path(__file__).parents[1]
PROGRAMS = TOP / "docs" / "runtimes"
PROMPT, COUNT = b"def read_lines(path):\n    with open(path) as file:\n  ", 32


class Refused(Exception):
    """The runtime does not take the artefact; the text says why."""


@dataclass(frozen=True)
class Trial:
    """One artefact, what a session gives for it, and a folder for files.

    Args:
        tokens: prompt and the session's greedy tokens [1,N].
        logits: the session's, for all but the last of them.
    """

    artefact: Path
    manifest: Manifest
    tokens: np.ndarray
    logits: np.ndarray
    folder: Path

    @property
    def made(self) -> List[int]:
        """The greedy tokens."""
        return [int(token) for token in self.tokens[0, len(PROMPT) :]]


def finished(command: Sequence[object], trial: Trial) -> str:
    """The output of a command.

    Raises:
        Refused: it names an operator of the graph in its error.
        RuntimeError: any other error.
    """
    environment = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
    done = subprocess.run([*map(str, command)], cwd=trial.folder, env=environment, capture_output=True, text=True)
    if done.returncode == 0:
        return done.stdout
    said = done.stderr.partition("Stack backtrace")[0]
    operator = next((name for name in trial.manifest.operators if name in said), None)
    if operator is None:
        raise RuntimeError(f"clients: expected {command[0]} to run {trial.manifest.target}, got {done.stderr[-2000:]}")
    raise Refused(f"refuses {operator}")


def same_tokens(output: str, trial: Trial) -> None:
    """Compare the tokens that a program printed.

    Raises:
        RuntimeError: they differ.
    """
    made = [int(token) for token in output.split()]
    if made != trial.made:
        raise RuntimeError(f"clients: expected tokens {trial.made}, got {made}")


def probed(language: str) -> Callable[[Trial, Path], float]:
    """The logits of a program in Python, of the last token of the prompt and of each one behind it."""

    def run(trial: Trial, environment: Path) -> float:
        source, tokens, logits = (trial.folder / name for name in ("program.py", "tokens.npy", "logits.npy"))
        source.write_text(program(trial.manifest, language), encoding="utf-8")
        np.save(tokens, trial.tokens[:, :-1])
        finished([python_of(environment), TOP / "bench" / "clients_probe.py", source, trial.artefact, len(PROMPT), tokens, logits], trial)
        return worst_error(np.load(logits), trial.logits[:, len(PROMPT) - 1 :])

    return run


def generated(script: str) -> Callable[[Trial, Path], None]:
    """The tokens of a script of docs/runtimes in Python."""

    def run(trial: Trial, environment: Path) -> None:
        same_tokens(finished([python_of(environment), PROGRAMS / script, trial.artefact, COUNT, *PROMPT], trial), trial)

    return run


def in_node(write: Callable[[Trial], str]) -> Callable[[Trial, Path], None]:
    """The tokens of a program in Node."""

    def run(trial: Trial, environment: Path) -> None:
        (trial.folder / "node_modules").symlink_to((environment / "node_modules").resolve())
        (trial.folder / "decode.mjs").write_text(write(trial), encoding="utf-8")
        same_tokens(finished(["node", "decode.mjs", trial.artefact, COUNT, *PROMPT], trial), trial)

    return run


def compiled(language: str, command: Callable[[Path], Sequence[object]], suffix: str) -> Callable[[Trial, Path], None]:
    """The tokens of a program in C or C++."""

    def run(trial: Trial, environment: Path) -> None:
        source = trial.folder / f"decode.{suffix}"
        source.write_text(program(trial.manifest, language), encoding="utf-8")
        finished([*command(trial.folder)[:1], source, "-O2", "-o", trial.folder / "decode", *command(trial.folder)[1:]], trial)
        same_tokens(finished([trial.folder / "decode", trial.artefact, COUNT, *PROMPT], trial), trial)

    return run


def with_libtorch(folder: Path) -> Sequence[object]:
    """Compiler and flags for the headers and libraries of the torch wheel."""
    import torch

    place = Path(torch.__file__).parent
    include = [f"-I{place / 'include'}", f"-I{place / 'include/torch/csrc/api/include'}"]
    return ["g++", "-std=c++20", *include, f"-L{place / 'lib'}", f"-Wl,-rpath,{place / 'lib'}", "-ltorch", "-ltorch_cpu", "-lc10"]


def with_onnxruntime(folder: Path) -> Sequence[object]:
    """Compiler and flags for the headers of POSENC_ORT_INCLUDE and the library of the onnxruntime wheel."""
    import onnxruntime

    library = next((Path(onnxruntime.__file__).parent / "capi").glob("libonnxruntime.so.*"))
    for name in ("libonnxruntime.so", "libonnxruntime.so.1"):  # as a release has it
        (folder / name).unlink(missing_ok=True)
        (folder / name).symlink_to(library)
    return ["gcc", f"-I{os.environ['POSENC_ORT_INCLUDE']}", f"-L{folder}", f"-Wl,-rpath,{folder}", "-lonnxruntime"]


def python_of(environment: Path) -> Path:
    return environment / "bin" / "python"


def installed(*packages: str) -> Callable[[Path], str]:
    """The version of the first package, all of which are installed where the environment is missing."""

    def version(environment: Path) -> str:
        if not environment.exists():
            venv.create(environment, with_pip=True)
            newest = {key: value for key, value in os.environ.items() if key != "PIP_CONSTRAINT"}
            subprocess.run([python_of(environment), "-m", "pip", "install", "-q", "--disable-pip-version-check", *packages, "numpy"], check=True, env=newest)
        name = packages[0].partition("[")[0]
        code = f"import importlib.metadata; print(importlib.metadata.version({name!r}))"
        return subprocess.run([python_of(environment), "-c", code], capture_output=True, text=True, check=True).stdout.strip()

    return version


def of_node(package: str) -> Callable[[Path], Optional[str]]:
    """The version of a package of npm, which is installed where the environment is missing."""

    def version(environment: Path) -> Optional[str]:
        if shutil.which("node") is None or shutil.which("npm") is None:
            return None
        if not environment.exists():
            environment.mkdir(parents=True)
            # Without scripts: those of onnxruntime-node fetch libraries for GPUs.
            subprocess.run(["npm", "install", "--ignore-scripts", "--no-audit", "--no-fund", "--prefix", environment, package], check=True, stdout=subprocess.DEVNULL)
        return str(json.loads((environment / "node_modules" / package / "package.json").read_text(encoding="utf-8"))["version"])

    return version


def of_libtorch(environment: Path) -> Optional[str]:
    import torch

    return str(torch.__version__).partition("+")[0] if shutil.which("g++") else None


def of_c_api(environment: Path) -> Optional[str]:
    import onnxruntime

    return str(onnxruntime.__version__) if "POSENC_ORT_INCLUDE" in os.environ and shutil.which("gcc") else None
