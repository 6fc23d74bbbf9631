"""wav2vec 2.0 (Baevski et al. 2020), HuBERT (Hsu et al. 2021) and WavLM (Chen et al. 2022): samples
of sound to hidden states; convolutions, a convolution as position encoding, post-norm or pre-norm
layers.
"""

from typing import Any, Dict, List, Mapping, Tuple

from torch import Tensor

from posenc_export.models.families.shared import family, plain
from posenc_export.models.families.shared.rules import (
    ENCODING,
    OURS,
    QKV,
    Rule,
    Table,
    joined,
    same,
)

LAYER, CONVOLUTION = "wav2vec2.encoder.layers.{layer}.", "wav2vec2.encoder.pos_conv_embed.conv."
ATTENTION = LAYER + "attention."
# Keys of training, of decoding, of heads that are not read, and of adapters, which are refused.
UNREAD = """adapter_kernel_size adapter_stride apply_spec_augment classifier_proj_size
    codevector_dim contrastive_logits_temperature ctc_loss_reduction ctc_zero_infinity
    diversity_loss_weight feat_extract_dropout feat_proj_dropout feat_quantizer_dropout
    final_dropout freeze_feat_extract_train mask_channel_length mask_channel_min_space
    mask_channel_other mask_channel_prob mask_channel_selection mask_feature_length
    mask_feature_min_masks mask_feature_prob mask_time_length mask_time_min_masks
    mask_time_min_space mask_time_other mask_time_prob mask_time_selection no_mask_channel_overlap
    no_mask_time_overlap num_adapter_layers num_codevector_groups num_codevectors_per_group
    num_ctc_classes num_negatives output_hidden_size proj_codevector_dim replace_prob
    tdnn_dilation tdnn_dim tdnn_kernel vocab_size xvector_output_dim""".split()
FIXED = {
    "add_adapter": False,
    "adapter_attn_dim": None,
    "conv_pos_batch_norm": False,
    "use_weighted_layer_sum": False,
}
SIZES, FARTHEST = ("conv_dim", "conv_kernel", "conv_stride"), "max_bucket_distance"


def describe(config: family.Settings) -> family.StackConfig:
    """Describe the encoder from samples to hidden states."""
    config.ignore(UNREAD)
    config.fixed(FIXED)
    norm, before = plain.layer_norm(config), config.flag("do_stable_layer_norm", False)
    of_sound, activation = _waveform(config, norm["epsilon"])
    position = {
        "name": "conditional_conv",
        "kernel": config.whole("num_conv_pos_embeddings", 128),
        "groups": config.whole("num_conv_pos_embedding_groups", 16),
        "activation": activation,
    }
    norm_of_tokens = None if before else norm
    tokens = family.TokensConfig(features=of_sound, encodings=(position,), norm=norm_of_tokens)
    both = {"name": "both"}
    attention = plain.attention(config, bias=True, encodings=_of_scores(config), sees=both)
    mlp, residual = plain.mlp(config, "hidden_act", "gelu"), "pre" if before else "post"
    layers = {"layer": family.layer_of(attention, mlp, norm, residual)}
    order, after = ("layer",) * config.layers, norm if before else None
    return family.stack(config, layers, order, tokens, norm=after)


def _waveform(config: family.Settings, epsilon: float) -> Tuple[family.Named, str]:
    """Return the convolutions over samples, and the activation that positions have, too."""
    lists = [config.take(key) for key in SIZES]
    lengths = {len(sizes) if isinstance(sizes, list) else 0 for sizes in lists}
    if lengths != {config.whole("num_feat_extract_layers", max(1, *lengths))}:
        rule = f"{', '.join(SIZES)} to be lists of num_feat_extract_layers numbers"
        raise config.refusal(rule, lists)
    activation = config.activation("feat_extract_activation", "gelu")
    normed = config.family != "hubert" or config.flag("feat_proj_layer_norm", True)
    spec: Dict[str, Any] = {
        "name": "waveform",
        "convolutions": [list(sizes) for sizes in zip(*lists, strict=True)],
        "norm": config.choice("feat_extract_norm", ("group", "layer")),
        "bias": config.flag("conv_bias", False),
        "activation": activation,
        "epsilon": epsilon if normed else None,
    }
    return spec, activation


def _of_scores(config: family.Settings) -> Tuple[family.Named, ...]:
    """Return the encoding of scores, which WavLM alone has."""
    if config.family != "wavlm":
        return ()
    buckets = config.whole("num_buckets", 320)
    return ({"name": "wavlm", "buckets": buckets, "max_distance": config.whole(FARTHEST, 800)},)


def _summed(tensors: List[Tensor], layer: family.AttentionConfig) -> Tensor:
    return tensors[0].unflatten(0, (2, 4)).sum(1)


def _folded(tensors: List[Tensor], layer: family.AttentionConfig) -> Tensor:
    length, direction = tensors
    return length * direction / direction.norm(dim=(0, 1), keepdim=True)


def without_weight_norm(module: str) -> Rule:
    """A filter, stored as its length for each token and its direction."""
    names = [f"{module}parametrizations.weight.original{index}" for index in range(2)]
    return Rule(
        lambda kind, shape, layer: dict(zip(names, ((1, 1, shape[2]), shape), strict=True)),
        _folded,
    )


def convolutions(description: family.StackConfig, config: Mapping[str, Any]) -> Table:
    """Return the rules of the convolutions over samples."""
    table: Dict[str, Rule] = {}
    for index in range(len(config["conv_dim"])):
        ours = f"tokens.stem.layers.{index}."
        theirs = f"wav2vec2.feature_extractor.conv_layers.{index}."
        table[ours + "convolution"] = same(theirs + "conv")
        table[ours + "norm"] = same(theirs + "layer_norm")
    norm = "norm" if config.get("do_stable_layer_norm") else "tokens.norm"
    return {**table, norm: same("wav2vec2.encoder.layer_norm")}


GATES, TABLE = ATTENTION + "gru_rel_pos_", "wav2vec2.encoder.layers.0.attention.rel_attn_embed"
WEIGHTS: Table = {
    ENCODING + ".table": same(TABLE),
    ENCODING + ".gates": Rule(
        lambda kind, shape, layer: {f"{GATES}linear.{kind}": (8, *shape[1:])}, _summed
    ),
    ENCODING + ".factor": Rule(
        lambda kind, shape, layer: {GATES + "const": (1, *shape, 1, 1)},
        lambda tensors, layer: tensors[0].flatten(),
    ),
    "tokens.stem.norm": same("wav2vec2.feature_projection.layer_norm"),
    "tokens.stem.projection": same("wav2vec2.feature_projection.projection"),
    "token_encoding.convolution.weight": without_weight_norm(CONVOLUTION),
    "token_encoding.convolution.bias": same(CONVOLUTION[:-1]),
    QKV: joined(ATTENTION + "q_proj", ATTENTION + "k_proj", ATTENTION + "v_proj"),
    OURS + "attention.projection.output": same(ATTENTION + "out_proj"),
    OURS + "residual.attention_norm": same(LAYER + "layer_norm"),
    OURS + "mlp.up": same(LAYER + "feed_forward.intermediate_dense"),
    OURS + "mlp.down": same(LAYER + "feed_forward.output_dense"),
    OURS + "residual.mlp_norm": same(LAYER + "final_layer_norm"),
}
# Tensors of training and of heads.
HEADS = (
    r"masked_spec_embed$",
    r"^(lm_head|projector|classifier|quantizer|project_hid|project_q|tdnn)\.",
)
FAMILY = family.Family(
    describe,
    WEIGHTS,
    base="wav2vec2.",
    other_bases=("hubert.", "wavlm."),
    unused=HEADS,
    further_weights=convolutions,
    # Names of older versions.
    renamed={
        "pos_conv_embed.conv.weight_g": "pos_conv_embed.conv.parametrizations.weight.original0",
        "pos_conv_embed.conv.weight_v": "pos_conv_embed.conv.parametrizations.weight.original1",
    },
)
