"""LayoutLM (Xu et al. 2020): BERT with positions of the boxes of tokens on a page."""

from posenc_export.models.families.shared.encoders import encoder, post_norm
from posenc_export.models.families.shared.family import Settings, StackConfig
from posenc_export.models.families.shared.rules import Table, same


def box_weights(embeddings: str) -> Table:
    """Return the rules of positions and boxes, from the prefix of tensor names."""
    boxes = {"of_x": "x", "of_y": "y", "of_height": "h", "of_width": "w"}
    tables = {f"parts.1.{ours}": f"{theirs}_position" for ours, theirs in boxes.items()}
    tables["parts.0.table"] = "position"
    return {
        f"token_encoding.{ours}": same(f"{embeddings}{theirs}_embeddings")
        for ours, theirs in tables.items()
    }


def describe(config: Settings) -> StackConfig:
    """Describe the encoder. A session takes the boxes as `grid` [4,B,S]: bbox [B,S,4] of
    transformers with its last axis first.
    """
    boxes = {"name": "boxes", "size": config.whole("max_2d_position_embeddings")}
    return post_norm(config, unused=0, beside=[boxes])


FAMILY = encoder(describe, "layoutlm.", box_weights("layoutlm.embeddings."))
