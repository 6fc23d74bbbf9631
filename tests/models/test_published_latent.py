"""Configurations like those of Kimi Linear and Qwen's vision models, written from
memory, give the expected descriptions.
"""

import json
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
KIMI_LINEAR = {
    **USUAL, "model_type": "kimi_linear", "architectures": ["KimiLinearForCausalLM"],
    "auto_map": {"AutoConfig": "configuration_kimi.KimiLinearConfig"}, "first_k_dense_replace": 1,
    "head_dim": 72, "hidden_size": 2304, "intermediate_size": 9216, "kv_lora_rank": 512,
    "linear_attn_config": {
        "full_attn_layers": [4, 8, 12, 16, 20, 24, 27], "head_dim": 128, "num_heads": 32,
        "kda_layers": [i for i in range(1, 27) if i % 4], "short_conv_kernel_size": 4,
    },
    "mla_use_nope": True, "model_max_length": 1048576, "moe_intermediate_size": 1024,
    "moe_layer_freq": 1, "moe_renormalize": True, "moe_router_activation_func": "sigmoid",
    "num_attention_heads": 32, "num_expert_group": 1, "num_experts": 256,
    "num_experts_per_token": 8, "num_hidden_layers": 27, "num_key_value_heads": 32,
    "num_nextn_predict_layers": 0, "num_shared_experts": 1, "q_lora_rank": None,
    "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "rope_scaling": None, "rope_theta": 10000.0,
    "routed_scaling_factor": 2.446, "tie_word_embeddings": False, "topk_group": 1,
    "use_grouped_topk": True, "v_head_dim": 128, "vocab_size": 163840,
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


@pytest.mark.filterwarnings("ignore:`rope_scaling` is deprecated")
def test_kimi_linear_is_described_as_transformers_reads_it() -> None:
    from transformers import KimiLinearConfig

    result, _ = families.read(KIMI_LINEAR)
    again = json.loads(KimiLinearConfig.from_dict(dict(KIMI_LINEAR)).to_json_string())
    assert again.keys() > {"linear_num_heads", "layer_types"}
    nested = again.pop("linear_attn_config")
    assert result == families.read(again)[0]
    assert result == families.read({**again, "linear_attn_config": nested})[0]
    assert result.order.count("full_attention experts") == 7
    rule = result.layers["linear_attention experts"].attention
    sizes = {"value_size": 128, "kernel": 4, "rank": 128, "epsilon": 1e-6}
    assert (rule.heads, rule.projection) == (32, {"name": "gated_delta", **sizes})
    changed = {**nested, "kda_layers": nested["full_attn_layers"]}
    with pytest.raises(ValueError, match="expected each of layers 1 .. 27 once"):
        families.read({**KIMI_LINEAR, "linear_attn_config": changed})


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
