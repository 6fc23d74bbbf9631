"""Qwen3 with experts (Yang et al. 2025): Qwen3's attention, 8 of 128 experts for each token."""

from posenc_export.models.families.shared import gated
from posenc_export.models.families.shared.family import Family, Settings, StackConfig
from posenc_export.models.families.shared.gated import LAYER
from posenc_export.models.families.shared.rules import experts


def describe(config: Settings) -> StackConfig:
    """Describe the decoder. Every decoder_sparse_step-th layer has experts, except those in
    mlp_only_layers. With norm_topk_prob, their weights are a softmax over the chosen experts.
    """
    config.needs("num_key_value_heads")
    rotation, bias = config.rotation_in_chunks(), config.flag("attention_bias", False)
    used, window = config.flag("use_sliding_window", False), config.window("sliding_window", 4096)
    # In configs derived from Qwen3's; transformers ignores it.
    config.take("max_window_layers", None)
    step, dense_at = config.whole("decoder_sparse_step", 1), config.indices("mlp_only_layers", ())
    dense = gated.head_norm(gated.layer(config, gated.attention(config, bias, bias)))
    dense = gated.windowed(config, dense, window if used else None)
    dense = dense.with_attention(encodings=(rotation,))
    inner = dense.with_mlp(hidden=config.whole("moe_intermediate_size"))
    count, chosen = config.whole("num_local_experts"), config.whole("num_experts_per_tok")
    weights = "chosen" if config.flag("norm_topk_prob", False) else "all"
    kinds = {"dense": dense, "experts": gated.with_experts(inner, count, chosen, weights)}
    sparse = [not (index in dense_at or (index + 1) % step) for index in range(config.layers)]
    order = ["experts" if flag else "dense" for flag in sparse]
    return gated.of_kinds(config, kinds, order)


OF_EXPERT = LAYER + "mlp.experts.{row}."
OF_EACH = (f"{OF_EXPERT}{name}_proj.weight" for name in ("gate", "up", "down"))
EXPERTS = experts(LAYER + "mlp.gate", *OF_EACH)
FAMILY = Family(describe, {**gated.WEIGHTS, **gated.HEAD_NORMS, **EXPERTS})
