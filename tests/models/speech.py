"""Small encoders of sound, called with token ids like other encoders: an id stands for samples."""

from types import SimpleNamespace
from typing import Any, Dict, Mapping, Optional, Sequence

import numpy as np
import torch

from posenc_export.models.parts.waveform import window
from posenc_export.runtime import Session

SPEECH = ("wav2vec2", "hubert")
SOUND = {
    "conv_dim": [16, 24, 16],
    "conv_kernel": [10, 3, 2],
    "conv_stride": [5, 2, 2],
    "num_conv_pos_embeddings": 6,
    "num_conv_pos_embedding_groups": 4,
}
OTHER = {
    **SOUND,
    "feat_extract_norm": "layer",
    "conv_bias": True,
    "do_stable_layer_norm": True,
    "num_conv_pos_embeddings": 5,
}
MODELS: Dict[str, Dict[str, Any]] = {
    "wav2vec2": SOUND,
    "wav2vec2 stable": OTHER,
    "hubert": {**SOUND, "do_stable_layer_norm": True, "hidden_act": "relu"},
    "hubert other": {**OTHER, "do_stable_layer_norm": False, "feat_proj_layer_norm": False},
}
CONFIGS = {"wav2vec2": "Wav2Vec2Config", "hubert": "HubertConfig"}


def _sound(ids: np.ndarray, convolutions: Sequence[Sequence[int]]) -> np.ndarray:
    """Return samples that give one token for each id."""
    size, step = window(convolutions)
    samples = [np.random.default_rng(int(index)).standard_normal(step) for index in ids]
    end = np.random.default_rng(99).standard_normal(size - step)
    return np.concatenate([*samples, end]).astype(np.float32)


def inputs_of(
    session: Session, tokens: np.ndarray, mask: Optional[np.ndarray] = None
) -> np.ndarray:
    """Return what a session reads for token ids [B,S]: the ids, or windows of samples [B,S,F], with
    large numbers at padding.
    """
    features: Mapping[str, Any] = session.manifest.config["tokens"].get("features") or {}
    if not features:
        return tokens
    size, step = window(features["convolutions"])
    inputs = np.full((*tokens.shape, size), 1e4, np.float32)
    seen = np.ones_like(tokens) if mask is None else mask
    for row, ids, inside in zip(inputs, tokens, seen == 1, strict=True):
        sound = _sound(ids[inside], features["convolutions"])
        row[inside] = np.lib.stride_tricks.sliding_window_view(sound, size)[::step]
    return inputs


class Peer:
    """Transformers' model, called with token ids. It reads each row alone, since its norm over time
    counts padding, which may only be behind a row.
    """

    def __init__(self, model: Any) -> None:
        self.model, self.config = model, model.config
        self.save_pretrained = model.save_pretrained

    def __call__(self, tokens: torch.Tensor, attention_mask: Any = None) -> SimpleNamespace:
        config, rows = self.config, []
        sizes = zip(config.conv_dim, config.conv_kernel, config.conv_stride, strict=True)
        convolutions = [list(of_layer) for of_layer in sizes]
        seen = torch.ones_like(tokens) if attention_mask is None else attention_mask
        for ids, inside in zip(tokens, seen == 1, strict=True):
            result = self.model(torch.from_numpy(_sound(ids[inside].numpy(), convolutions))[None])
            output = getattr(result, "logits", getattr(result, "last_hidden_state", None))[0]
            if output.dim() == 2:
                row = torch.zeros(len(ids), output.size(1))
                row[inside] = output
                output = row
            rows.append(output)
        whole = torch.stack(rows)
        return SimpleNamespace(last_hidden_state=whole, logits=whole)
