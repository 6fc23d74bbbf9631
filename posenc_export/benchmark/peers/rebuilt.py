"""The model of an artefact built anew from its description: with its own weights where they can be built again, otherwise with random ones of seed 0."""

from typing import Mapping, Tuple, Union

import torch

from posenc_export.models.config_json import from_json
from posenc_export.models.presets import Model, rebuild
from posenc_export.runtime.manifest import Manifest

RANDOM: Mapping[str, Union[str, int]] = {"seed": 0}
Weights = Mapping[str, Union[str, int]]


def rebuilt(manifest: Manifest) -> Tuple[Model, Weights]:
    """The module in the artefact's dtype, and where its weights come from."""
    weights = manifest.source if {"preset", "seed"} & set(manifest.source) else RANDOM
    return rebuild(from_json(manifest.config), weights, manifest.packages).to(getattr(torch, manifest.dtype)), weights
