"""Small random checkpoints of every family, as transformers saves them."""

from pathlib import Path
from typing import Any, Dict, Optional, Tuple

import torch
import transformers

from tests.models import earlier

SIZES = {
    "vocab_size": 61, "hidden_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2, "num_hidden_layers": 2, "intermediate_size": 48,
    "max_position_embeddings": 512, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
LLAMA3 = {
    "rope_type": "llama3", "rope_theta": 500000.0, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 64,
}  # fmt: skip
YARN = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 128}
LONGROPE = {
    "rope_type": "longrope", "rope_theta": 10000.0, "partial_rotary_factor": 0.75,
    "short_factor": [1.0, 1.1, 1.2, 1.3, 1.4, 1.5], "long_factor": [2.0, 3.0, 4.0, 5.0, 6.0, 7.0],
}  # fmt: skip
# What each differs in from SIZES; the first word is the family.
MODELS: Dict[str, Dict[str, Any]] = {
    "llama": {"rope_parameters": LLAMA3, "tie_word_embeddings": True},
    "llama with biases": {"attention_bias": True, "mlp_bias": True, "head_dim": 24, "num_key_value_heads": 4},
    "mistral": {"sliding_window": 512, "head_dim": 32, "num_key_value_heads": 1},
    "qwen2": {"rope_parameters": YARN},
    "smollm3": {"num_hidden_layers": 5, "attention_bias": True},
    "phi3": {"rope_parameters": LONGROPE, "original_max_position_embeddings": 64},
    "phi3 plain": {"tie_word_embeddings": True, "sliding_window": 512},
    **earlier.MODELS,
}
CONFIGS = {"llama": "LlamaConfig", "mistral": "MistralConfig", "qwen2": "Qwen2Config", "smollm3": "SmolLM3Config", "phi3": "Phi3Config", **earlier.CONFIGS}


def made(name: str) -> Any:
    """Transformers' model, every parameter random, float32, in eval mode."""
    torch.manual_seed(0)
    config = getattr(transformers, CONFIGS[name.split()[0]])(**{**earlier.SIZES.get(name.split()[0], SIZES), **MODELS[name]})
    model = transformers.AutoModelForCausalLM.from_config(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn(parameter.shape) * (0.15 if parameter.dim() > 1 else 0.1))
        for key, parameter in model.named_parameters():
            if "norm" in key or ".ln_" in key:
                parameter += 1.0
    return model


def saved(name: str, folder: Path, dtype: Optional[torch.dtype] = None, shard: str = "5GB") -> Tuple[Any, Path]:
    """Transformers' model and the folder where it is saved; in float32 with the rounded weights where a dtype is given."""
    model = made(name)
    if dtype is not None:
        model = model.to(dtype)
    model.save_pretrained(folder, max_shard_size=shard)
    return model.float(), folder
