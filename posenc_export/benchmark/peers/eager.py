"""The eager module, run by the session of this package; rebuilt with the weights of an artefact, or
those of seed 0 for a checkpoint.
"""

from pathlib import Path

import torch

from posenc_export.export.describe import eager
from posenc_export.models import config_json, presets
from posenc_export.runtime import Model, Session
from posenc_export.runtime.artefact.manifest import Manifest
from posenc_export.runtime.graphs.torch_graph import TorchGraph

RANDOM = {"seed": 0}


def open_session(folder: Path, manifest: Manifest, threads: int, batch: int) -> Session:
    torch.set_num_threads(threads)
    module, described = eager(rebuilt(manifest))
    return Model(TorchGraph(module, described)).session(batch)


def rebuilt(manifest: Manifest) -> presets.Model:
    """Return the module in the artefact's dtype."""
    weights = manifest.source if {"preset", "seed"} & set(manifest.source) else RANDOM
    model = presets.rebuild(config_json.from_json(manifest.config), weights, manifest.packages)
    return model.to(getattr(torch, manifest.dtype))
