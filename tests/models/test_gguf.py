"""GGUF files are read as the models that they were written from."""

from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("gguf", reason="gguf is not installed")
pytest.importorskip("transformers", reason="transformers is not installed")
from posenc_export.models.pretrained import from_pretrained  # noqa: E402
from tests.models import gguf_files  # noqa: E402

NORMS_MOVED = 2.0**-22  # 1 is added to these norms and subtracted again, in float32


@pytest.mark.parametrize("name", gguf_files.MODELS)
def test_a_gguf_file_gives_the_model_it_was_written_from(name: str, tmp_path: Path) -> None:
    peer = gguf_files.made(name)
    peer.save_pretrained(tmp_path / "folder")
    gguf_files.write(name, peer, tmp_path / "model.gguf")
    wanted, found = (from_pretrained(tmp_path / place) for place in ("folder", "model.gguf"))
    assert found.config == wanted.config
    _same(found, wanted, NORMS_MOVED if name.startswith("gemma") else 0.0)


def _same(found: Any, wanted: Any, error: float) -> None:
    parameters = dict(wanted.named_parameters())
    assert {name: (one - parameters[name]).abs().max().item() <= error for name, one in found.named_parameters()} == dict.fromkeys(parameters, True)
    assert all(torch.isfinite(one).all() for one in parameters.values())
