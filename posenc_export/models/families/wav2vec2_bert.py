"""Wav2Vec2-BERT (Seamless Communication 2023): a spectrogram to hidden states; Conformers with
causal convolutions, and products of queries with trained rows of clipped distances.
"""

from typing import Any, Dict, List, Mapping, Tuple

import msgspec
import torch
from torch import Tensor

from posenc_export.models.families.shared import family, plain
from posenc_export.models.families.shared.rules import Rule, Table, joined, no_table, same, whole
from posenc_export.models.families.wav2vec2 import HEADS, UNREAD

MORE_UNREAD = """adapter_act conformer_conv_dropout max_source_positions
    rotary_embedding_base""".split()
FIXED = {
    "add_adapter": False,
    "use_intermediate_ffn_before_adapter": False,
    "use_weighted_layer_sum": False,
}
LAYER = "wav2vec2_bert.encoder.layers.{row}."


def describe(config: family.Settings) -> family.StackConfig:
    """Describe the encoder. A layer of the checkpoint is two of ours: an MLP with attention, and a
    convolution with an MLP. The norm after it belongs to the next one.
    """
    config.ignore((*UNREAD, *MORE_UNREAD))
    config.fixed(FIXED)
    norm, sees = plain.layer_norm(config), {"name": "both"}
    attention = plain.attention(config, bias=True, encodings=_encodings(config), sees=sees)
    mlp = plain.mlp(config, "hidden_act", "swish")
    size, epsilon = config.whole("feature_projection_input_dim", 160), norm["epsilon"]
    how = {"kernel": _kernel(config), "activation": mlp["activation"], "epsilon": epsilon}
    between = family.layer_of(attention, mlp, norm, "mlp_first")
    first = msgspec.structs.replace(between, norms=({"name": "none"}, norm, norm))
    convolution = family.layer_of(attention, mlp, norm).with_attention(
        encodings=(), mechanism="convolution", projection={"name": "convolution", **how}
    )
    layers = {"first": first, "convolution": convolution}
    layers |= {"attention": between} if config.layers > 1 else {}
    order = ("first", "convolution", *("attention", "convolution") * (config.layers - 1))
    tokens = family.TokensConfig(features={"name": "projected", "size": size, "epsilon": epsilon})
    return family.stack(config, layers, order, tokens, norm=norm)


def _kernel(config: family.Settings) -> int:
    kernel = config.whole("conv_depthwise_kernel_size", 31)
    if kernel % 2 == 0:
        raise config.refusal("conv_depthwise_kernel_size to be odd", kernel)
    return kernel


def _encodings(config: family.Settings) -> Tuple[family.Named, ...]:
    """Return the encodings of attention. With "rotary", transformers rotates the input of queries
    and keys in place of queries and keys.
    """
    sides = {
        side: config.integer(f"{side}_max_position_embeddings", default, least=0)
        for side, default in (("left", 64), ("right", 8))
    }
    kind = config.take("position_embeddings_type", "relative_key")
    if kind is None:
        return ()
    if kind not in ("relative_key", "relative"):
        rule = "position_embeddings_type to be relative_key, relative or null"
        raise config.refusal(rule, kind, family.UNSUPPORTED)
    shaw = {"name": "shaw", **sides, "values": "plain"}
    return (shaw if kind == "relative_key" else {"name": "transformer_xl"},)


def _halved(module: str) -> Rule:
    """Half of a weight or bias: outputs of MLPs count half."""
    return Rule(
        lambda kind, shape, layer: {f"{module}.{kind}": shape}, lambda parts, layer: parts[0] / 2
    )


def _pointwise(module: str) -> Rule:
    """The weight of a linear layer from a filter of one token."""
    return Rule(
        lambda kind, shape, layer: {f"{module}.{kind}": (*shape, 1)},
        lambda parts, layer: parts[0][:, :, 0],
    )


def _waves(module: str) -> Rule:
    """W of transformer_xl from columns in which sines and cosines alternate."""

    def form(tensors: List[Tensor], layer: family.AttentionConfig) -> Tensor:
        halves = torch.cat((tensors[0][:, ::2], tensors[0][:, 1::2]), dim=1)
        return halves.unflatten(0, (layer.heads, layer.head_size))

    return Rule(lambda kind, shape, layer: {f"{module}.weight": (shape[2], shape[2])}, form)


def names(description: family.StackConfig, config: Mapping[str, Any]) -> Table:
    """Return the rules of layers. Layers 2i and 2i + 1 of our model are layer i."""
    table: Dict[str, Rule] = {}
    last, size = len(description.order) // 2 - 1, description.attentions[0].head_size
    for row in range(last + 1):
        theirs = LAYER.replace("{row}", str(row))
        first, second = f"layers.{2 * row}.", f"layers.{2 * row + 1}."
        after = "norm" if row == last else f"layers.{2 * row + 2}.residual.input_norm"
        read, convolved = theirs + "self_attn.", theirs + "conv_module."
        ours = second + "attention.projection."
        table |= (
            _mlp(first, theirs + "ffn1")
            | _mlp(second, theirs + "ffn2")
            | {
                first + "residual.attention_norm": same(theirs + "self_attn_layer_norm"),
                first + "attention.projection.qkv": joined(
                    *(read + f"linear_{part}" for part in "qkv")
                ),
                first + "attention.projection.output": same(read + "linear_out"),
                first + "attention.encoding.keys": whole(read + "distance_embedding.weight"),
                first + "attention.encoding.values": no_table(0, size),
                first + "attention.encoding.u": whole(read + "pos_bias_u"),
                first + "attention.encoding.v": whole(read + "pos_bias_v"),
                first + "attention.encoding.weight": _waves(read + "linear_pos"),
                second + "residual.attention_norm": same(convolved + "layer_norm"),
                ours + "inputs": _pointwise(convolved + "pointwise_conv1"),
                ours + "filters": same(convolved + "depthwise_conv"),
                ours + "norm": same(convolved + "depthwise_layer_norm"),
                ours + "output": _pointwise(convolved + "pointwise_conv2"),
                after: same(theirs + "final_layer_norm"),
            }
        )
    return table


def _mlp(ours: str, theirs: str) -> Dict[str, Rule]:
    return {
        ours + "residual.mlp_norm": same(theirs + "_layer_norm"),
        ours + "mlp.up": same(theirs + ".intermediate_dense"),
        ours + "mlp.down": _halved(theirs + ".output_dense"),
    }


WEIGHTS: Table = {
    "tokens.stem.norm": same("wav2vec2_bert.feature_projection.layer_norm"),
    "tokens.stem.projection": same("wav2vec2_bert.feature_projection.projection"),
}
FAMILY = family.Family(
    describe, WEIGHTS, base="wav2vec2_bert.", unused=HEADS, further_weights=names
)
