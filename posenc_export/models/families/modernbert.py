"""ModernBERT (Warner et al. 2024): pre-norm, gated MLP, rotation; most layers see near keys."""

from typing import Dict, List

import msgspec

from posenc_export.models.config import LayerConfig, Named, StackConfig, TokensConfig
from posenc_export.models.families.shared import gated, plain
from posenc_export.models.families.shared.encoders import UNUSED, encoder_only
from posenc_export.models.families.shared.family import Family, Settings, stack
from posenc_export.models.families.shared.rules import OURS, QKV, Table, gate_and_up, same
from posenc_export.models.hugging_face import rope_spec

LAYER = gated.LAYER
WEIGHTS: Table = {
    "tokens.embedding": same("model.embeddings.tok_embeddings"),
    "tokens.norm": same("model.embeddings.norm"),
    OURS + "residual.attention_norm": same(LAYER + "attn_norm"),
    QKV: same(LAYER + "attn.Wqkv"),
    OURS + "attention.projection.output": same(LAYER + "attn.Wo"),
    OURS + "residual.mlp_norm": same(LAYER + "mlp_norm"),
    **gate_and_up(LAYER + "mlp.Wi"),
    OURS + "mlp.down": same(LAYER + "mlp.Wo"),
    "norm": same("model.final_norm"),
}
# For each layer type, the key of theta in older configs and transformers' default.
THETAS = {
    "full_attention": ("global_rope_theta", 160000.0),
    "sliding_attention": ("local_rope_theta", 10000.0),
}


def describe(config: Settings) -> StackConfig:
    """Describe the encoder. The first attention has no norm: the token embedding ends with one."""
    encoder_only(config)
    config.take("layer_norm_eps", None)  # in published configs, but only norm_eps is read
    norm = {**plain.layer_norm(config, "norm_eps"), "bias": config.flag("norm_bias", False)}
    types, by_type = _types(config), _layers(config, norm)
    first = msgspec.structs.replace(by_type[types[0]], norms=({"name": "none"}, norm))
    kinds = {"first": first, **{name: by_type[name] for name in dict.fromkeys(types[1:])}}
    tokens = TokensConfig(vocabulary=config.whole("vocab_size"), norm=norm)
    return stack(config, kinds, ("first", *types[1:]), tokens, norm=norm)


def _types(config: Settings) -> List[str]:
    every = config.whole("global_attn_every_n_layers", 3)
    default = ["sliding_attention" if i % every else "full_attention" for i in range(config.layers)]
    types = config.per_layer("layer_types", default)
    other = next((name for name in types if name not in THETAS), None)
    if other is not None:
        raise config.refusal(f"layer_types to be {' or '.join(THETAS)}", other)
    return types


def _layers(config: Settings, norm: Named) -> Dict[str, LayerConfig]:
    bias, reach = config.flag("attention_bias", False), config.whole("local_attention") // 2
    attention = plain.attention(config, bias, sees={"name": "both"})
    mlp_bias, near = config.flag("mlp_bias", False), {"name": "near", "reach": reach}
    full = gated.layer(config, attention, "hidden_activation", mlp_bias, norm=norm)
    sees = {"full_attention": {"name": "both"}, "sliding_attention": near}
    turned = rotations(config).items()
    return {n: full.with_attention(encodings=(of,), sees=sees[n]) for n, of in turned}


def rotations(config: Settings) -> Dict[str, Named]:
    """Return the rotation of each layer type."""
    config.fixed({"rope_scaling": None})
    by_type = config.take("rope_parameters", None)
    if by_type is None:
        thetas = {name: config.take(key, theta) for name, (key, theta) in THETAS.items()}
        default = {"rope_type": "default"}
        by_type = {name: {**default, "rope_theta": theta} for name, theta in thetas.items()}
    nested = isinstance(by_type, dict) and all(isinstance(part, dict) for part in by_type.values())
    if not nested or not set(by_type) <= set(THETAS):
        rule = f"rope_parameters to map {' and '.join(THETAS)} to mappings"
        raise config.refusal(rule, by_type)
    sizes = {"hidden_size": config.width, "num_attention_heads": config.heads}
    sizes["max_position_embeddings"] = config.trained_positions
    specs: Dict[str, Named] = {}
    for name, (_, theta) in THETAS.items():
        parameters = {"rope_theta": theta, **by_type.get(name, {})}
        specs[name] = rope_spec({**sizes, "rope_parameters": parameters})
    return specs


FAMILY = Family(describe, WEIGHTS, unused=(*UNUSED, r"^(head|decoder)\."))
