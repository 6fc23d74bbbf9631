"""ModernBERT (Warner et al. 2024): pre-norm layers, a gated MLP, rotation; most layers attend to
nearby keys only and have another theta.
"""

from typing import Dict

from posenc_export.models.families.shared.encoders import UNUSED, encoder_only
from posenc_export.models.families.shared.family import (
    Family,
    LayerConfig,
    Named,
    Settings,
    StackConfig,
    TokensConfig,
    stack,
)
from posenc_export.models.families.shared.plain import attention
from posenc_export.models.families.shared.rules import OURS, QKV, Table, gate_and_up, same
from posenc_export.models.hugging_face import rope_spec

LAYER = "model.layers.{layer}."
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
    """Describe the encoder. The attention of the first layer has no norm, since the token
    embedding ends with one.
    """
    encoder_only(config)
    config.take("layer_norm_eps", None)  # in published configs, but only norm_eps is read
    norm = {
        "name": "layer",
        "epsilon": config.number("norm_eps"),
        "bias": config.flag("norm_bias", False),
    }
    bias = config.flag("attention_bias", False)
    reach = config.whole("local_attention") // 2
    every = config.whole("global_attn_every_n_layers", 3)
    hidden, activation = config.whole("intermediate_size"), config.activation("hidden_activation")
    mlp = {
        "name": "gated",
        "hidden": hidden,
        "activation": activation,
        "bias": config.flag("mlp_bias", False),
    }
    visible: Dict[str, Named] = {
        "full_attention": {"name": "both"},
        "sliding_attention": {"name": "near", "reach": reach},
    }
    rotation_of, kinds, order = rotations(config), {}, []
    for index, name in enumerate(
        config.per_layer(
            "layer_types",
            ["sliding_attention" if i % every else "full_attention" for i in range(config.layers)],
        )
    ):
        if name not in visible:
            raise ValueError(
                f"modernbert: expected layer_types to be {' or '.join(visible)}, got "
                f"{name!r}; correct config.json"
            )
        order.append(name if index else "first")
        first = {"name": "none"} if index == 0 else norm
        kinds[order[-1]] = LayerConfig(
            residual={"name": "pre"},
            norms=(first, norm),
            attention=attention(config, bias, encodings=(rotation_of[name],), sees=visible[name]),
            mlp=mlp,
        )
    tokens = TokensConfig(vocabulary=config.whole("vocab_size"), norm=norm)
    return stack(config, kinds, order, tokens, norm=norm)


def rotations(config: Settings) -> Dict[str, Named]:
    """Return the rotation of each layer type."""
    config.only("rope_scaling", None, None)
    given = config.take("rope_parameters", None)
    if given is None:
        given = {
            name: {"rope_type": "default", "rope_theta": config.take(key, theta)}
            for name, (key, theta) in THETAS.items()
        }
    if (
        not isinstance(given, dict)
        or not set(given) <= set(THETAS)
        or not all(isinstance(part, dict) for part in given.values())
    ):
        raise ValueError(
            f"modernbert: expected rope_parameters to map {' and '.join(THETAS)} to "
            f"mappings, got {given!r}; correct config.json"
        )
    sizes = {
        "hidden_size": config.width,
        "num_attention_heads": config.heads,
        "max_position_embeddings": config.trained_positions,
    }
    return {
        name: rope_spec({**sizes, "rope_parameters": {"rope_theta": theta, **given.get(name, {})}})
        for name, (_, theta) in THETAS.items()
    }


FAMILY = Family(describe, WEIGHTS, unused=(*UNUSED, r"^(head|decoder)\."))
