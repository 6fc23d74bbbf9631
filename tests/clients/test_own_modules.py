"""The printed programs run the artefacts of users' own modules: token ids of a small vocabulary,
or hidden states of another width than the outputs.
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


def _made(reads: str, target: str, folder: Path) -> Path:
    export(_sources(reads), target, folder, verify=False)
    return folder


def _wanted(folder: Path, reads: str) -> np.ndarray:
    """Return what a program prints: after each call the number of tokens and the outputs of the
    last of them.
    """
    session, rows, held = load(folder, provider="cpu").session(), [], 0
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


def _compare(printed: str, folder: Path, reads: str) -> None:
    result = np.array([float(number) for number in NUMBER.findall(printed)]).reshape(4, 1 + OUTPUTS)
    assert np.allclose(result, _wanted(folder, reads), atol=1e-4)


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


@pytest.mark.parametrize("reads", ["ids", "states"])
@pytest.mark.parametrize("target", ["onnx", "ort"])
def test_the_python_program_runs_an_own_module(reads: str, target: str, tmp_path: Path) -> None:
    folder = _made(reads, target, tmp_path / "a")
    _compare(
        _run(sys.executable, _written(tmp_path, "python", "run.py"), "a", folder=tmp_path),
        folder,
        reads,
    )


@pytest.mark.parametrize("reads", ["ids", "states"])
def test_the_program_for_the_reference_evaluator_runs_an_own_module(
    reads: str, tmp_path: Path
) -> None:
    folder = _made(reads, "onnx", tmp_path / "a")
    _compare(
        _run(sys.executable, _written(tmp_path, "reference", "run.py"), "a", folder=tmp_path),
        folder,
        reads,
    )


@pytest.mark.parametrize("reads", ["ids", "states"])
@pytest.mark.parametrize("language", ["openvino", "tract"])
def test_the_program_for_a_library_runs_an_own_module(
    reads: str, language: str, tmp_path: Path
) -> None:
    pytest.importorskip(language, reason=f"{language} is not installed")
    folder = _made(reads, "onnx", tmp_path / "a")
    _compare(
        _run(sys.executable, _written(tmp_path, language, "run.py"), "a", folder=tmp_path),
        folder,
        reads,
    )


@pytest.mark.exhaustive
@pytest.mark.skipif(
    not NODE or shutil.which("node") is None, reason="node or onnxruntime-node is not installed"
)
@pytest.mark.parametrize("reads", ["ids", "states"])
def test_the_node_program_runs_an_own_module(reads: str, tmp_path: Path) -> None:
    folder = _made(reads, "ort", tmp_path / "a")
    (tmp_path / "node_modules").symlink_to(NODE)
    _compare(
        _run("node", _written(tmp_path, "node", "run.mjs"), "a", folder=tmp_path), folder, reads
    )


@pytest.mark.exhaustive
@pytest.mark.skipif(
    "POSENC_ORT_INCLUDE" not in os.environ,
    reason="POSENC_ORT_INCLUDE names no headers of ONNX Runtime",
)
@pytest.mark.parametrize("reads", ["ids", "states"])
def test_the_program_in_c_runs_an_own_module(reads: str, tmp_path: Path) -> None:
    folder = _made(reads, "ort", tmp_path / "a")
    compiler, *flags = client_runs.with_onnxruntime(tmp_path)
    _run(compiler, _written(tmp_path, "c", "run.c"), "-o", "run", *flags, folder=tmp_path)
    _compare(_run("./run", "a", folder=tmp_path), folder, reads)


@pytest.mark.exhaustive
@pytest.mark.skipif(shutil.which("g++") is None, reason="g++ is not installed")
@pytest.mark.parametrize("reads", ["ids", "states"])
def test_the_program_for_libtorch_runs_an_own_module(reads: str, tmp_path: Path) -> None:
    folder = _made(reads, "torchscript", tmp_path / "a")
    compiler, *flags = client_runs.with_libtorch(tmp_path)
    _run(compiler, _written(tmp_path, "libtorch", "run.cpp"), "-o", "run", *flags, folder=tmp_path)
    _compare(_run("./run", "a", folder=tmp_path), folder, reads)
