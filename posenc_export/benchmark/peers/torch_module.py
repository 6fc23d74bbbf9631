"""The eager module, run by the session of this package."""

from pathlib import Path
from typing import Any, Callable

import torch

from posenc_export.benchmark.opened import Opened
from posenc_export.benchmark.peers.rebuilt import rebuilt
from posenc_export.export.describe import eager
from posenc_export.runtime import Model
from posenc_export.runtime.artefact.manifest import Manifest
from posenc_export.runtime.graphs.torch_graph import TorchGraph


def open_session(folder: Path, manifest: Manifest, threads: int, batch: int) -> Opened:
    return opened(manifest, threads, batch, lambda module: module)


def opened(manifest: Manifest, threads: int, batch: int, finish: Callable[[Any], Any]) -> Opened:
    """Open a session on the module that `finish` returns, such as a compiled one."""
    torch.set_num_threads(threads)
    model, weights = rebuilt(manifest)
    module, described = eager(model)
    return Opened(Model(TorchGraph(finish(module), described)).session(batch), weights)
