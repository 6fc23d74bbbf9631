"""Run the programs that `posenc inspect --runtime` prints, in their languages."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from bench import client_runs
from posenc_export.clients import program
from posenc_export.runtime.artefact import manifest as manifests

NODE = os.environ.get("POSENC_NODE_MODULES", "")  # a node_modules folder with onnxruntime-node
HEADERS = "POSENC_ORT_INCLUDE"
MISSING = {
    "node": (not NODE or not shutil.which("node"), "node or onnxruntime-node is not installed"),
    "c": (HEADERS not in os.environ, f"{HEADERS} names no headers of ONNX Runtime"),
    "libtorch": (not shutil.which("g++"), "g++ is not installed"),
}
FILES = {"node": "run.mjs", "c": "run.c", "libtorch": "run.cpp"}


def run(folder: Path, *command: object) -> str:
    """Return what a command prints that runs in a folder."""
    words = [*map(str, command)]
    return subprocess.run(words, cwd=folder, capture_output=True, text=True, check=True).stdout


def printed(folder: Path, language: str, *arguments: object) -> str:
    """Return what the program for the artefact folder/a prints; skip without its runtime."""
    missing, reason = MISSING.get(language, (False, ""))
    if missing:
        pytest.skip(reason)
    if language in ("openvino", "tract"):
        pytest.importorskip(language, reason=f"{language} is not installed")
    name = FILES.get(language, "run.py")
    (folder / name).write_text(program(manifests.read(folder / "a"), language))
    if name == "run.py":
        return run(folder, sys.executable, name, "a", *arguments)
    if language == "node":
        (folder / "node_modules").symlink_to(NODE)
        return run(folder, "node", name, "a", *arguments)
    library = client_runs.with_onnxruntime if language == "c" else client_runs.with_libtorch
    compiler, *flags = library(folder)
    run(folder, compiler, name, "-o", "run", *flags)
    return run(folder, "./run", "a", *arguments)
