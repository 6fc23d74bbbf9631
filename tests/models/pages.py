"""Small encoders of pages, called with token ids like other encoders: an id has a box, too."""

from typing import Any, Dict, Tuple

import numpy as np
import torch

from posenc_export.runtime import Session

PAGES = ("layoutlm", "layoutlmv3")
MODELS: Dict[str, Dict[str, Any]] = {
    "layoutlm": {"type_vocab_size": 2, "max_2d_position_embeddings": 90},
    "layoutlm other": {
        "type_vocab_size": 1,
        "max_2d_position_embeddings": 50,
        "hidden_act": "relu",
        "num_attention_heads": 3,
    },
    "layoutlmv3": {
        **{"type_vocab_size": 1, "max_2d_position_embeddings": 90},
        **{"coordinate_size": 8, "shape_size": 8, "input_size": 32},
    },
    "layoutlmv3 other": {
        **{"type_vocab_size": 2, "max_2d_position_embeddings": 70, "hidden_act": "relu"},
        **{"coordinate_size": 9, "shape_size": 6, "visual_embed": False, "rel_pos_bins": 8},
        **{"max_rel_pos": 20, "rel_2d_pos_bins": 12, "max_rel_2d_pos": 40},
    },
}
CONFIGS = {"layoutlm": "LayoutLMConfig", "layoutlmv3": "LayoutLMv3Config"}


def boxes(ids: Any, limit: int) -> Tuple[Any, Any, Any, Any]:
    """Return left, upper, right and lower edge of the box of each id, each below a limit."""
    left, upper = ids * 37 % limit, ids * 53 % limit
    return left, upper, left + ids * 11 % (limit - left), upper + ids * 29 % (limit - upper)


def grid_of(session: Session, tokens: np.ndarray) -> Dict[str, np.ndarray]:
    """Return the argument `grid` for token ids [B,S], if the model reads boxes."""
    limit = session.manifest.coordinate_range
    return {"grid": np.stack(boxes(tokens, limit))} if limit else {}


def with_boxes(model: Any) -> Any:
    """Let transformers' model and its base model read the boxes of ids when they get no bbox."""
    if model.config.model_type not in PAGES:
        return model
    limit = model.config.max_2d_position_embeddings

    def given(module: Any, arguments: Any, named: Dict[str, Any]) -> Any:
        if "bbox" not in named and len(arguments) == 1:
            named = {**named, "bbox": torch.stack(boxes(arguments[0], limit), dim=2)}
        return arguments, named

    for module in {model, model.base_model}:
        module.register_forward_pre_hook(given, with_kwargs=True)
    return model
