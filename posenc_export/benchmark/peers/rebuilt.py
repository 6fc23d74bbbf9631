"""The model of an artefact, rebuilt with its own weights, or those of seed 0 for a checkpoint."""

from typing import Mapping, Tuple, Union

import torch

from posenc_export.models import config_json, presets
from posenc_export.runtime.artefact.manifest import Manifest

RANDOM: Mapping[str, Union[str, int]] = {"seed": 0}
Weights = Mapping[str, Union[str, int]]


def rebuilt(manifest: Manifest) -> Tuple[presets.Model, Weights]:
    """Return the module in the artefact's dtype, and the origin of its weights."""
    weights = manifest.source if {"preset", "seed"} & set(manifest.source) else RANDOM
    model = presets.rebuild(config_json.from_json(manifest.config), weights, manifest.packages)
    return model.to(getattr(torch, manifest.dtype)), weights
