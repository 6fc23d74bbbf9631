"""LayoutLMv3 (Huang et al. 2022): RoBERTa with boxes of tokens, on tokens and in scores."""

from posenc_export.models.families.layoutlm import box_weights
from posenc_export.models.families.shared.encoders import encoder, post_norm
from posenc_export.models.families.shared.family import Named, Settings, StackConfig
from posenc_export.models.families.shared.rules import ENCODING, transposed

BASE = "layoutlmv3."
BIASES = {"of_text": "bias", "of_x": "x_bias", "of_y": "y_bias"}
WEIGHTS = {
    **box_weights(BASE + "embeddings."),
    **{f"{ENCODING}.{o}": transposed(f"{BASE}encoder.rel_pos_{t}") for o, t in BIASES.items()},
}
# Parts and keys of images
IMAGES = (rf"^({BASE})?(cls_token|pos_embed)$", rf"^({BASE})?(patch_embed|norm|LayerNorm)\.")
UNREAD = ("visual_embed", "input_size", "second_input_size", "num_channels", "patch_size")
MOST = 1024  # transformers clips heights and widths of boxes to 1023


def describe(config: Settings) -> StackConfig:
    """Describe the encoder of words and boxes, as transformers computes it without pixel_values."""
    config.ignore(UNREAD)
    both = ("has_relative_attention_bias", "has_spatial_attention_bias")
    config.fixed(dict.fromkeys(("text_embed", *both), True))
    size, extent = (config.whole(key) for key in ("max_2d_position_embeddings", "shape_size"))
    if size > MOST:
        raise config.refusal(f"max_2d_position_embeddings to be at most {MOST}", size)
    if (width := 4 * config.whole("coordinate_size") + 2 * extent) != config.width:
        rule = f"4 coordinate_size + 2 shape_size to be the width {config.width}"
        raise config.refusal(rule, width)
    boxes: Named = {"name": "boxes", "size": size, "extent": extent}
    biases: Named = {"name": "layout_bias", "size": size}
    biases |= {"buckets": config.whole("rel_pos_bins"), "max_distance": config.whole("max_rel_pos")}
    biases["box_buckets"] = config.whole("rel_2d_pos_bins")
    biases["box_max_distance"] = config.whole("max_rel_2d_pos")
    return post_norm(config, config.padding() + 1, [biases], beside=[boxes])


FAMILY = encoder(describe, BASE, WEIGHTS, IMAGES)
