"""Settings of small random checkpoints of families with gated delta rules beside attention."""

from typing import Any, Dict

from tests.models import latent

DELTA = {
    "vocab_size": 61, "hidden_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2,
    "num_hidden_layers": 4, "intermediate_size": 48, "max_position_embeddings": 512,
    "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "linear_num_key_heads": 2,
    "linear_num_value_heads": 4, "linear_key_head_dim": 16, "linear_value_head_dim": 24,
    "linear_conv_kernel_dim": 4,
}  # fmt: skip
EXPERTS = {
    "num_experts": 6, "num_experts_per_tok": 3, "moe_intermediate_size": 24,
    "shared_expert_intermediate_size": 20,
}  # fmt: skip
LATENT = {
    **latent.SIZES["deepseek_v3"], "num_local_experts": 8, "q_lora_rank": None,
    "linear_conv_kernel_dim": 4,
}  # fmt: skip
for key in ("n_routed_experts", "first_k_dense_replace"):
    del LATENT[key]
SIZES: Dict[str, Dict[str, Any]] = {
    "qwen3_next": {**DELTA, **EXPERTS, "head_dim": 32},
    "qwen3_5_text": {**DELTA, "head_dim": 32},
    "olmo_hybrid": DELTA,  # of 160 filters, saved as 54, 54 and 52 for 32, 32 and 96
    "kimi_linear": {**LATENT, "linear_num_heads": 3, "linear_head_dim": 16},
}
AXES = {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.5}
# Settings of each model that differ from SIZES. The first word of a name is the family.
MODELS: Dict[str, Dict[str, Any]] = {
    "qwen3_next": {"rms_norm_eps": 1e-3},
    "qwen3_next with dense layers": {
        "head_dim": 16, "layer_types": ["full_attention", "linear_attention", "linear_attention"],
        "num_hidden_layers": 3, "mlp_only_layers": [1], "attention_bias": True,
        "norm_topk_prob": False, "tie_word_embeddings": True, "linear_num_key_heads": 4,
        "linear_conv_kernel_dim": 2, "rope_parameters": AXES,
    },
    "qwen3_5_text": {"rope_parameters": {**AXES, "mrope_section": [3, 3, 2]}},
    "qwen3_5_text with biases": {
        "head_dim": 16, "attention_bias": True, "linear_num_key_heads": 1, "num_hidden_layers": 3,
        "layer_types": ["linear_attention", "full_attention", "full_attention"],
        "tie_word_embeddings": True, "linear_conv_kernel_dim": 3,
        "rope_parameters": {**AXES, "partial_rotary_factor": 1.0, "mrope_section": [4, 2, 2]},
    },
    "olmo_hybrid": {"rope_parameters": {"rope_theta": None, "rope_type": "default"}},
    "olmo_hybrid with a rotation": {
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0}, "attention_bias": True,
        "linear_allow_neg_eigval": False, "tie_word_embeddings": True, "num_hidden_layers": 2,
        "layer_types": ["full_attention", "linear_attention"],
    },
    "kimi_linear": {"num_hidden_layers": 5},
    "kimi_linear as published": {
        "num_hidden_layers": 3, "q_lora_rank": 28, "attention_bias": True, "n_group": 1,
        "topk_group": 1, "norm_topk_prob": False, "n_shared_experts": 2,
        "first_k_dense_replace": 2, "rms_norm_eps": 1e-3, "linear_attn_config": {
            "full_attn_layers": [1, 3], "kda_layers": [2], "num_heads": 4, "head_dim": 8,
            "short_conv_kernel_size": 3,
        },
    },
}  # fmt: skip
CONFIGS = {
    "qwen3_next": "Qwen3NextConfig",
    "qwen3_5_text": "Qwen3_5TextConfig",
    "olmo_hybrid": "OlmoHybridConfig",
    "kimi_linear": "KimiLinearConfig",
}
