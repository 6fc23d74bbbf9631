"""Trained decoders that ship with the package: byte-level models of Python source."""

from pathlib import Path
from typing import Dict

import torch
from safetensors.torch import load_file

from posenc_export.models.config import AttentionConfig, DecoderConfig
from posenc_export.models.decoder import Decoder

FOLDER = Path(__file__).parent / "presets"
TRAINED_LENGTH = 256  # tokens (bytes) of context in training

PRESETS: Dict[str, DecoderConfig] = {
    "tiny-rope": DecoderConfig(256, 5, 352, AttentionConfig(128, 4, 4096, kv_heads=2, head_size=32, encoding={"name": "rope"})),
    "tiny-alibi": DecoderConfig(256, 5, 352, AttentionConfig(128, 6, 4096, kv_heads=3, head_size=24, encoding={"name": "alibi"})),
}


def load_preset(name: str) -> Decoder:
    """A trained decoder, float32, in eval mode.

    Raises:
        ValueError: no preset of that name.
    """
    if name not in PRESETS:
        raise ValueError(f"preset: name is one of {', '.join(PRESETS)}, got {name!r}")
    model = Decoder(PRESETS[name])
    weights = load_file(FOLDER / f"{name}.safetensors")
    if model.config.tied:
        weights["head.weight"] = weights["embedding.weight"]
    model.load_state_dict(weights)
    return model.eval()
