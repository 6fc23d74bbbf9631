"""Small encoders of sound, called with token ids like other encoders: an id stands for samples, or
for a frame of a spectrogram.
"""

from types import SimpleNamespace
from typing import Any, Dict, Mapping, Optional, Sequence

import numpy as np
import torch

from posenc_export.models.parts.waveform import window
from posenc_export.runtime import Session

SPEECH = ("wav2vec2", "hubert", "wavlm", "wav2vec2-bert")
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
FRAMES = {"feature_projection_input_dim": 20, "conv_depthwise_kernel_size": 5}
FRAMES |= {"left_max_position_embeddings": 9, "right_max_position_embeddings": 3}
MODELS: Dict[str, Dict[str, Any]] = {
    "wav2vec2": SOUND,
    "wav2vec2 stable": OTHER,
    "hubert": {**SOUND, "do_stable_layer_norm": True, "hidden_act": "relu"},
    "hubert other": {**OTHER, "do_stable_layer_norm": False, "feat_proj_layer_norm": False},
    "wavlm": {**SOUND, "num_buckets": 8, "max_bucket_distance": 20},
    "wav2vec2-bert": FRAMES,
    "wav2vec2-bert relative": {
        **FRAMES,
        "position_embeddings_type": "relative",
        "hidden_act": "gelu",
    },
}
CONFIGS = {
    "wav2vec2": "Wav2Vec2Config",
    "hubert": "HubertConfig",
    "wavlm": "WavLMConfig",
    "wav2vec2-bert": "Wav2Vec2BertConfig",
}


def _numbers(ids: np.ndarray, size: int) -> np.ndarray:
    """Return `size` numbers for each id [n,size]."""
    rows = [np.random.default_rng(int(index)).standard_normal(size) for index in ids]
    return np.stack(rows).astype(np.float32)


def _sound(ids: np.ndarray, convolutions: Sequence[Sequence[int]]) -> np.ndarray:
    """Return samples that give one token for each id."""
    size, step = window(convolutions)
    return np.concatenate([_numbers(ids, step).ravel(), _numbers(np.array([99]), size - step)[0]])


def inputs_of(
    session: Session, tokens: np.ndarray, mask: Optional[np.ndarray] = None
) -> np.ndarray:
    """Return what a session reads for token ids [B,S]: the ids, or windows of samples or frames
    [B,S,F], with large numbers at padding.
    """
    features: Mapping[str, Any] = session.manifest.config["tokens"].get("features") or {}
    if not features or features["name"] == "patches":  # read by series.Reading
        return tokens
    projected = features["name"] == "projected"
    size, step = (features["size"], 1) if projected else window(features["convolutions"])
    inputs = np.full((*tokens.shape, size), 1e4, np.float32)
    seen = np.ones_like(tokens) if mask is None else mask
    for row, ids, inside in zip(inputs, tokens, seen == 1, strict=True):
        if projected:
            row[inside] = _numbers(ids[inside], size)
        else:
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
        rows = []
        seen = torch.ones_like(tokens) if attention_mask is None else attention_mask
        for ids, inside in zip(tokens, seen == 1, strict=True):
            result = self.model(torch.from_numpy(self._inputs(ids[inside].numpy()))[None])
            output = getattr(result, "logits", getattr(result, "last_hidden_state", None))[0]
            if output.dim() == 2:
                row = torch.zeros(len(ids), output.size(1))
                row[inside] = output
                output = row
            rows.append(output)
        whole = torch.stack(rows)
        return SimpleNamespace(last_hidden_state=whole, logits=whole)

    def _inputs(self, ids: np.ndarray) -> np.ndarray:
        config = self.config
        if config.model_type == "wav2vec2-bert":
            return _numbers(ids, config.feature_projection_input_dim)
        sizes = zip(config.conv_dim, config.conv_kernel, config.conv_stride, strict=True)
        return _sound(ids, [list(of_layer) for of_layer in sizes])
