"""Trained byte-level decoders of Python source code, from the package posenc-export-presets."""

from pathlib import Path
from typing import Any, Mapping

import torch
from safetensors.torch import load_file
from torch import Tensor

from posenc_export.encodings import KNOWN, Package
from posenc_export.models.block import AttentionBlock
from posenc_export.models.config import AnyConfig, BlockConfig, StackConfig
from posenc_export.models.randomness import drawn_from
from posenc_export.models.short_forms import block_config, decoder_config
from posenc_export.models.stack import Stack
from posenc_export.shared.allocation import enough_memory
from posenc_export.shared.preset_folders import INSTALL, preset_folder
from posenc_export.shared.refusal import refusal, short_repr
from posenc_export.shared.suggestion import check_name

Model = AttentionBlock | Stack
MODELS: dict[type[Any], type[Any]] = {BlockConfig: AttentionBlock, StackConfig: Stack}
# File beside the artefacts: parameters of encodings that a graph does not hold, because the
# optimizer of the exporter computes with them. Names are PRESET/PARAMETER.
FOLDED = "folded.safetensors"


def small(encoding: Mapping[str, Any], positions: int = 2048) -> StackConfig:
    """Return a decoder of bytes with 0.33 million parameters."""
    block = block_config(80, 5, positions, head_size=16, encoding=encoding)
    return decoder_config(256, 4, 216, block)


ROPE, ALIBI = {"name": "rope"}, {"name": "alibi"}
PRESETS: dict[str, StackConfig] = {
    "tiny-rope": decoder_config(256, 5, 352, block_config(128, 4, 4096, 2, 32, ROPE)),
    "tiny-alibi": decoder_config(256, 5, 352, block_config(128, 6, 4096, 3, 24, ALIBI)),
    "small-rope": small(ROPE),
    "small-alibi": small(ALIBI),
    "small-t5": small({"name": "t5"}),
    "small-fire": small({"name": "fire", "threshold": 64.0}),
}


def load_preset(name: str) -> Stack:
    """Load a trained decoder, float32, in eval mode.

    Raises:
        ValueError: an unknown preset, or weights that are not installed.
    """
    check_name("preset: expected name", name, PRESETS)
    folder = preset_folder(name)
    if folder is None:
        rule = "the package posenc-export-presets with its weights"
        raise refusal(f"preset {name}", rule, "none", INSTALL)
    weights, folded = graph_weights(folder / "model.onnx"), load_file(folder.parent / FOLDED)
    weights |= {key.removeprefix(f"{name}/"): value for key, value in folded.items()}
    model = Stack(PRESETS[name])
    with torch.no_grad():
        for names, parameter in named(model):
            stored = next((key for key in names if key in weights), None)
            if stored is None:
                rule, got = "all parameters of the model", f"none for {names[0]}"
                raise refusal(f"preset {name}", rule, got, INSTALL)
            parameter.copy_(weights[stored])
    model.source = {"preset": name}
    return model.eval()


def graph_weights(path: Path) -> dict[str, Tensor]:
    """Return the constants of a graph by parameter; matrices of products are transposed there."""
    import onnx

    weights = {}
    for tensor in onnx.load(path).graph.initializer:
        name, array = tensor.name.removeprefix("model."), onnx.numpy_helper.to_array(tensor)
        array = array.T if name.endswith(".T") else array
        weights[name.removesuffix(".T")] = torch.from_numpy(array.copy())
    return weights


def named(model: Stack) -> list[tuple[list[str], torch.nn.Parameter]]:
    """Return the parameters, each with all its names."""
    names: dict[int, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names.setdefault(id(parameter), []).append(name)
    return [(names[id(parameter)], parameter) for parameter in model.parameters()]


def seeded(config: AnyConfig, seed: int = 0) -> Model:
    """Build a model with random weights that depend only on the seed, float32, in eval mode.
    torch's default generator is left as it was.

    Raises:
        ValueError: no description, a seed below 0 or above 2^63 - 1, sizes that do not fit in
            memory.
    """
    if type(config) not in MODELS:
        raise refusal("model", "a description, as of decoder_config", short_repr(config))
    if not isinstance(seed, int) or not 0 <= seed < 1 << 63:
        raise refusal("model", "seed to be 0 .. 2^63 - 1", short_repr(seed))
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
    for name, package in packages.items():
        if name not in KNOWN:
            needed = Package(package.name, package.version)
            rule = f"{needed}, which defines it, to build the model again"
            alone = "use `posenc verify`, which needs the artefact alone"
            remedy = f"install {needed}, register the encoding, or {alone}"
            raise refusal(f"encoding {name}", rule, "no such encoding", remedy)
    if "preset" in source:
        return load_preset(source["preset"])
    if "seed" in source:
        return seeded(config, source["seed"])
    rule, remedy = "weights of a preset or a seed", "pass the model, as in verify(folder, model)"
    raise refusal("verify", f"{rule}, which can be rebuilt", "other weights", remedy)
