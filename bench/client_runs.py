"""Run the programs of other runtimes for bench/clients.py, each in its own environment."""

import json
import os
import shutil
import subprocess
import venv
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Callable, Sequence

import numpy as np

from posenc_export.clients import program
from posenc_export.runtime import Manifest
from posenc_export.shared.numerics import worst_error

TOP = Path(__file__).parents[1]
PROGRAMS = TOP / "docs" / "runtimes"
PROMPT, COUNT = b"def read_lines(path):\n    with open(path) as file:\n  ", 32


class Refused(Exception):
    """Raised when a runtime cannot run an artefact; the message gives the reason."""


@dataclass(frozen=True)
class Trial:
    """One artefact with the expected results of a session, and a folder for temporary files."""

    artefact: Path  # the artefact folder
    manifest: Manifest  # manifest of the artefact
    tokens: np.ndarray  # prompt and greedy tokens of the session, [1,N] int64
    logits: np.ndarray  # logits of the session for all tokens but the last, [1,N-1,V]
    folder: Path  # temporary folder

    @property
    def continuation(self) -> list[int]:
        """Greedy tokens after the prompt."""
        return [int(token) for token in self.tokens[0, len(PROMPT) :]]


def finished(command: Sequence[object], trial: Trial) -> str:
    """Run a command and return its output. Refused: the command failed with a message that names an
    operator of the graph; RuntimeError: the command failed with another message.
    """
    environment = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
    how: Any = {"cwd": trial.folder, "env": environment, "capture_output": True, "text": True}
    done = subprocess.run([*map(str, command)], **how)
    if done.returncode == 0:
        return done.stdout
    message = done.stderr.partition("Stack backtrace")[0]
    operator = next((name for name in trial.manifest.operators if name in message), None)
    if operator is None:
        rule = f"{command[0]} to run {trial.manifest.target}"
        raise RuntimeError(f"clients: expected {rule}, got {done.stderr[-2000:]}")
    raise Refused(f"refuses {operator}")


def same_tokens(output: str, trial: Trial) -> None:
    """Compare printed tokens with those of the session. RuntimeError: they differ."""
    tokens = [int(token) for token in output.split()]
    if tokens != trial.continuation:
        raise RuntimeError(f"clients: expected tokens {trial.continuation}, got {tokens}")


def probed(language: str) -> Callable[[Trial, Path], float]:
    """Return a run of a Python program that compares logits from the last prompt token on."""

    def run(trial: Trial, environment: Path) -> float:
        names = ("program.py", "tokens.npy", "logits.npy")
        source, tokens, logits = (trial.folder / name for name in names)
        source.write_text(program(trial.manifest, language), encoding="utf-8")
        np.save(tokens, trial.tokens[:, :-1])
        command = [python_of(environment), TOP / "bench" / "clients_probe.py", source]
        finished([*command, trial.artefact, len(PROMPT), tokens, logits], trial)
        return worst_error(np.load(logits), trial.logits[:, len(PROMPT) - 1 :])

    return run


def generated(script: str) -> Callable[[Trial, Path], None]:
    """Return a run of a Python script of docs/runtimes that compares tokens."""

    def run(trial: Trial, environment: Path) -> None:
        command = [python_of(environment), PROGRAMS / script, trial.artefact, COUNT, *PROMPT]
        same_tokens(finished(command, trial), trial)

    return run


def in_node(script: str = "") -> Callable[[Trial, Path], None]:
    """Return a run in Node of a script of docs/runtimes, by default of the program that the package
    prints, that compares tokens.
    """

    def run(trial: Trial, environment: Path) -> None:
        (trial.folder / "node_modules").symlink_to((environment / "node_modules").resolve())
        path = PROGRAMS / script
        text = path.read_text(encoding="utf-8") if script else program(trial.manifest, "node")
        (trial.folder / "decode.mjs").write_text(text, encoding="utf-8")
        same_tokens(finished(["node", "decode.mjs", trial.artefact, COUNT, *PROMPT], trial), trial)

    return run


def compiled(language: str) -> Callable[[Trial, Path], None]:
    """Return a run of a C ("c") or C++ ("libtorch") program that compares tokens."""

    def run(trial: Trial, environment: Path) -> None:
        name = {"c": "decode.c", "libtorch": "decode.cpp"}[language]
        source, built = trial.folder / name, trial.folder / "decode"
        source.write_text(program(trial.manifest, language), encoding="utf-8")
        command = with_onnxruntime if language == "c" else with_libtorch
        compiler, *flags = command(trial.folder)
        finished([compiler, source, "-O2", "-o", built, *flags], trial)
        same_tokens(finished([built, trial.artefact, COUNT, *PROMPT], trial), trial)

    return run


def with_libtorch(_: Path) -> Sequence[object]:
    """Return the compiler and its flags for the headers and libraries of the torch wheel."""
    import torch

    place = Path(torch.__file__).parent
    include = [f"-I{place / folder}" for folder in ("include", "include/torch/csrc/api/include")]
    linked = [f"-L{place / 'lib'}", f"-Wl,-rpath,{place / 'lib'}", "-ltorch", "-ltorch_cpu"]
    return ["g++", "-std=c++20", *include, *linked, "-lc10"]


def with_onnxruntime(folder: Path) -> Sequence[object]:
    """Return compiler and flags for headers of POSENC_ORT_INCLUDE and the wheel's library."""
    import onnxruntime

    library = next((Path(onnxruntime.__file__).parent / "capi").glob("libonnxruntime.so.*"))
    for name in ("libonnxruntime.so", "libonnxruntime.so.1"):  # of an ONNX Runtime release
        (folder / name).unlink(missing_ok=True)
        (folder / name).symlink_to(library)
    include = f"-I{os.environ['POSENC_ORT_INCLUDE']}"
    return ["gcc", include, f"-L{folder}", f"-Wl,-rpath,{folder}", "-lonnxruntime", "-lm"]


def python_of(environment: Path) -> Path:
    return environment / "bin" / "python"


def installed(*packages: str) -> Callable[[Path], str]:
    """Return a function that creates an environment once, and returns its first version."""

    def version(environment: Path) -> str:
        if not environment.exists():
            venv.create(environment, with_pip=True)
            newest = {key: value for key, value in os.environ.items() if key != "PIP_CONSTRAINT"}
            pip = [python_of(environment), "-m", "pip", "--disable-pip-version-check"]
            subprocess.run([*pip, "install", "-q", *packages, "numpy"], check=True, env=newest)
        name = packages[0].partition("[")[0]
        code = f"import importlib.metadata; print(importlib.metadata.version({name!r}))"
        how: Any = {"capture_output": True, "text": True, "check": True}
        return str(subprocess.run([python_of(environment), "-c", code], **how).stdout.strip())

    return version


def of_node(package: str) -> Callable[[Path], str | None]:
    """Return a function that installs an npm package once, and returns its version or None."""

    def version(environment: Path) -> str | None:
        if shutil.which("node") is None or shutil.which("npm") is None:
            return None
        if not environment.exists():
            environment.mkdir(parents=True)
            # Without install scripts, because those of onnxruntime-node download GPU libraries.
            npm = ["npm", "install", "--ignore-scripts", "--no-audit", "--no-fund"]
            npm += ["--prefix", str(environment), package]
            subprocess.run(npm, check=True, stdout=subprocess.DEVNULL)
        described = environment / "node_modules" / package / "package.json"
        return str(json.loads(described.read_text(encoding="utf-8"))["version"])

    return version


def of_libtorch(environment: Path) -> str | None:
    import torch

    return str(torch.__version__).partition("+")[0] if shutil.which("g++") else None


def of_c_api(environment: Path) -> str | None:
    import onnxruntime

    present = "POSENC_ORT_INCLUDE" in os.environ and shutil.which("gcc")
    return str(onnxruntime.__version__) if present else None
