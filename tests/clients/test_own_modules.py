"""The printed programs run the artefacts of users' own modules: token ids of a small vocabulary,
hidden states of another width than the outputs, and those of README.md and docs/own-model.md.
"""

import functools
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from bench import client_runs
from posenc_export import load
from posenc_export.clients import program
from posenc_export.commands.cli import main
from posenc_export.export import ReadAs, Sources, export
from posenc_export.models.presets import seeded
from posenc_export.runtime.artefact import manifest as manifests
from tests import pages_of_modules
from tests.pages_of_modules import COUNT, PAGES, PROMPT
from tests.tiny import block

pytestmark = pytest.mark.xdist_group("plain runtimes")
VOCABULARY, OUTPUTS, WIDTH = 5, 3, 12
NODE = os.environ.get("POSENC_NODE_MODULES", "")  # a node_modules folder with onnxruntime-node
NUMBER = re.compile(r"-?\d+\.?\d*(?:e-?\d+)?")


class Own(torch.nn.Module):
    """Token ids or hidden states of 12 numbers to three numbers, with a block of this package."""

    def __init__(self, first: torch.nn.Module) -> None:
        super().__init__()
        self.first, self.block, self.head = (
            first,
            seeded(block("alibi")),
            torch.nn.Linear(48, OUTPUTS),
        )

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.block(self.first(x)))


@functools.cache
def _sources(reads: str) -> Sources:
    torch.manual_seed(3)
    ids = reads == "ids"
    first: Any = torch.nn.Embedding(VOCABULARY, 48) if ids else torch.nn.Linear(WIDTH, 48)
    example = torch.arange(10)[None] % VOCABULARY if ids else torch.randn(1, 10, WIDTH)
    return Sources(Own(first).eval(), how=ReadAs(example, 300))


ALL = ["ids", "states", *PAGES, *(f"{page} int8" for page in PAGES)]  # a page, or page and format


def _made(reads: str, target: str, folder: Path) -> Path:
    page, _, weights = reads.partition(" ")
    source = pages_of_modules.sources(page) if page in PAGES else _sources(reads)
    export(source, target, folder, verify=False, weights=weights or None)
    return folder


def _wanted(folder: Path, reads: str) -> np.ndarray:
    """Return what a program prints: the tokens that follow a prompt; of a module without logits,
    after each call the number of tokens and the outputs of the last of them.
    """
    session, rows, held = load(folder, provider="cpu").session(), [], 0
    if session.manifest.decodes:
        return np.array(list(session.generate([PROMPT], COUNT)))
    for new in (8, 1, 1, 1):
        tokens = np.arange(held, held + new)
        x = (
            tokens[None] % VOCABULARY
            if reads == "ids"
            else np.sin(np.outer(tokens + 1, np.arange(WIDTH) + 1))[None].astype(np.float32)
        )
        held += new
        rows.append([held, *session.prefill(x)[0, -1]])
    return np.array(rows)


def _compare(folder: Path, reads: str, *command: str) -> None:
    """Run a program in the folder that holds the artefact "a", and compare what it prints."""
    wanted = _wanted(folder, reads)
    decodes = wanted.shape == (COUNT, 1)
    arguments = ["a", *map(str, [COUNT, *PROMPT] if decodes else [])]
    printed = NUMBER.findall(_run(*command, *arguments, folder=folder.parent))
    assert np.allclose(np.array(printed, float).reshape(wanted.shape), wanted, atol=1e-4)


def _run(*command: object, folder: Path) -> str:
    return subprocess.run(
        [*map(str, command)], cwd=folder, capture_output=True, text=True, check=True
    ).stdout


def _written(folder: Path, language: str, name: str) -> str:
    (folder / name).write_text(program(manifests.read(folder / "a"), language))
    return name


@pytest.mark.parametrize(
    ("reads", "read"), [("ids", "5 token ids"), ("states", "hidden states of width 12")]
)
def test_inspect_describes_an_own_module(
    reads: str, read: str, tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    _made(reads, "onnx", tmp_path / "a")
    assert main(["inspect", str(tmp_path / "a")]) == 0
    said = " ".join(capsys.readouterr().out.split())
    assert (
        "encoding in the module's own code sizes layers 1, " in said
        and "outputs 3, a step reads " in said
        and "The output of the module's forward." in said
    )
    assert (
        f"module tests.clients.test_own_modules.Own, reads {read}, 300 positions, causal, outputs 3"
    ) in said


@pytest.mark.parametrize("reads", ALL)
@pytest.mark.parametrize("target", ["onnx", "ort"])
def test_the_python_program_runs_an_own_module(reads: str, target: str, tmp_path: Path) -> None:
    folder = _made(reads, target, tmp_path / "a")
    _compare(folder, reads, sys.executable, _written(tmp_path, "python", "run.py"))


@pytest.mark.parametrize("reads", ["ids", "states"])
def test_the_program_for_the_reference_evaluator_runs_an_own_module(
    reads: str, tmp_path: Path
) -> None:
    folder = _made(reads, "onnx", tmp_path / "a")
    _compare(folder, reads, sys.executable, _written(tmp_path, "reference", "run.py"))


@pytest.mark.parametrize("reads", ["ids", "states"])
@pytest.mark.parametrize("language", ["openvino", "tract"])
def test_the_program_for_a_library_runs_an_own_module(
    reads: str, language: str, tmp_path: Path
) -> None:
    pytest.importorskip(language, reason=f"{language} is not installed")
    folder = _made(reads, "onnx", tmp_path / "a")
    _compare(folder, reads, sys.executable, _written(tmp_path, language, "run.py"))


@pytest.mark.exhaustive
@pytest.mark.skipif(
    not NODE or shutil.which("node") is None, reason="node or onnxruntime-node is not installed"
)
@pytest.mark.parametrize("reads", ALL)
def test_the_node_program_runs_an_own_module(reads: str, tmp_path: Path) -> None:
    folder = _made(reads, "ort", tmp_path / "a")
    (tmp_path / "node_modules").symlink_to(NODE)
    _compare(folder, reads, "node", _written(tmp_path, "node", "run.mjs"))


@pytest.mark.exhaustive
@pytest.mark.skipif(
    "POSENC_ORT_INCLUDE" not in os.environ,
    reason="POSENC_ORT_INCLUDE names no headers of ONNX Runtime",
)
@pytest.mark.parametrize("reads", ALL)
def test_the_program_in_c_runs_an_own_module(reads: str, tmp_path: Path) -> None:
    folder = _made(reads, "ort", tmp_path / "a")
    compiler, *flags = client_runs.with_onnxruntime(tmp_path)
    _run(compiler, _written(tmp_path, "c", "run.c"), "-o", "run", *flags, folder=tmp_path)
    _compare(folder, reads, "./run")


@pytest.mark.exhaustive
@pytest.mark.skipif(shutil.which("g++") is None, reason="g++ is not installed")
@pytest.mark.parametrize("reads", ["ids", "states", *PAGES])
def test_the_program_for_libtorch_runs_an_own_module(reads: str, tmp_path: Path) -> None:
    folder = _made(reads, "torchscript", tmp_path / "a")
    compiler, *flags = client_runs.with_libtorch(tmp_path)
    _run(compiler, _written(tmp_path, "libtorch", "run.cpp"), "-o", "run", *flags, folder=tmp_path)
    _compare(folder, reads, "./run")
