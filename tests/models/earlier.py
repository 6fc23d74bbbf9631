"""Small random checkpoints of the families before Llama."""

from typing import Any, Dict, Tuple

SHARED = {"vocab_size": 61, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
GPT = {**SHARED, "n_embd": 64, "n_head": 4, "n_layer": 2, "n_positions": 512}
PLAIN = {**SHARED, "hidden_size": 64, "num_attention_heads": 4, "num_hidden_layers": 2, "intermediate_size": 48, "max_position_embeddings": 512}
# What a model of the family has unless it says otherwise.
SIZES: Dict[str, Dict[str, Any]] = {
    "gpt2": GPT,
    "gpt_neox": PLAIN,
    "gptj": {**GPT, "n_embd": 128, "rotary_dim": 16},
    "phi": PLAIN,
}
LINEAR = {"rope_type": "linear", "rope_theta": 20000.0, "factor": 4.0, "partial_rotary_factor": 0.5}
# What each differs in; the first word is the family.
MODELS: Dict[str, Dict[str, Any]] = {
    "gpt2": {},
    "gpt2 scaled by layer": {
        "n_head": 2, "n_inner": 40, "n_layer": 3, "activation_function": "relu", "layer_norm_epsilon": 1e-3, "scale_attn_by_inverse_layer_idx": True,
        "tie_word_embeddings": False,
    },
    "gpt2 not scaled": {"n_head": 8, "scale_attn_weights": False, "reorder_and_upcast_attn": True},
    "gpt_neox": {"num_attention_heads": 2},
    "gpt_neox in turn": {
        "num_attention_heads": 1, "rope_parameters": LINEAR, "use_parallel_residual": False, "attention_bias": False, "hidden_act": "gelu_fast",
        "layer_norm_eps": 1e-3, "tie_word_embeddings": True,
    },
    "gptj": {},
    "gptj small": {"n_head": 16, "rotary_dim": 6, "n_inner": 40, "activation_function": "silu", "tie_word_embeddings": True},
    "phi": {},
    "phi normed": {
        "num_attention_heads": 4, "num_key_value_heads": 2, "qk_layernorm": True, "rope_parameters": {**LINEAR, "partial_rotary_factor": 1.0},
        "hidden_act": "gelu", "layer_norm_eps": 1e-3, "tie_word_embeddings": True,
    },
    "phi wide heads": {"num_key_value_heads": 1, "head_dim": 40, "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.4}},
}  # fmt: skip
CONFIGS = {"gpt2": "GPT2Config", "gpt_neox": "GPTNeoXConfig", "gptj": "GPTJConfig", "phi": "PhiConfig"}
# What names start with in published checkpoints that have it not, and tensors that older versions of transformers saved beside the weights.
BARE: Dict[str, Tuple[str, Tuple[str, ...]]] = {
    "gpt2": ("transformer.", ("h.0.attn.bias", "h.1.attn.masked_bias")),
}
WITH_BUFFERS = {
    "gpt_neox": ("gpt_neox.layers.0.attention.bias", "gpt_neox.layers.1.attention.masked_bias", "gpt_neox.layers.0.attention.rotary_emb.inv_freq"),
    "gptj": ("transformer.h.0.attn.bias", "transformer.h.1.attn.masked_bias"),
}
# What config.json of published models has beside the keys of transformers 5; None for keys that it lacks.
PUBLISHED: Dict[str, Dict[str, Any]] = {
    "gpt2": {"n_ctx": 512, "task_specific_params": {"text-generation": {"do_sample": True, "max_length": 50}}, "output_past": True, "_num_labels": 1},
    "gpt_neox": {"rope_parameters": None, "rotary_emb_base": 10000, "rotary_pct": 0.25, "attention_probs_dropout_prob": 0, "hidden_dropout_prob": 0},
    "gptj": {"rotary": True, "scale_attn_weights": True, "gradient_checkpointing": False, "tokenizer_class": "GPT2Tokenizer", "summary_type": "cls_index"},
    "phi": {"rope_parameters": None, "rope_theta": 10000.0, "rope_scaling": None, "partial_rotary_factor": 0.5, "num_key_value_heads": None},
}
