"""The eager module, run by the session of this package; rebuilt with the weights of an artefact, or
those of seed 0 for a checkpoint.
"""

from pathlib import Path
from typing import Mapping, Tuple, Union

import torch

from posenc_export.benchmark.opened import Opened
from posenc_export.export.describe import eager
from posenc_export.models import config_json, presets
from posenc_export.runtime import Model
from posenc_export.runtime.artefact.manifest import Manifest
from posenc_export.runtime.graphs.torch_graph import TorchGraph

RANDOM: Mapping[str, Union[str, int]] = {"seed": 0}
Weights = Mapping[str, Union[str, int]]


def open_session(folder: Path, manifest: Manifest, threads: int, batch: int) -> Opened:
    torch.set_num_threads(threads)
    model, weights = rebuilt(manifest)
    module, described = eager(model)
    return Opened(Model(TorchGraph(module, described)).session(batch), weights)


def rebuilt(manifest: Manifest) -> Tuple[presets.Model, Weights]:
    """Return the module in the artefact's dtype, and the origin of its weights."""
    weights = manifest.source if {"preset", "seed"} & set(manifest.source) else RANDOM
    model = presets.rebuild(config_json.from_json(manifest.config), weights, manifest.packages)
    return model.to(getattr(torch, manifest.dtype)), weights
