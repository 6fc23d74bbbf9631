"""The eager module, run by the session of this package."""

from pathlib import Path

import torch

from posenc_export.benchmark.opened import Opened
from posenc_export.benchmark.peers.rebuilt import rebuilt
from posenc_export.export.describe import eager
from posenc_export.runtime import Model
from posenc_export.runtime.artefact.manifest import Manifest
from posenc_export.runtime.graphs.torch_graph import TorchGraph


def open_session(folder: Path, manifest: Manifest, threads: int, batch: int) -> Opened:
    torch.set_num_threads(threads)
    model, weights = rebuilt(manifest)
    module, described = eager(model)
    return Opened(Model(TorchGraph(module, described)).session(batch), weights)
