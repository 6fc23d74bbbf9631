"""What Llama and the families after it have in common: pre-norm with RMSNorm, grouped heads, a gated MLP with SiLU (Touvron et al. 2023, LLaMA, 2.2)."""

from typing import Any, Mapping, Sequence

from posenc_export.models.config import AttentionConfig, DecoderConfig
from posenc_export.models.families.rules import Joined, Same, Table
from posenc_export.models.families.settings import Settings

LAYER = "model.layers.{layer}."
WEIGHTS: Table = {
    "embedding": Same("model.embed_tokens"),
    "layers.{layer}.attention_norm": Same(LAYER + "input_layernorm"),
    "layers.{layer}.attention.qkv": Joined(LAYER + "self_attn.q_proj", LAYER + "self_attn.k_proj", LAYER + "self_attn.v_proj"),
    "layers.{layer}.attention.output": Same(LAYER + "self_attn.o_proj"),
    "layers.{layer}.mlp_norm": Same(LAYER + "post_attention_layernorm"),
    "layers.{layer}.mlp.gate": Same(LAYER + "mlp.gate_proj"),
    "layers.{layer}.mlp.up": Same(LAYER + "mlp.up_proj"),
    "layers.{layer}.mlp.down": Same(LAYER + "mlp.down_proj"),
    "norm": Same("model.norm"),
    "head": Same("lm_head"),
}


def gated(
    config: Settings,
    encoding: Mapping[str, Any],
    layer_encodings: Sequence[Mapping[str, Any]] = (),
    qkv_bias: bool = False,
    output_bias: bool = False,
    mlp_bias: bool = False,
    tied: bool = False,
) -> DecoderConfig:
    """The description, with what differs between families given.

    Args:
        tied: where config.json does not say whether the head reads the embedding.

    Raises:
        ValueError: another activation than silu, a missing or misshapen key.
    """
    config.only("hidden_act", "silu")
    width, heads = config.whole("hidden_size"), config.whole("num_attention_heads")
    return DecoderConfig(
        vocabulary=config.whole("vocab_size"),
        layers=config.whole("num_hidden_layers"),
        hidden=config.whole("intermediate_size"),
        attention=AttentionConfig(
            width=width,
            heads=heads,
            max_positions=config.max_positions,
            kv_heads=config.whole("num_key_value_heads", heads),
            head_size=config.whole("head_dim", width // heads),
            encoding=encoding,
            qkv_bias=qkv_bias,
            output_bias=output_bias,
        ),
        epsilon=config.number("rms_norm_eps"),
        mlp_bias=mlp_bias,
        tied=config.flag("tie_word_embeddings", tied),
        layer_encodings=layer_encodings,
    )
