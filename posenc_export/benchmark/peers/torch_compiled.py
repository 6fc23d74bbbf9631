"""The eager module compiled by torch.compile with dynamic sizes."""

from pathlib import Path

import torch

from posenc_export.benchmark.opened import Opened
from posenc_export.benchmark.peers.torch_module import opened
from posenc_export.runtime.artefact.manifest import Manifest


def open_session(folder: Path, manifest: Manifest, threads: int, batch: int) -> Opened:
    return opened(manifest, threads, batch, lambda module: torch.compile(module, dynamic=True))
