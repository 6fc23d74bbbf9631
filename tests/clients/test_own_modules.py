"""The printed programs run the artefacts of users' own modules: token ids of a small vocabulary,
hidden states of another width than the outputs, and those of README.md and docs/own-model.md.
"""

import functools
import itertools
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from posenc_export import load
from posenc_export.commands.cli import main
from posenc_export.export import ReadAs, Sources, export
from posenc_export.models.presets import seeded
from tests import pages_of_modules
from tests.cases import choice
from tests.clients.running import printed
from tests.pages_of_modules import COUNT, PAGES, PROMPT
from tests.tiny import block

pytestmark = pytest.mark.xdist_group("plain runtimes")
VOCABULARY, OUTPUTS, WIDTH = 5, 3, 12
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


STATED = ["ids", "states"]
ALL = [*STATED, *PAGES, *(f"{page} int8" for page in PAGES)]  # a page, or a page and a format


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


@pytest.mark.parametrize(
    ("reads", "read"), [("ids", "tokens segments 0, vocabulary 5"), ("states", "width 12")]
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
    assert "name tests.clients.test_own_modules.Own " in said and read in said
    assert "max_positions 300 " in said and "causal True " in said


QUICK = [("python", "onnx", reads) for reads in (*STATED, "README")]
QUICK += [("python", "ort", reads) for reads in ("docs", "README int8")]
CASES = [
    *choice(itertools.product(["python"], ["onnx", "ort"], ALL), QUICK),
    *(("reference", "onnx", reads) for reads in STATED),
    *(("openvino", "onnx", reads) for reads in STATED),
    *(("tract", "onnx", reads) for reads in STATED),
    *choice(itertools.product(["node", "c"], ["ort"], ALL), []),
    *choice([("libtorch", "torchscript", reads) for reads in (*STATED, *PAGES)], []),
]


@pytest.mark.parametrize(("language", "target", "reads"), CASES)
def test_a_printed_program_runs_an_own_module(
    language: str, target: str, reads: str, tmp_path: Path
) -> None:
    wanted = _wanted(_made(reads, target, tmp_path / "a"), reads)
    arguments = [COUNT, *PROMPT] if wanted.shape == (COUNT, 1) else []
    result = NUMBER.findall(printed(tmp_path, language, *arguments))
    assert np.allclose(np.array(result, float).reshape(wanted.shape), wanted, atol=1e-4)
