"""The text model of Gemma 3 (Gemma Team 2025): sandwich norms, windows, two rotations."""

import math

from posenc_export.models.families.shared import gated
from posenc_export.models.families.shared.family import Family, Settings, StackConfig
from posenc_export.models.families.shared.rules import OURS, Table, one_plus
from posenc_export.models.hugging_face import Spec, rope_spec

NORMS = {
    "residual.attention_norm": "input_layernorm",
    "residual.attention_output_norm": "post_attention_layernorm",
    "residual.mlp_norm": "pre_feedforward_layernorm",
    "residual.mlp_output_norm": "post_feedforward_layernorm",
    "attention.q_norm.norm": "self_attn.q_norm",
    "attention.k_norm.norm": "self_attn.k_norm",
}
WEIGHTS: Table = {
    **gated.WEIGHTS,
    **{OURS + name: one_plus(gated.LAYER + theirs) for name, theirs in NORMS.items()},
    "norm": one_plus("model.norm"),
}


def _rotations(config: Settings) -> Spec:
    """Return the rotation of each layer type. Older configs have rope_theta and rope_scaling for
    full layers, rope_local_base_freq for layers with a window.
    """
    keys = config.rotation_keys(1000000.0)
    names = ("rope_parameters", "rope_scaling", "rope_local_base_freq")
    nested, scaling, local = (keys.pop(key, None) or {} for key in names)
    if not set(nested) <= {"full_attention", "sliding_attention"}:
        rule = "rope_parameters to be nested by layer type"
        raise config.error(rule, ", ".join(nested), "nest it")
    for name, part in nested.items():
        if not isinstance(part or {}, dict):
            raise config.refusal(f"rope_parameters of {name} to be a mapping", part)
    theta = keys.pop("rope_theta", 1000000.0)
    full = {"rope_theta": theta, **(nested.get("full_attention") or {}), **scaling}
    sliding = {"rope_theta": local or 10000.0, **(nested.get("sliding_attention") or {})}
    by_type = {"full_attention": full, "sliding_attention": sliding}
    specs = rope_spec({**keys, "rope_parameters": by_type})
    if any("rotary" in spec for spec in specs.values()):
        raise config.error("rotation of whole heads", "a partial_rotary_factor below 1")
    return specs


def describe(config: Settings) -> StackConfig:
    """Describe the decoder. By default every sixth layer sees all keys, the others a window. Scores
    are q k / sqrt(query_pre_attn_scalar).
    """
    config.needs("num_key_value_heads", "head_dim", "sliding_window")
    config.off("use_bidirectional_attention")
    config.off("attn_logit_softcapping")  # transformers has the key but ignores it
    # Transformers reads hidden_activation.
    config.fixed({"hidden_act": "gelu_pytorch_tanh"})
    encodings = {name: [spec] for name, spec in _rotations(config).items()}
    bias = config.flag("attention_bias", False)
    scale = 1 / math.sqrt(config.number("query_pre_attn_scalar"))
    attention = gated.attention(config, bias, bias, scale=scale)
    kind = gated.layer(config, attention, "hidden_activation", residual="sandwich")
    kind, window = gated.head_norm(kind), config.window("sliding_window")
    layers = config.by_type(kind, encodings, window, config.pattern(6))
    head = {"softcap": config.number_or_none("final_logit_softcapping", None)}
    return gated.decoder(config, layers, tied=True, head=head, scale=math.sqrt(config.width))


FAMILY = Family(describe, WEIGHTS)
