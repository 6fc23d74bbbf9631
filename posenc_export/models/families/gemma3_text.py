"""The text model of Gemma 3 (Gemma Team 2025, Gemma 3 Technical Report): Gemma 2 with norms of
queries and keys in place of softcaps, and two rotations.
"""

import math
from typing import Any, Dict

from posenc_export.models.families.gemma2 import WEIGHTS as SHARED
from posenc_export.models.families.gemma2 import scaled_attention
from posenc_export.models.families.shared.family import Family, HeadConfig, Settings, StackConfig
from posenc_export.models.families.shared.gated import LAYER, decoder, head_norm, layer
from posenc_export.models.families.shared.rules import OURS, Table, one_plus
from posenc_export.models.hugging_face import rope_spec

WEIGHTS: Table = {
    **SHARED,
    OURS + "attention.q_norm.norm": one_plus(LAYER + "self_attn.q_norm"),
    OURS + "attention.k_norm.norm": one_plus(LAYER + "self_attn.k_norm"),
}


def _rotations(config: Settings) -> Dict[str, Any]:
    """Return the rotation of each layer type. Older configs have rope_theta and rope_scaling for
    full layers, rope_local_base_freq for layers with a window.
    """
    keys = config.rotation_keys(1000000.0)
    given, scaling, local = (
        keys.pop(key, None) or {}
        for key in ("rope_parameters", "rope_scaling", "rope_local_base_freq")
    )
    if not set(given) <= {"full_attention", "sliding_attention"}:
        raise ValueError(
            "gemma3_text: expected rope_parameters to be nested by layer type, got "
            f"{', '.join(given)}; nest it"
        )
    for name, part in given.items():
        if not isinstance(part or {}, dict):
            raise config.refusal(f"rope_parameters of {name} to be a mapping", part)
    full = {
        "rope_theta": keys.pop("rope_theta", 1000000.0),
        **(given.get("full_attention") or {}),
        **scaling,
    }
    sliding = {"rope_theta": local or 10000.0, **(given.get("sliding_attention") or {})}
    specs: Dict[str, Any] = rope_spec(
        {**keys, "rope_parameters": {"full_attention": full, "sliding_attention": sliding}}
    )
    if any("rotary" in spec for spec in specs.values()):
        raise ValueError(
            "gemma3_text: expected rotation of whole heads, got a partial_rotary_factor "
            "below 1; correct config.json"
        )
    return specs


def describe(config: Settings) -> StackConfig:
    """Describe the decoder. Without layer_types and sliding_window_pattern, every sixth layer
    attends to all keys, the others to a window.
    """
    config.off("use_bidirectional_attention")
    config.off("attn_logit_softcapping")  # transformers has the key but ignores it
    # Transformers reads hidden_activation.
    config.only("hidden_act", "gelu_pytorch_tanh", "gelu_pytorch_tanh")
    rotations = _rotations(config)
    kind = layer(
        config, scaled_attention(config), activation="hidden_activation", residual="sandwich"
    )
    head = HeadConfig(softcap=config.number_or_none("final_logit_softcapping", None))
    window = config.window("sliding_window")
    encodings = {name: [spec] for name, spec in rotations.items()}
    layers = config.by_type(head_norm(kind, "head"), encodings, window, config.pattern(6))
    return decoder(config, *layers, tied=True, head=head, scale=math.sqrt(config.width))


FAMILY = Family(describe, WEIGHTS)
