"""Trained decoders, byte-level models of Python source; their weights are the package posenc-export-presets."""

import importlib.util
from pathlib import Path
from typing import Any, Dict, Mapping, Optional, Type, Union

import torch
from safetensors.torch import load_file

from posenc_export.allocation import enough_memory
from posenc_export.encodings import check_installed
from posenc_export.models.block import AttentionBlock
from posenc_export.models.config import AnyConfig, BlockConfig, StackConfig
from posenc_export.models.short import block_config, decoder_config
from posenc_export.models.stack import Stack

Model = Union[AttentionBlock, Stack]
MODELS: Dict[Type[Any], Type[Any]] = {BlockConfig: AttentionBlock, StackConfig: Stack}
PACKAGE = "posenc_export_presets"
IN_THE_TREE = Path(__file__).parents[2] / "packages" / "presets" / PACKAGE  # where training writes
TRAINED_LENGTH = 256  # tokens (bytes) of context in training


def small(encoding: Mapping[str, Any]) -> StackConfig:
    """The decoder of 0.33 million parameters that the study of length extrapolation trains with each encoding (bench/length_study.py)."""
    return decoder_config(256, 4, 216, block_config(80, 5, 2048, head_size=16, encoding=encoding))


PRESETS: Dict[str, StackConfig] = {
    "tiny-rope": decoder_config(256, 5, 352, block_config(128, 4, 4096, kv_heads=2, head_size=32, encoding={"name": "rope"})),
    "tiny-alibi": decoder_config(256, 5, 352, block_config(128, 6, 4096, kv_heads=3, head_size=24, encoding={"name": "alibi"})),
    "small-rope": small({"name": "rope"}),
    "small-alibi": small({"name": "alibi"}),
    "small-t5": small({"name": "t5"}),
    "small-fire": small({"name": "fire", "threshold": 64.0}),
}


def load_preset(name: str) -> Stack:
    """A trained decoder, float32, in eval mode.

    Raises:
        ValueError: no preset of that name, weights that are not installed.
    """
    if name not in PRESETS:
        raise ValueError(f"preset: name is one of {', '.join(PRESETS)}, got {name!r}")
    path = weights_of(name)
    if path is None:
        remedy = "pip install ./packages/presets in the source tree, which has them"
        raise ValueError(f"preset {name}: expected its weights, package posenc-export-presets, to be installed, got none; {remedy}")
    model = Stack(PRESETS[name])
    read(model, path)
    model.source = {"preset": name}
    return model.eval()


def weights_of(name: str) -> Optional[Path]:
    """The safetensors file of a preset: that of the source tree, else that of the installed package, else None."""
    installed = importlib.util.find_spec(PACKAGE)
    folders = [IN_THE_TREE, *map(Path, installed.submodule_search_locations or ())] if installed else [IN_THE_TREE]
    return next((path for path in (folder / f"{name}.safetensors" for folder in folders) if path.is_file()), None)


def read(model: Stack, path: Path) -> None:
    """Weights as models.train saves them, each once, into `model`.

    Raises:
        ValueError: names that the model does not have, or lacks.
    """
    weights = load_file(path)
    wanted = dict(model.named_parameters())
    if set(weights) != set(wanted):
        raise ValueError(f"weights {path.name}: names are those of the model, got a difference in {', '.join(sorted(set(weights) ^ set(wanted)))}")
    with torch.no_grad():
        for name, parameter in wanted.items():
            parameter.copy_(weights[name])


def seeded(config: AnyConfig, seed: int = 0) -> Model:
    """A model with random weights, the same for the same seed, float32, in eval mode.

    Raises:
        ValueError: a seed that is negative or beyond 64 bits, sizes beyond the memory.
    """
    if not 0 <= seed < 1 << 63:
        raise ValueError(f"model: seed is 0 .. 2^63 - 1, got {seed}")
    torch.manual_seed(seed)
    with enough_memory("model"):
        model: Model = MODELS[type(config)](config)
    model.source = {"seed": seed}
    return model.eval()


def rebuild(config: AnyConfig, source: Mapping[str, Any], packages: Mapping[str, Any]) -> Model:
    """The model that `load_preset` or `seeded` gave, from its source.

    Args:
        packages: of its encodings, as the manifest has them.

    Raises:
        ValueError: the model was neither; give the model itself. A package that is missing.
    """
    check_installed(packages)
    if "preset" in source:
        return load_preset(source["preset"])
    if "seed" in source:
        return seeded(config, source["seed"])
    raise ValueError("verify: the artefact tells how to rebuild its weights, got a model of the user's own; pass it as verify(folder, model)")
