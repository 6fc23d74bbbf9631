"""The model of an artefact, rebuilt with its own weights, or those of seed 0 for a checkpoint."""

from typing import Mapping, Tuple, Union

import torch

from posenc_export.models.config_json import from_json
from posenc_export.models.presets import Model, rebuild
from posenc_export.runtime.artefact.manifest import Manifest

RANDOM: Mapping[str, Union[str, int]] = {"seed": 0}
Weights = Mapping[str, Union[str, int]]


def rebuilt(manifest: Manifest) -> Tuple[Model, Weights]:
    """Return the module in the artefact's dtype, and the origin of its weights."""
    weights = manifest.source if {"preset", "seed"} & set(manifest.source) else RANDOM
    model = rebuild(from_json(manifest.config), weights, manifest.packages)
    return model.to(getattr(torch, manifest.dtype)), weights
