"""Small random checkpoints of the families before Llama."""

from typing import Any, Dict, Tuple

SHARED = {"vocab_size": 61, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
GPT = {**SHARED, "n_embd": 64, "n_head": 4, "n_layer": 2, "n_positions": 512}
# What a model of the family has unless it says otherwise.
SIZES: Dict[str, Dict[str, Any]] = {
    "gpt2": GPT,
}  # fmt: skip
# What each differs in; the first word is the family.
MODELS: Dict[str, Dict[str, Any]] = {
    "gpt2": {},
    "gpt2 scaled by layer": {
        "n_head": 2, "n_inner": 40, "n_layer": 3, "activation_function": "relu", "layer_norm_epsilon": 1e-3, "scale_attn_by_inverse_layer_idx": True,
        "tie_word_embeddings": False,
    },
    "gpt2 not scaled": {"n_head": 8, "scale_attn_weights": False, "reorder_and_upcast_attn": True},
}  # fmt: skip
CONFIGS = {
    "gpt2": "GPT2Config",
}  # fmt: skip
# Tensors that older versions of transformers saved beside the weights.
BUFFERS: Dict[str, Tuple[str, ...]] = {
    "gpt2": ("h.0.attn.bias", "h.1.attn.masked_bias"),
}
# What config.json of published models has beside the keys of transformers 5, and what it lacks.
PUBLISHED: Dict[str, Dict[str, Any]] = {
    "gpt2": {"n_ctx": 512, "task_specific_params": {"text-generation": {"do_sample": True, "max_length": 50}}, "output_past": True, "_num_labels": 1},
}
