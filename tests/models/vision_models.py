"""Small random vision-language models of transformers, and two rows of tokens with images and
videos.
"""

import re
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers

from posenc_export.runtime.grids import coordinates
from tests.models.checkpoints import DELTA, SIZES, randomised

TOWER = {"depth": 1, "hidden_size": 32, "out_hidden_size": 64, "num_heads": 2, "patch_size": 4,
    "intermediate_size": 40}  # fmt: skip
GLM = {**TOWER, "image_size": 16}
TOWERS = {
    "qwen2_vl": {"depth": 1, "embed_dim": 32, "hidden_size": 64, "num_heads": 2, "patch_size": 4,
        "mlp_ratio": 2},
    "qwen2_5_vl": {**TOWER, "tokens_per_second": 3},
    "qwen3_vl": {**TOWER, "deepstack_visual_indexes": [0]},
    "qwen3_5": TOWER, "glm4v": GLM, "glm46v": GLM, "glm_ocr": GLM,
}  # fmt: skip
CLASSES = {
    "qwen2_vl": "Qwen2VL", "qwen2_5_vl": "Qwen2_5_VL", "qwen3_vl": "Qwen3VL", "qwen3_5": "Qwen3_5",
    "glm4v": "Glm4v", "glm46v": "Glm46V", "glm_ocr": "GlmOcr",
}  # fmt: skip


def _axes(*sections: int, **more: Any) -> dict[str, Any]:
    rope = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": list(sections)}
    return {"rope_parameters": {**rope, **more}}


YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32}
# Settings of each text model that differ from SIZES, and whether the head is tied. The first word
# of a name is the model type.
MODELS: dict[str, tuple[dict[str, Any], bool]] = {
    "qwen2_vl": (_axes(2, 3, 3), False),
    "qwen2_vl with windows": (
        {
            **_axes(5, 1, 2, rope_theta=500.0), "num_hidden_layers": 3, "num_key_value_heads": 1,
            "use_sliding_window": True, "sliding_window": 8, "max_window_layers": 1,
            "rms_norm_eps": 1e-3,
        },
        True,
    ),
    "qwen2_5_vl": ({**_axes(2, 3, 3), "num_attention_heads": 4, "num_key_value_heads": 4}, True),
    "qwen3_vl": ({**_axes(6, 3, 3, mrope_interleaved=True), "head_dim": 24}, False),
    "qwen3_vl with biases": ({**_axes(6, 5, 5), "head_dim": 32, "attention_bias": True,
        "num_key_value_heads": 1}, True),
    # With a smaller epsilon, norms of small outputs amplify rounding in both models.
    "qwen3_5": ({**DELTA, **_axes(3, 3, 2, partial_rotary_factor=0.5), "head_dim": 32,
        "rms_norm_eps": 1e-3}, True),
    "qwen2_5_vl beyond its length": (_axes(2, 3, 3, **YARN), False),
    "qwen3_vl beyond its length": ({**_axes(6, 3, 3, **YARN, attention_factor=1.25),
        "head_dim": 24}, False),
    "glm4v": (_axes(1, 1, 2, partial_rotary_factor=0.5), False),
    "glm4v, whole heads": ({**_axes(2, 3, 3, rope_theta=500.0), "num_key_value_heads": 4}, True),
    "glm46v": (_axes(2, 1, 1, partial_rotary_factor=0.5), False),
    "glm_ocr": ({**_axes(2, 2, 2, partial_rotary_factor=0.5), "head_dim": 24}, False),
}  # fmt: skip
IMAGE, VIDEO, MARK = 60, 59, 58  # token ids
# Two rows of LENGTH tokens, as runs of one kind with the patches of images and videos.
ROWS: list[list[tuple[int, int, tuple[int, ...]]]] = [
    [(0, 5, ()), (1, 6, (1, 4, 6)), (0, 9, ()), (1, 8, (1, 8, 4)), (0, 12, ())],
    [(2, 12, (3, 4, 4)), (0, 8, ()), (1, 2, (1, 2, 4)), (0, 18, ())],
]


def described(name: str) -> Any:
    """Return transformers' configuration of a model."""
    own, (text, tied) = re.split("[ ,]", name)[0], MODELS[name]
    ids = {"image_token_id": IMAGE, "video_token_id": VIDEO}
    ids |= dict.fromkeys(("vision_start_token_id", "vision_end_token_id"), MARK)
    parts = {"text_config": {**SIZES, **text}, "vision_config": TOWERS[own]}
    result = getattr(transformers, CLASSES[own] + "Config")
    return result(**parts, tie_word_embeddings=tied, **ids)


def saved(name: str, folder: Path) -> Any:
    """Save transformers' model in a folder, and return it."""
    torch.manual_seed(0)
    kind = CLASSES[re.split("[ ,]", name)[0]] + "ForConditionalGeneration"
    model = randomised(getattr(transformers, kind)(described(name)))
    model.save_pretrained(folder)
    return model


def places() -> np.ndarray:
    """Return the coordinates of both rows [3,2,LENGTH]."""
    rows = []
    for runs in ROWS:
        kinds = [kind for kind, count, _ in runs for _ in range(count)]
        grids = ([grid for kind, _, grid in runs if kind == wanted] for wanted in (1, 2))
        rows.append(coordinates(kinds, *grids))
    return np.stack(rows, 1)
