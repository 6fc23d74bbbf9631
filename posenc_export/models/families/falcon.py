"""Falcon (Almazrouei et al. 2023): parallel sublayers, few key heads; ALiBi in older models."""

from typing import Any, Mapping, Tuple

from posenc_export.models.families.shared import gated, plain
from posenc_export.models.families.shared.family import Family, Settings, StackConfig, layer_of
from posenc_export.models.families.shared.rules import OURS, Table, same

LAYER = "transformer.h.{layer}."
WEIGHTS: Table = {
    "tokens.embedding": same("transformer.word_embeddings"),
    **plain.megatron_layer(LAYER),
    "norm": same("transformer.ln_f"),
    "head.linear": same("lm_head"),
}


def norms(description: StackConfig, config: Mapping[str, Any]) -> Table:
    """Return the rules of a layer's norms, whose names depend on their number."""
    if description.kinds[0].residual["name"] != "parallel_norms":
        return {}
    norms = {"attention": "ln_attn", "mlp": "ln_mlp"}
    return {OURS + f"residual.{n}_norm": same(LAYER + theirs) for n, theirs in norms.items()}


def describe(config: Settings) -> StackConfig:
    """Describe the decoder. ALiBi is rounded to bfloat16 and added before division by sqrt(D)."""
    config.fixed({"apply_residual_connection_post_layernorm": False})
    config.take("ff_factor", None)  # transformers reads ffn_hidden_size
    kv_heads, residual = _arrangement(config)
    alibi = {"name": "alibi", "added": "before", "numerics": "bfloat16", "distances": "tokens"}
    rotation = alibi if config.flag("alibi", False) else config.rotation()
    config.rotation_keys()  # take rotary keys, which have no effect with ALiBi
    bias = config.flag("bias", False)
    hidden = config.whole("ffn_hidden_size", 4 * config.width)
    activation = config.activation("activation", "gelu")
    mlp = {"name": "plain", "hidden": hidden, "activation": activation, "bias": bias}
    norm = plain.layer_norm(config, "layer_norm_epsilon")
    kind = layer_of(plain.attention(config, bias, kv_heads), mlp, norm, residual)
    return gated.uniform(config, kind, [rotation], tied=True)


def _arrangement(config: Settings) -> Tuple[int, str]:
    """Return the number of key heads, and the arrangement of norms and residual sums."""
    new = config.flag("new_decoder_architecture", False)
    many = not config.flag("multi_query", True)
    apart = not config.flag("parallel_attn", True)
    kv_heads = config.whole("num_kv_heads", config.heads)
    count = config.whole("num_ln_in_parallel_attn", 2 if new else 1)
    if new and apart:
        raise config.error("parallel_attn to be true with new_decoder_architecture", "false")
    if not new and many and kv_heads != config.heads:
        rule = f"num_kv_heads to be {config.heads} without multi_query and new_decoder_architecture"
        raise config.refusal(rule, kv_heads)
    if not apart and count > 1 + new:
        rule = f"num_ln_in_parallel_attn to be {'1 or 2 with' if new else '1 without'}"
        raise config.refusal(f"{rule} new_decoder_architecture", count)
    residual = "pre" if apart else "parallel_norms" if count == 2 else "parallel"
    return kv_heads if new or many else 1, residual


FAMILY = Family(describe, WEIGHTS, base="transformer.", further_weights=norms)
