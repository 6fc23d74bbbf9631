"""Modules of TorchScript are audited as graphs in ONNX are."""

import subprocess
import sys
import warnings
from pathlib import Path
from typing import Optional

import pytest
import torch

from bench.audit_exporters import Wrapper
from posenc_export import audit
from tests.auditing.graphs import model_of

FAULTY = [None, "cache", "theta"]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("llama")
    model_of("llama").save_pretrained(folder)
    return folder


class OfPairs(torch.nn.Module):
    """A decoder whose caches are a tuple of keys and values for each layer."""

    def __init__(self, inner: torch.nn.Module, shift: int) -> None:
        super().__init__()
        self.inner, self.shift = inner, shift  # of values by slots

    def forward(self, input_ids, attention_mask, position_ids, past_key_values):  # type: ignore[no-untyped-def]
        past = [part for layer in past_key_values for part in layer]
        logits, *caches = self.inner(input_ids, attention_mask, position_ids, *past)
        values = [cache.roll(self.shift, 2) for cache in caches[1::2]]
        return logits, tuple(zip(caches[::2], values, strict=True))


def _check(file: Path, checkpoint: Path, fault: Optional[str]) -> None:
    """Audit a graph with a fault; a program repeats it."""
    result = audit(file, checkpoint, quick=True)
    if fault is None:
        assert result.right and any(c.status == "right" for c in result.cells), result.sentence
        return
    assert result.cause == fault, result.sentence
    repeat = file.with_name("repeat.py")
    repeat.write_text(result.program, "utf-8")
    ran = subprocess.run([sys.executable, repeat], capture_output=True, text=True)
    assert ran.returncode == 1 and "tolerance" in ran.stdout, ran.stderr


@pytest.mark.parametrize("fault", FAULTY)
def test_a_module_of_torchscript_is_audited(
    fault: Optional[str], checkpoint: Path, tmp_path: Path
) -> None:
    rotation = {"rope_type": "default", "rope_theta": 5e5 if fault == "theta" else 1e4}
    model = model_of("llama", rope_parameters=rotation)
    past = tuple((torch.randn(2, 2, 5, 8), torch.randn(2, 2, 5, 8)) for _ in range(2))
    ids, positions = torch.randint(3, 61, (2, 3)), torch.arange(5, 8).expand(2, 3).clone()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        inputs = (ids, torch.ones(2, 8, dtype=torch.int64), positions, past)
        wrapped = OfPairs(Wrapper(model), int(fault == "cache")).eval()
        traced = torch.jit.trace(wrapped, inputs, check_trace=False)
        traced.save(tmp_path / "model.pt")
    _check(tmp_path / "model.pt", checkpoint, fault)
