"""Small models of series, called with token ids like decoders: an id stands for the values of a
patch, and outputs are the forecasts after each patch.
"""

from types import SimpleNamespace
from typing import Any, Dict, Optional

import numpy as np
import torch
import transformers

from posenc_export.runtime import Session
from posenc_export.runtime.session.forecaster import Forecaster

SIZES: Dict[str, Dict[str, Any]] = {
    "timesfm2_5": {
        "patch_length": 2, "context_length": 1000, "horizon_length": 5, "hidden_size": 48,
        "intermediate_size": 40, "num_hidden_layers": 2, "num_attention_heads": 4,
        "num_key_value_heads": 2, "head_dim": 16, "output_quantile_len": 3, "decode_index": 2,
        "quantiles": [0.1, 0.5, 0.9],
    },
}  # fmt: skip
# Settings of each model that differ from SIZES. The first word of a name is the family.
MODELS: Dict[str, Dict[str, Any]] = {
    "timesfm2_5": {},
    "timesfm2_5 with biases": {
        "attention_bias": True, "use_bias": True, "output_quantile_len": 7, "activation": "relu",
        "rms_norm_eps": 1e-3, "num_key_value_heads": 4, "patch_length": 4,
        "quantiles": [0.2, 0.4, 0.5, 0.6, 0.8], "decode_index": 3,
        "rope_parameters": {"rope_type": "default", "rope_theta": 100.0},
    },
    "timesfm2_5 one-sided": {
        "force_flip_invariance": False, "decode_index": 0, "infer_is_positive": False,
        "num_key_value_heads": 1,
    },
    "timesfm2_5 one forecast": {"use_continuous_quantile_head": False, "decode_index": 3},
}  # fmt: skip
CONFIGS = {"timesfm2_5": "TimesFm2_5Config"}


def built(config: Any) -> Any:
    """Return transformers' model of a configuration, as a Peer if it forecasts series."""
    if config.model_type in CONFIGS:
        return Peer(transformers.TimesFm2_5ModelForPrediction(config))
    return transformers.AutoModelForCausalLM.from_config(config)


def opened(session: Session) -> Any:
    """Return a session that reads token ids."""
    return Reading(session) if "forecast" in session.manifest.config else session


def values_of(ids: np.ndarray, size: int) -> np.ndarray:
    """Return `size` values for each id [n,size], the first of which is below 0."""
    rows = [
        np.random.default_rng(int(index)).standard_normal(size) * (1 + index % 5) + index % 7
        for index in ids
    ]
    values = np.array(rows, np.float32).reshape(-1, size)
    values[:, 0] = -1 - np.abs(values[:, 0])
    return values


class Peer(torch.nn.Module):
    """Transformers' model, called with token ids. It forecasts after the end of a series only, so
    that every beginning of a row is a series of its own.
    """

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.model, self.config = model, model.config
        self.save_pretrained = model.save_pretrained

    def forward(
        self,
        tokens: torch.Tensor,
        attention_mask: Any = None,
        position_ids: Any = None,
        use_cache: bool = False,
        cache: Optional[torch.Tensor] = None,
    ) -> SimpleNamespace:
        whole = tokens if cache is None else torch.cat((cache, tokens), 1)
        seen = torch.ones_like(whole) if attention_mask is None else attention_mask
        rows = []
        for ids, inside in zip(whole, seen == 1, strict=True):
            values = torch.from_numpy(values_of(ids[inside].numpy(), self.config.patch_length))
            series = [values[: end + 1].flatten() for end in range(len(values))]
            forecasts = self.model(series, forecast_context_len=values.numel()).full_predictions
            row = torch.zeros(len(ids), forecasts[0].numel())
            row[inside] = forecasts.flatten(1)
            rows.append(row)
        logits = torch.stack(rows)[:, whole.size(1) - tokens.size(1) :]
        return SimpleNamespace(logits=logits, cache=whole)


class Reading:
    """A forecaster that is called like a session of a decoder."""

    def __init__(self, session: Session) -> None:
        self.session, self.manifest = session, session.manifest
        self.forecaster = Forecaster(session)

    def prefill(
        self,
        tokens: Any,
        attention_mask: Optional[np.ndarray] = None,
        chunk: Optional[int] = None,
    ) -> np.ndarray:
        if not self.session.length.any():
            self.forecaster.reset()
        rows = [np.asarray(row) for row in tokens]
        inside = [np.ones(len(row), bool) for row in rows]
        inside = inside if attention_mask is None else list(attention_mask == 1)
        series = [
            values_of(row[mask], self.forecaster.patch).ravel()
            for row, mask in zip(rows, inside, strict=True)
        ]
        forecasts = self.forecaster.forecasts(series, chunk)
        outputs = np.zeros((len(rows), max(map(len, rows)), forecasts[0, 0].size))
        for output, mask, row in zip(outputs, inside, forecasts, strict=True):
            output[: len(mask)][mask] = row[: mask.sum()].reshape(mask.sum(), -1)
        return outputs

    def step(self, tokens: np.ndarray) -> np.ndarray:
        return self.prefill(tokens[:, None])[:, 0]
