"""Trained decoders: byte-level models of Python source code. The package posenc-export-presets contains their weights."""

import importlib.util
from pathlib import Path
from typing import Any, Dict, Mapping, Optional, Type, Union

import torch
from safetensors.torch import load_file

from posenc_export.encodings import check_installed
from posenc_export.models.block import AttentionBlock
from posenc_export.models.config import AnyConfig, BlockConfig, StackConfig
from posenc_export.models.randomness import drawn_from
from posenc_export.models.short_forms import block_config, decoder_config
from posenc_export.models.stack import Stack
from posenc_export.shared.allocation import enough_memory
from posenc_export.shared.suggestion import suggestion

Model = Union[AttentionBlock, Stack]
MODELS: Dict[Type[Any], Type[Any]] = {BlockConfig: AttentionBlock, StackConfig: Stack}
PACKAGE = "posenc_export_presets"
SOURCE_TREE = Path(__file__).parents[2] / "packages" / "presets" / PACKAGE  # where training writes
TRAINED_LENGTH = 256  # tokens (bytes) of context in training


def small(encoding: Mapping[str, Any]) -> StackConfig:
    """Return the description of a decoder with 0.33 million parameters, which the study of length extrapolation trains with each encoding (bench/length_study.py)."""
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
    """Load a trained decoder, float32, in eval mode.

    Raises:
        ValueError: an unknown preset, or weights that are not installed.
    """
    if name not in PRESETS:
        raise ValueError(f"preset: expected name to be one of {', '.join(PRESETS)}, got {name!r}; {suggestion(name, PRESETS)}")
    path = weights_of(name)
    if path is None:
        remedy = "run pip install ./packages/presets in the source tree"
        raise ValueError(f"preset {name}: expected the package posenc-export-presets with its weights, got none; {remedy}")
    model = Stack(PRESETS[name])
    read(model, path)
    model.source = {"preset": name}
    return model.eval()


def weights_of(name: str) -> Optional[Path]:
    """Return the path of a preset's safetensors file, in the source tree or else in the installed package; None if there is none."""
    installed = importlib.util.find_spec(PACKAGE)
    folders = [SOURCE_TREE, *map(Path, installed.submodule_search_locations or ())] if installed else [SOURCE_TREE]
    return next((path for path in (folder / f"{name}.safetensors" for folder in folders) if path.is_file()), None)


def read(model: Stack, path: Path) -> None:
    """Copy weights that bench.train saved into `model`.

    Raises:
        ValueError: the names in the file differ from the model's parameters.
    """
    weights = load_file(path)
    wanted = dict(model.named_parameters())
    if set(weights) != set(wanted):
        found = ", ".join(sorted(set(weights) ^ set(wanted)))
        raise ValueError(f"weights {path.name}: expected the names of the model's parameters, got a difference in {found}; train the preset again")
    with torch.no_grad():
        for name, parameter in wanted.items():
            parameter.copy_(weights[name])


def seeded(config: AnyConfig, seed: int = 0) -> Model:
    """Build a model with random weights that depend only on the seed, float32, in eval mode. torch's default generator is left as it was.

    Raises:
        ValueError: a seed below 0 or above 2^63 - 1, sizes that do not fit in memory.
    """
    if not 0 <= seed < 1 << 63:
        raise ValueError(f"model: expected seed to be 0 .. 2^63 - 1, got {seed}")
    with drawn_from(seed), enough_memory("model"):
        model: Model = MODELS[type(config)](config)
    model.source = {"seed": seed}
    return model.eval()


def rebuild(config: AnyConfig, source: Mapping[str, Any], packages: Mapping[str, Any]) -> Model:
    """Rebuild a model that `load_preset` or `seeded` returned.

    Args:
        config: description of the model.
        source: attribute `source` of the model.
        packages: packages that define its encodings, from the manifest.

    Raises:
        ValueError: the model has other weights, or a package is not installed.
    """
    check_installed(packages)
    if "preset" in source:
        return load_preset(source["preset"])
    if "seed" in source:
        return seeded(config, source["seed"])
    raise ValueError("verify: expected weights of a preset or a seed, which can be rebuilt, got other weights; pass the model, as in verify(folder, model)")
