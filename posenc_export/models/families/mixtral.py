"""Mixtral (Jiang et al. 2024): Mistral with two of eight experts for each token."""

from posenc_export.models.families.shared import gated
from posenc_export.models.families.shared.family import Family, Settings, StackConfig
from posenc_export.models.families.shared.rules import experts


def describe(config: Settings) -> StackConfig:
    """Describe the decoder. Expert weights are the softmax over the chosen experts."""
    config.needs("num_key_value_heads")
    rotation, window = config.rotation(theta=1000000.0), config.window("sliding_window", None)
    kind = gated.windowed(config, gated.layer(config, gated.attention(config)), window)
    count, chosen = config.whole("num_local_experts"), config.whole("num_experts_per_tok")
    return gated.uniform(config, gated.with_experts(kind, count, chosen, "chosen"), [rotation])


MOE = gated.LAYER + "block_sparse_moe."
OF_EXPERT = MOE + "experts.{row}."
EXPERTS = experts(MOE + "gate", *(f"{OF_EXPERT}{name}.weight" for name in ("w1", "w3", "w2")))
FAMILY = Family(describe, {**gated.WEIGHTS, **EXPERTS})
