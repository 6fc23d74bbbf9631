"""Mixtral (Jiang et al. 2024, Mixtral of Experts): Mistral with two of eight experts for each token."""

from posenc_export.models.config import StackConfig
from posenc_export.models.families.shared.family import Family
from posenc_export.models.families.shared.gated import LAYER, OURS, WEIGHTS, alike, attention, decoder, layer, windowed, with_experts
from posenc_export.models.families.shared.rules import Linears, Same, Table
from posenc_export.models.families.shared.settings import Settings


def describe(config: Settings) -> StackConfig:
    """Describe the decoder. Expert weights are the softmax over the chosen experts."""
    config.needs("num_key_value_heads")
    rotation, window = config.rotation(theta=1000000.0), config.window("sliding_window", None)
    kind = windowed(config, layer(config, attention(config)), window)
    kind = with_experts(kind, config.whole("num_local_experts"), config.whole("num_experts_per_tok"), "chosen")
    return decoder(config, *alike(kind, config.layers, [rotation]))


EXPERTS: Table = {
    OURS + "mlp.router": Same(LAYER + "block_sparse_moe.gate"),
    OURS + "mlp.gates": Linears(LAYER + "block_sparse_moe.experts.{row}.w1.weight"),
    OURS + "mlp.ups": Linears(LAYER + "block_sparse_moe.experts.{row}.w3.weight"),
    OURS + "mlp.downs": Linears(LAYER + "block_sparse_moe.experts.{row}.w2.weight"),
}
FAMILY = Family(describe, {**WEIGHTS, **EXPERTS})
