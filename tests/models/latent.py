"""Settings of small random checkpoints of families with latent attention."""

from typing import Any, Dict

SIZES: Dict[str, Dict[str, Any]] = {
    "deepseek_v3": {
        "vocab_size": 61, "hidden_size": 64, "num_attention_heads": 4, "num_key_value_heads": 4,
        "num_hidden_layers": 3, "intermediate_size": 48, "max_position_embeddings": 512,
        "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "moe_intermediate_size": 24,
        "n_routed_experts": 8, "n_group": 4, "topk_group": 2, "num_experts_per_tok": 3,
        "first_k_dense_replace": 1, "kv_lora_rank": 20, "q_lora_rank": 28, "qk_nope_head_dim": 16,
        "qk_rope_head_dim": 8, "v_head_dim": 12,
    },
}  # fmt: skip
# Settings of each model that differ from SIZES. The first word of a name is the family.
MODELS: Dict[str, Dict[str, Any]] = {
    "deepseek_v3": {
        "rope_parameters": {
            "rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0,
            "original_max_position_embeddings": 128, "beta_fast": 32, "beta_slow": 1, "mscale": 1.0,
            "mscale_all_dim": 0.7,
        },
        "rms_norm_eps": 1e-3,
    },
    "deepseek_v3 without a rank of queries": {
        "q_lora_rank": None, "rope_interleave": False, "attention_bias": True,
        "norm_topk_prob": False, "n_group": 1, "topk_group": 1, "v_head_dim": 24,
        "num_attention_heads": 2, "num_key_value_heads": 2, "first_k_dense_replace": 0,
        "num_hidden_layers": 2, "n_shared_experts": 2, "routed_scaling_factor": 1.3,
        "num_experts_per_tok": 2, "tie_word_embeddings": True, "n_routed_experts": 5,
    },
    "deepseek_v3 dense": {
        "first_k_dense_replace": 4, "qk_nope_head_dim": 8, "qk_rope_head_dim": 16, "v_head_dim": 32,
        "attention_bias": True, "num_nextn_predict_layers": 0,
    },
}  # fmt: skip
CONFIGS = {"deepseek_v3": "DeepseekV3Config"}
