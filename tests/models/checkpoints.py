"""Small random checkpoints, as transformers saves them."""

import copy
from pathlib import Path
from typing import Any

import torch
import transformers

from tests.models.patterns import BY_POSITION

SIZES = {
    "vocab_size": 61, "hidden_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2,
    "num_hidden_layers": 2, "intermediate_size": 48, "max_position_embeddings": 512,
    "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
DELTA = {
    "num_hidden_layers": 4, "linear_num_key_heads": 2, "linear_num_value_heads": 4,
    "linear_key_head_dim": 16, "linear_value_head_dim": 24, "linear_conv_kernel_dim": 4,
}  # fmt: skip
LLAMA3 = {
    "rope_type": "llama3", "rope_theta": 500000.0, "factor": 8.0, "low_freq_factor": 1.0,
    "high_freq_factor": 4.0, "original_max_position_embeddings": 64,
}  # fmt: skip
YARN = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0,
    "original_max_position_embeddings": 128}  # fmt: skip
LONGROPE = {
    "rope_type": "longrope", "rope_theta": 10000.0, "partial_rotary_factor": 0.75,
    "short_factor": [1.0, 1.1, 1.2, 1.3, 1.4, 1.5], "long_factor": [2.0, 3.0, 4.0, 5.0, 6.0, 7.0],
}  # fmt: skip
BY_TYPE = {
    "sliding_attention": {"rope_type": "default", "rope_theta": 1000.0},
    "full_attention": {"rope_type": "linear", "factor": 4.0, "rope_theta": 100000.0},
}
SPECIAL = {key: SIZES[key] for key in SIZES if key.endswith("_id") or key == "vocab_size"}
PLAIN = {key: SIZES[key] for key in SIZES if key != "num_key_value_heads"}
# Sizes of types whose keys have other names, or that have more of them.
OWN_SIZES: dict[str, dict[str, Any]] = {
    "gpt2": {**SPECIAL, "n_embd": 64, "n_head": 4, "n_layer": 2, "n_positions": 512},
    "gpt_neox": PLAIN,
    "mpt": {**SPECIAL, "d_model": 64, "n_heads": 4, "n_layers": 2, "max_seq_len": 512},
    "falcon": {key: PLAIN[key] for key in PLAIN if key != "intermediate_size"},
    "bloom": {**SPECIAL, "hidden_size": 64, "n_head": 4, "n_layer": 2, "seq_length": 512},
    "deepseek_v3": {
        **SIZES, "num_key_value_heads": 4, "num_hidden_layers": 3, "moe_intermediate_size": 24,
        "n_routed_experts": 8, "n_group": 4, "topk_group": 2, "num_experts_per_tok": 3,
        "first_k_dense_replace": 1, "kv_lora_rank": 20, "q_lora_rank": 28, "qk_nope_head_dim": 16,
        "qk_rope_head_dim": 8, "v_head_dim": 12,
    },
    "qwen3_next": {
        **SIZES, **DELTA, "head_dim": 32, "num_experts": 6, "num_experts_per_tok": 3,
        "moe_intermediate_size": 24, "shared_expert_intermediate_size": 20,
    },
}  # fmt: skip
# One type for each mechanism: settings that differ from the sizes. The first word of a name is the
# model type.
MODELS: dict[str, dict[str, Any]] = {
    "llama": {"rope_parameters": LLAMA3, "tie_word_embeddings": True},
    "llama with biases": {
        "attention_bias": True, "mlp_bias": True, "head_dim": 24, "num_key_value_heads": 4,
    },
    "mistral": {"sliding_window": 512, "head_dim": 32, "num_key_value_heads": 1},
    "mistral with a window": {"sliding_window": 8, "rope_parameters": YARN},
    "gpt2": {},
    "bloom": {},
    "mpt": {"n_heads": 6, "d_model": 96, "attn_config": {"clip_qkv": 0.7, "softmax_scale": 0.4}},
    "falcon": {"alibi": True, "bias": True, "multi_query": False, "parallel_attn": False,
        "num_attention_heads": 16, "activation": "gelu_new"},
    "falcon new": {"new_decoder_architecture": True, "num_kv_heads": 2, "ffn_hidden_size": 40},
    "qwen3": {
        "head_dim": 24, "num_key_value_heads": 1, "use_sliding_window": True, "sliding_window": 8,
        "max_window_layers": 1, "attention_bias": True, "tie_word_embeddings": True,
    },
    "phi3": {"rope_parameters": LONGROPE, "original_max_position_embeddings": 8},
    "phi3 short": {"rope_parameters": LONGROPE, "original_max_position_embeddings": 512},
    "gemma3_text": {
        "head_dim": 32, "query_pre_attn_scalar": 40, "sliding_window": 8,
        "rope_parameters": BY_TYPE, "final_logit_softcapping": 4.0,
        "layer_types": ["sliding_attention", "full_attention"],
    },
    "gpt_oss": {
        "head_dim": 32, "num_local_experts": 5, "num_experts_per_tok": 2, "sliding_window": 8,
        "swiglu_limit": 0.5, "rope_parameters": {**YARN, "truncate": False},
    },
    "llama4_text": {
        "head_dim": 16, "num_hidden_layers": 3, "attention_chunk_size": 7, "num_local_experts": 3,
        "num_experts_per_tok": 2, "intermediate_size_mlp": 40, "no_rope_layers": [0, 1, 0],
        "interleave_moe_layer_step": 2, "floor_scale": 5, "attn_scale": 0.5,
    },
    "deepseek_v3": {
        "rope_parameters": {**YARN, "mscale": 1.0, "mscale_all_dim": 0.7}, "rms_norm_eps": 1e-3,
    },
    "qwen3_next": {"rms_norm_eps": 1e-3},
}  # fmt: skip

# Patterns that transformers cannot compute: its temperatures use the column of a token as its
# position, and its rounded ALiBi always counts from 0.
WITHOUT: dict[str, tuple[str, ...]] = {"llama4_text": BY_POSITION, "falcon": ("shifted",)}


def described(name: str) -> Any:
    """Return transformers' configuration of a model. It has its own copy of nested entries, in
    which transformers writes.
    """
    model_type = name.split()[0]
    keys = {**OWN_SIZES.get(model_type, SIZES), **MODELS[name]}
    return transformers.CONFIG_MAPPING[model_type](**copy.deepcopy(keys))


def made(name: str) -> Any:
    """Return transformers' model with random parameters, float32, in eval mode."""
    torch.manual_seed(0)
    return randomised(transformers.AutoModelForCausalLM.from_config(described(name)))


def randomised(model: Any) -> Any:
    """Set all parameters of a model to random numbers, and return the model in eval mode."""
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn(parameter.shape) * (0.15 if parameter.dim() > 1 else 0.1))
        for key, parameter in model.named_parameters():
            # Gemma saves w - 1.
            if ("norm" in key or ".ln_" in key) and "gemma" not in model.config.model_type:
                parameter += 1.0
        for key, buffer in model.named_buffers():
            if key.endswith("e_score_correction_bias"):  # a weight, though not trained by gradients
                buffer.copy_(torch.randn(buffer.shape) * 0.3)
    return model.eval()


def saved(
    name: str, folder: Path, dtype: torch.dtype | None = None, shard: str = "5GB"
) -> tuple[Any, Path]:
    """Save transformers' model, and return it with its folder. With a dtype, weights are saved
    in it, and the returned float32 model has the rounded weights.
    """
    model = made(name)
    if dtype is not None:
        model = model.to(dtype)
    model.save_pretrained(folder, max_shard_size=shard)
    return model.float(), folder
