"""Gemma 3, its text model (Gemma Team 2025, Gemma 3 Technical Report): Gemma 2 with norms of queries and keys for its caps, and another theta in a window."""

import math
from typing import Any, Dict

from posenc_export.models.config import HeadConfig, StackConfig
from posenc_export.models.families import Family
from posenc_export.models.families.gated import LAYER, OURS, decoder, head_norm, layer
from posenc_export.models.families.gemma2 import WEIGHTS as SHARED
from posenc_export.models.families.gemma2 import scaled_attention
from posenc_export.models.families.rules import OnePlus, Table
from posenc_export.models.families.settings import Settings
from posenc_export.models.hugging_face import rope_spec

WEIGHTS: Table = {
    **SHARED,
    OURS + "attention.q_norm.norm": OnePlus(LAYER + "self_attn.q_norm"),
    OURS + "attention.k_norm.norm": OnePlus(LAYER + "self_attn.k_norm"),
}


def _rotations(config: Settings) -> Dict[str, Any]:
    """By layer type: nested, or as older configs have it, rope_theta and rope_scaling for full layers, rope_local_base_freq for the others."""
    keys = config.rotation_keys(1000000.0)
    given, scaling, local = (keys.pop(key, None) or {} for key in ("rope_parameters", "rope_scaling", "rope_local_base_freq"))
    if not set(given) <= {"full_attention", "sliding_attention"}:
        raise ValueError(f"gemma3_text: rope_parameters is nested by layer type, got {', '.join(given)}; nest it")
    full = {"rope_theta": keys.pop("rope_theta", 1000000.0), **(given.get("full_attention") or {}), **scaling}
    sliding = {"rope_theta": local or 10000.0, **(given.get("sliding_attention") or {})}
    specs: Dict[str, Any] = rope_spec({**keys, "rope_parameters": {"full_attention": full, "sliding_attention": sliding}})
    if any("rotary" in spec for spec in specs.values()):
        raise ValueError("gemma3_text: whole heads turn, got a partial_rotary_factor below 1; correct config.json")
    return specs


def describe(config: Settings) -> StackConfig:
    """Every sixth layer sees all keys where neither layer_types nor sliding_window_pattern says otherwise. Both-sided attention is refused."""
    config.off("use_bidirectional_attention")
    config.off("attn_logit_softcapping")  # transformers has the key and does nothing with it
    config.only("hidden_act", "gelu_pytorch_tanh", "gelu_pytorch_tanh")  # hidden_activation is what counts
    rotations = _rotations(config)
    kind = layer(config, scaled_attention(config), activation="hidden_activation", residual="sandwich", norms=4)
    head, window = HeadConfig(softcap=config.number_or_none("final_logit_softcapping", None)), config.window("sliding_window")
    encodings = {name: [spec] for name, spec in rotations.items()}
    layers = config.by_type(head_norm(kind, "head"), encodings, window, config.pattern(6))
    return decoder(config, *layers, tied=True, head=head, scale=math.sqrt(config.width))


FAMILY = Family(describe, WEIGHTS)
