"""Configurations like those of published models, written from memory, give the expected
descriptions.
"""

from collections import Counter
from typing import Any, Dict

import pytest

from posenc_export.models import families

USUAL = {
    "architectures": ["ForCausalLM"], "attention_dropout": 0.0, "bos_token_id": 1,
    "eos_token_id": [2, 3], "initializer_range": 0.02, "torch_dtype": "bfloat16",
    "transformers_version": "4.51.0", "use_cache": True,
}  # fmt: skip
CONFIGS: Dict[str, Dict[str, Any]] = {
    "Qwen3-8B": {
        "model_type": "qwen3", "attention_bias": False, "head_dim": 128, "hidden_act": "silu",
        "hidden_size": 4096, "intermediate_size": 12288, "max_position_embeddings": 40960,
        "max_window_layers": 36, "num_attention_heads": 32, "num_hidden_layers": 36,
        "num_key_value_heads": 8, "rms_norm_eps": 1e-06, "rope_scaling": None,
        "rope_theta": 1000000, "sliding_window": None, "tie_word_embeddings": False,
        "use_sliding_window": False, "vocab_size": 151936,
    },
    "gemma-3-1b-it": {
        "model_type": "gemma3_text", "attention_bias": False, "attn_logit_softcapping": None,
        "cache_implementation": "hybrid", "final_logit_softcapping": None, "head_dim": 256,
        "hidden_activation": "gelu_pytorch_tanh", "hidden_size": 1152, "intermediate_size": 6912,
        "max_position_embeddings": 32768, "num_attention_heads": 4, "num_hidden_layers": 26,
        "num_key_value_heads": 1, "pad_token_id": 0, "query_pre_attn_scalar": 256,
        "rms_norm_eps": 1e-06, "rope_local_base_freq": 10000, "rope_scaling": None,
        "rope_theta": 1000000, "sliding_window": 512, "sliding_window_pattern": 6,
        "vocab_size": 262144,
    },
    "gemma-3-270m": {
        "model_type": "gemma3_text", "_sliding_window_pattern": 6, "attention_bias": False,
        "attn_logit_softcapping": None, "final_logit_softcapping": None, "head_dim": 256,
        "hidden_activation": "gelu_pytorch_tanh", "hidden_size": 640, "intermediate_size": 2048,
        "layer_types": (["sliding_attention"] * 5 + ["full_attention"]) * 3,
        "max_position_embeddings": 32768, "num_attention_heads": 4, "num_hidden_layers": 18,
        "num_key_value_heads": 1, "pad_token_id": 0, "query_pre_attn_scalar": 256,
        "rms_norm_eps": 1e-06, "rope_local_base_freq": 10000.0, "rope_scaling": None,
        "rope_theta": 1000000.0, "sliding_window": 512, "use_bidirectional_attention": False,
        "vocab_size": 262144,
    },
    "gpt-oss-20b-bf16": {
        "model_type": "gpt_oss", "attention_bias": True, "experts_per_token": 4, "head_dim": 64,
        "hidden_act": "silu", "hidden_size": 2880, "initial_context_length": 4096,
        "intermediate_size": 2880, "layer_types": ["sliding_attention", "full_attention"] * 12,
        "max_position_embeddings": 131072, "num_attention_heads": 64, "num_experts_per_tok": 4,
        "num_hidden_layers": 24, "num_key_value_heads": 8, "num_local_experts": 32,
        "output_router_logits": False, "pad_token_id": 199999, "rms_norm_eps": 1e-05,
        "rope_scaling": {"beta_fast": 32.0, "beta_slow": 1.0, "factor": 32.0,
            "original_max_position_embeddings": 4096, "rope_type": "yarn", "truncate": False},
        "rope_theta": 150000, "router_aux_loss_coef": 0.9, "sliding_window": 128,
        "swiglu_limit": 7.0, "tie_word_embeddings": False, "vocab_size": 201088,
    },
    "Llama-4-Scout text": {
        "model_type": "llama4_text", "attention_bias": False, "attention_chunk_size": 8192,
        "attn_scale": 0.1, "attn_temperature_tuning": True, "floor_scale": 8192,
        "for_llm_compressor": False, "head_dim": 128, "hidden_act": "silu", "hidden_size": 5120,
        "interleave_moe_layer_step": 1, "intermediate_size": 8192, "intermediate_size_mlp": 16384,
        "max_position_embeddings": 10485760, "moe_layers": list(range(48)),
        "no_rope_layers": [1, 1, 1, 0] * 12, "num_attention_heads": 40, "num_experts_per_tok": 1,
        "num_hidden_layers": 48, "num_key_value_heads": 8, "num_local_experts": 16,
        "output_router_logits": False, "pad_token_id": 200018, "rms_norm_eps": 1e-05,
        "rope_scaling": {"factor": 16.0, "high_freq_factor": 1.0, "low_freq_factor": 1.0,
            "original_max_position_embeddings": 8192, "rope_type": "llama3"},
        "rope_theta": 500000.0, "router_aux_loss_coef": 0.001, "router_jitter_noise": 0.0,
        "tie_word_embeddings": False, "use_qk_norm": True, "vocab_size": 202048,
    },
}  # fmt: skip
# Expected values of a description: head size, number of layers by encodings and `sees`, MLP, hidden
# width.
HOLDS: Dict[str, Any] = {
    "Qwen3-8B": (128, {"rope causal": 36}, "gated", 12288),
    "gemma-3-1b-it": (256, {"rope window": 22, "rope causal": 4}, "gated", 6912),
    "gemma-3-270m": (256, {"rope window": 15, "rope causal": 3}, "gated", 2048),
    "gpt-oss-20b-bf16": (64, {"rope_yarn window": 12, "rope_yarn causal": 12}, "experts", 2880),
    "Llama-4-Scout text": (128, {"rope_llama3 chunk": 36, "logn causal": 12}, "experts", 8192),
}


@pytest.mark.parametrize("name", CONFIGS)
def test_a_configuration_like_a_published_one_is_described(name: str) -> None:
    made, _ = families.read({**USUAL, **CONFIGS[name]})
    size, layers, mlp, hidden = HOLDS[name]
    result = Counter(
        " ".join(
            (*(spec["name"] for spec in kind.attention.encodings), kind.attention.sees["name"])
        )
        for kind in made.kinds
    )
    assert result == layers
    assert {
        (kind.attention.head_size, kind.mlp["name"], kind.mlp["hidden"]) for kind in made.kinds
    } == {(size, mlp, hidden)}


def test_thetas_of_gemma3_are_by_layer_type() -> None:
    result, _ = families.read({**USUAL, **CONFIGS["gemma-3-1b-it"]})
    assert [kind.attention.encodings[0]["theta"] for kind in result.kinds[:6]] == [10000.0] * 5 + [
        1000000.0
    ]
