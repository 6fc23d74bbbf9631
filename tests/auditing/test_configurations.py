"""Faults in configurations of transformers: each changes outputs, and leaves the model as it is."""

from pathlib import Path
from typing import Any

import pytest
import torch

from posenc_export.auditing import configurations
from posenc_export.models.pretrained import from_pretrained

pytest.importorskip("transformers", reason="transformers is not installed")
from tests.auditing.graphs import model_of

YARN: dict[str, Any] = {
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": 4.0,
    "original_max_position_embeddings": 16,
}
CAUSES: dict[str, set[str]] = {
    "mistral": {"window ignored", "window off by one", "theta", "encoding dropped", "scale"},
    "llama": {"theta", "encoding dropped", "scale"},
    "llama with yarn": {"theta", "scaling of angles ignored", "encoding dropped", "scale"},
    "bloom": set(),
}


@pytest.mark.parametrize("name", CAUSES)
def test_each_fault_changes_the_outputs_of_a_copy_alone(name: str, tmp_path: Path) -> None:
    kind, _, scaled = name.partition(" with ")
    theirs = model_of(kind)
    if scaled:
        theirs.config.rope_parameters = YARN
    theirs.save_pretrained(tmp_path)
    model, ids = from_pretrained(tmp_path, 64), torch.randint(3, 61, (2, 20))
    with torch.no_grad():
        before, found = model(ids), set()
        for fault, other in configurations.with_faults(model):
            found.add(fault.cause)
            assert not torch.allclose(other(ids), before, rtol=0, atol=1e-6), fault.words
            ours = {weight.data_ptr() for weight in model.parameters()}
            assert {weight.data_ptr() for weight in other.parameters()} == ours
        assert torch.equal(model(ids), before)
    assert found == CAUSES[name]
