"""Mixtral (Jiang et al. 2024, Mixtral of Experts): Mistral with two of eight experts for each
token.
"""

from posenc_export.models.families.shared.family import Family, Settings, StackConfig
from posenc_export.models.families.shared.gated import (
    LAYER,
    WEIGHTS,
    alike,
    attention,
    decoder,
    layer,
    windowed,
    with_experts,
)
from posenc_export.models.families.shared.rules import experts


def describe(config: Settings) -> StackConfig:
    """Describe the decoder. Expert weights are the softmax over the chosen experts."""
    config.needs("num_key_value_heads")
    rotation, window = config.rotation(theta=1000000.0), config.window("sliding_window", None)
    kind = windowed(config, layer(config, attention(config)), window)
    kind = with_experts(
        kind, config.whole("num_local_experts"), config.whole("num_experts_per_tok"), "chosen"
    )
    return decoder(config, *alike(kind, config.layers, [rotation]))


EXPERTS = experts(
    LAYER + "block_sparse_moe.gate",
    *(LAYER + f"block_sparse_moe.experts.{{row}}.{name}.weight" for name in ("w1", "w3", "w2")),
)
FAMILY = Family(describe, {**WEIGHTS, **EXPERTS})
