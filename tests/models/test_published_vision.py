"""Configurations like those of Qwen's vision models, written from memory, give the expected
descriptions.
"""

from typing import Any, Dict

import pytest

from posenc_export.models import families

USUAL = {
    "attention_dropout": 0.0, "bos_token_id": 151643, "eos_token_id": 151645, "hidden_act": "silu",
    "initializer_range": 0.02, "torch_dtype": "bfloat16", "transformers_version": "4.41.2",
    "use_cache": True, "rms_norm_eps": 1e-06,
}  # fmt: skip
VISION = {
    "vision_start_token_id": 151652, "vision_end_token_id": 151653, "vision_token_id": 151654,
    "image_token_id": 151655, "video_token_id": 151656,
    "vision_config": {"depth": 32, "hidden_size": 1280, "spatial_merge_size": 2},
}  # fmt: skip
QWEN2_VL = {
    **USUAL, **VISION, "model_type": "qwen2_vl", "hidden_size": 3584, "intermediate_size": 18944,
    "max_position_embeddings": 32768, "max_window_layers": 28, "num_attention_heads": 28,
    "num_hidden_layers": 28, "num_key_value_heads": 4, "rope_theta": 1000000.0,
    "sliding_window": 32768, "tie_word_embeddings": False, "use_sliding_window": False,
    "rope_scaling": {"type": "mrope", "mrope_section": [16, 24, 24]}, "vocab_size": 152064,
}  # fmt: skip
QWEN2_5_VL = {
    **QWEN2_VL, "model_type": "qwen2_5_vl", "hidden_size": 2048, "intermediate_size": 11008,
    "max_position_embeddings": 128000, "max_window_layers": 70, "num_attention_heads": 16,
    "num_hidden_layers": 36, "num_key_value_heads": 2, "tie_word_embeddings": True,
    "vocab_size": 151936,
}  # fmt: skip
QWEN3_VL = {
    **VISION, "model_type": "qwen3_vl", "architectures": ["Qwen3VLForConditionalGeneration"],
    "tie_word_embeddings": True, "transformers_version": "4.57.0",
    "text_config": {
        **USUAL, "model_type": "qwen3_vl_text", "attention_bias": False, "dtype": "bfloat16",
        "head_dim": 128, "hidden_size": 2560, "intermediate_size": 9728,
        "max_position_embeddings": 262144, "num_attention_heads": 32, "num_hidden_layers": 36,
        "num_key_value_heads": 8, "rope_theta": 5000000,
        "rope_scaling": {"mrope_interleaved": True, "mrope_section": [24, 20, 20],
            "rope_type": "default"},
        "tie_word_embeddings": True, "vocab_size": 151936,
    },
}  # fmt: skip


# A configuration, and expected values of its description: heads, kv heads, head size, tied,
# encoding.
PUBLISHED: Dict[str, Any] = {
    "Qwen2-VL-7B": (
        QWEN2_VL,
        (28, 4, 128, False),
        {"name": "mrope", "theta": 1000000.0, "time": 16, "height": 24},
    ),
    "Qwen2.5-VL-3B": (
        QWEN2_5_VL,
        (16, 2, 128, True),
        {"name": "mrope", "theta": 1000000.0, "time": 16, "height": 24},
    ),
    "Qwen3-VL-4B": (
        QWEN3_VL,
        (32, 8, 128, True),
        {"name": "mrope_interleaved", "theta": 5000000.0, "height": 20, "width": 20},
    ),
}


@pytest.mark.parametrize("name", PUBLISHED)
def test_the_text_model_of_a_vision_model_is_described(name: str) -> None:
    config, wanted, encoding = PUBLISHED[name]
    result, _ = families.read(config)
    (attention,) = {id(kind.attention): kind.attention for kind in result.kinds}.values()
    assert (
        result.head is not None
        and (attention.heads, attention.kv_heads, attention.head_size, result.head.tied) == wanted
    )
    assert attention.encodings == (encoding,) and attention.sees == {"name": "causal"}
