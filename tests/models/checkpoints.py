"""Small random checkpoints of every family, as transformers saves them."""

import copy
from pathlib import Path
from typing import Any, Dict, Optional, Tuple

import torch
import transformers

from posenc_export.models import families
from tests.models import earlier, hybrids, latent
from tests.models.patterns import BY_POSITION

SIZES = {
    "vocab_size": 61, "hidden_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2,
    "num_hidden_layers": 2, "intermediate_size": 48, "max_position_embeddings": 512,
    "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
LLAMA3 = {
    "rope_type": "llama3", "rope_theta": 500000.0, "factor": 8.0, "low_freq_factor": 1.0,
    "high_freq_factor": 4.0, "original_max_position_embeddings": 64,
}  # fmt: skip
YARN = {
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": 4.0,
    "original_max_position_embeddings": 128,
}
LONGROPE = {
    "rope_type": "longrope", "rope_theta": 10000.0, "partial_rotary_factor": 0.75,
    "short_factor": [1.0, 1.1, 1.2, 1.3, 1.4, 1.5], "long_factor": [2.0, 3.0, 4.0, 5.0, 6.0, 7.0],
}  # fmt: skip
# Settings of each model that differ from SIZES. The first word of a name is the family.
MODELS: Dict[str, Dict[str, Any]] = {
    "llama": {"rope_parameters": LLAMA3, "tie_word_embeddings": True},
    "llama with biases": {
        "attention_bias": True,
        "mlp_bias": True,
        "head_dim": 24,
        "num_key_value_heads": 4,
    },
    "mistral": {"sliding_window": 512, "head_dim": 32, "num_key_value_heads": 1},
    "qwen2": {"rope_parameters": YARN},
    "smollm3": {"num_hidden_layers": 5, "attention_bias": True},
    "phi3": {"rope_parameters": LONGROPE, "original_max_position_embeddings": 8},
    "phi3 short": {"rope_parameters": LONGROPE, "original_max_position_embeddings": 512},
    "phi3 plain": {"tie_word_embeddings": True, "sliding_window": 512},
    **earlier.MODELS,
}
CONFIGS = {
    "llama": "LlamaConfig",
    "mistral": "MistralConfig",
    "qwen2": "Qwen2Config",
    "smollm3": "SmolLM3Config",
    "phi3": "Phi3Config",
    **earlier.CONFIGS,
}

# Recent families.
BY_TYPE = {
    "sliding_attention": {"rope_type": "default", "rope_theta": 1000.0},
    "full_attention": {"rope_type": "linear", "factor": 4.0, "rope_theta": 100000.0},
}
MODELS |= {
    "qwen3": {"head_dim": 32, "rope_parameters": YARN},
    "qwen3 with windows": {
        "head_dim": 24,
        "num_key_value_heads": 1,
        "use_sliding_window": True,
        "sliding_window": 8,
        "max_window_layers": 1,
        "attention_bias": True,
        "tie_word_embeddings": True,
    },
    "olmo2": {"rope_parameters": LLAMA3},
    "gemma": {"head_dim": 32, "hidden_act": "gelu"},
    "gemma2": {
        "head_dim": 16,
        "query_pre_attn_scalar": 24,
        "sliding_window": 8,
        "attn_logit_softcapping": 2.0,
        "final_logit_softcapping": 5.0,
    },
    "gemma3_text": {
        "head_dim": 32,
        "query_pre_attn_scalar": 40,
        "sliding_window": 8,
        "sliding_window_pattern": 2,
        "rope_parameters": BY_TYPE,
    },
    "gemma3_text plain": {
        "head_dim": 16,
        "num_hidden_layers": 7,
        "sliding_window": 8,
        "final_logit_softcapping": 4.0,
        "tie_word_embeddings": False,
    },
    "cohere": {"logit_scale": 0.25},
    "cohere2": {"num_hidden_layers": 5, "sliding_window": 8, "logit_scale": 0.5},
    "glm": {"head_dim": 32},
    "stablelm": {},
    "ministral3": {
        "head_dim": 32,
        "rope_parameters": {
            **YARN,
            "llama_4_scaling_beta": 0.5,
            "original_max_position_embeddings": 9,
        },
    },
    "mixtral": {"num_local_experts": 5},
    "qwen3_moe": {
        "head_dim": 32,
        "num_experts": 6,
        "num_experts_per_tok": 3,
        "moe_intermediate_size": 24,
    },
    "gpt_oss": {
        "head_dim": 32,
        "num_local_experts": 5,
        "num_experts_per_tok": 2,
        "sliding_window": 8,
        "swiglu_limit": 0.5,
        "rope_parameters": {**YARN, "truncate": False, "rope_theta": 150000.0},
    },
    "gpt_oss without biases": {
        "head_dim": 16,
        "num_local_experts": 4,
        "num_experts_per_tok": 4,
        "sliding_window": 5,
        "attention_bias": False,
        "num_hidden_layers": 3,
        "layer_types": ["full_attention", "sliding_attention", "full_attention"],
        "rope_parameters": YARN,
        "swiglu_alpha": 1.0,
        "tie_word_embeddings": True,
    },
    "llama4_text": {
        "head_dim": 32,
        "num_hidden_layers": 4,
        "attention_chunk_size": 10,
        "num_local_experts": 4,
        "intermediate_size_mlp": 40,
        "interleave_moe_layer_step": 2,
        "attn_temperature_tuning": False,
        "rope_parameters": LLAMA3,
    },
    "llama4_text with temperatures": {
        "head_dim": 16,
        "num_hidden_layers": 3,
        "attention_chunk_size": 7,
        "num_local_experts": 3,
        "num_experts_per_tok": 2,
        "intermediate_size_mlp": 40,
        "no_rope_layers": [0, 1, 0],
        "floor_scale": 5,
        "attn_scale": 0.5,
        "attention_bias": True,
        "use_qk_norm": False,
        "tie_word_embeddings": True,
    },
}
CONFIGS |= {
    "qwen3": "Qwen3Config", "olmo2": "Olmo2Config", "gemma": "GemmaConfig",
    "gemma2": "Gemma2Config", "gemma3_text": "Gemma3TextConfig", "cohere": "CohereConfig",
    "cohere2": "Cohere2Config", "glm": "GlmConfig", "stablelm": "StableLmConfig",
    "ministral3": "Ministral3Config", "mixtral": "MixtralConfig", "qwen3_moe": "Qwen3MoeConfig",
    "gpt_oss": "GptOssConfig", "llama4_text": "Llama4TextConfig",
}  # fmt: skip

MODELS |= {**latent.MODELS, **hybrids.MODELS}
CONFIGS |= {**latent.CONFIGS, **hybrids.CONFIGS}

# Those that a family of ours reads; transformers' code computes the others.
OURS = [name for name in MODELS if not families.lacks({"model_type": name.split()[0]})]

# Patterns that transformers cannot compute: its temperatures use the column of a token as its
# position, and its rounded ALiBi always counts from 0.
WITHOUT: Dict[str, Tuple[str, ...]] = {
    "llama4_text with temperatures": BY_POSITION,
    "falcon with alibi": ("shifted",),
}


def described(name: str) -> Any:
    """Return transformers' configuration of a model. It has its own copy of nested entries, in
    which transformers writes.
    """
    own = {**earlier.SIZES, **latent.SIZES, **hybrids.SIZES}
    sizes = own.get(name.split()[0], SIZES)
    return getattr(transformers, CONFIGS[name.split()[0]])(
        **copy.deepcopy({**sizes, **MODELS[name]})
    )


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
            if ("norm" in key or ".ln_" in key) and not model.config.model_type.startswith(
                "gemma"
            ):  # Gemma saves w - 1
                parameter += 1.0
        for key, buffer in model.named_buffers():
            if key.endswith("e_score_correction_bias"):  # a weight, though not trained by gradients
                buffer.copy_(torch.randn(buffer.shape) * 0.3)
    return model.eval()


def saved(
    name: str, folder: Path, dtype: Optional[torch.dtype] = None, shard: str = "5GB"
) -> Tuple[Any, Path]:
    """Save transformers' model, and return it with its folder. With a dtype, weights are saved
    in it, and the returned float32 model has the rounded weights.
    """
    model = made(name)
    if dtype is not None:
        model = model.to(dtype)
    model.save_pretrained(folder, max_shard_size=shard)
    return model.float(), folder
