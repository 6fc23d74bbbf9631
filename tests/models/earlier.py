"""Settings of small random checkpoints of the families before Llama."""

from typing import Any, Dict, Tuple

SHARED = {"vocab_size": 61, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
GPT = {**SHARED, "n_embd": 64, "n_head": 4, "n_layer": 2, "n_positions": 512}
PLAIN = {
    **SHARED,
    "hidden_size": 64,
    "num_attention_heads": 4,
    "num_hidden_layers": 2,
    "intermediate_size": 48,
    "max_position_embeddings": 512,
}
# Default settings of each family.
SIZES: Dict[str, Dict[str, Any]] = {
    "gpt2": GPT,
    "gpt_neox": PLAIN,
    "phi": PLAIN,
    "mpt": {**SHARED, "d_model": 64, "n_heads": 4, "n_layers": 2, "max_seq_len": 512},
    "falcon": {
        **SHARED,
        "hidden_size": 64,
        "num_attention_heads": 4,
        "num_hidden_layers": 2,
        "max_position_embeddings": 512,
    },
    "bloom": {**SHARED, "hidden_size": 64, "n_head": 4, "n_layer": 2, "seq_length": 512},
}
LINEAR = {"rope_type": "linear", "rope_theta": 20000.0, "factor": 4.0, "partial_rotary_factor": 0.5}
# Settings of each model that differ from SIZES. The first word of a name is the family.
MODELS: Dict[str, Dict[str, Any]] = {
    "gpt2": {},
    "gpt2 scaled by layer": {
        "n_head": 2, "n_inner": 40, "n_layer": 3, "activation_function": "relu",
        "layer_norm_epsilon": 1e-3, "scale_attn_by_inverse_layer_idx": True,
        "tie_word_embeddings": False,
    },
    "gpt2 not scaled": {"n_head": 8, "scale_attn_weights": False, "reorder_and_upcast_attn": True},
    "gpt_neox": {"num_attention_heads": 2},
    "gpt_neox in turn": {
        "num_attention_heads": 1, "rope_parameters": LINEAR, "use_parallel_residual": False,
        "attention_bias": False, "hidden_act": "gelu_fast", "layer_norm_eps": 1e-3,
        "tie_word_embeddings": True,
    },
    "phi": {},
    "mpt": {},
    "mpt clipped": {
        "n_heads": 6, "d_model": 96, "layer_norm_epsilon": 1e-3, "tie_word_embeddings": False,
        "attn_config": {"clip_qkv": 0.7, "softmax_scale": 0.4},
    },
    "falcon": {},
    "falcon with alibi": {"alibi": True, "bias": True, "multi_query": False, "parallel_attn": False,
        "num_attention_heads": 16, "activation": "gelu_new"},
    "falcon new": {"new_decoder_architecture": True, "num_kv_heads": 2, "ffn_hidden_size": 40,
        "rope_parameters": {**LINEAR, "partial_rotary_factor": 1.0}},
    "falcon new with one norm": {
        "new_decoder_architecture": True, "num_kv_heads": 1, "num_ln_in_parallel_attn": 1,
        "layer_norm_epsilon": 1e-3, "tie_word_embeddings": False,
    },
    "bloom": {},
    "bloom of six heads": {"hidden_size": 96, "n_head": 6, "layer_norm_epsilon": 1e-3,
        "tie_word_embeddings": False},
}  # fmt: skip
CONFIGS = {
    "gpt2": "GPT2Config", "gpt_neox": "GPTNeoXConfig", "phi": "PhiConfig",
    "bloom": "BloomConfig", "mpt": "MptConfig", "falcon": "FalconConfig",
}  # fmt: skip
# Prefixes that published checkpoints lack, and buffers that older versions of transformers saved.
BARE: Dict[str, Tuple[str, Tuple[str, ...]]] = {
    "gpt2": ("transformer.", ("h.0.attn.bias", "h.1.attn.masked_bias")),
    "bloom": ("transformer.", ()),
    "falcon": ("transformer.", ()),
}
# Keys of config.json in published models that transformers 5 does not write; None for keys that
# published models lack.
PUBLISHED: Dict[str, Dict[str, Any]] = {
    "gpt2": {"n_ctx": 512,
        "task_specific_params": {"text-generation": {"do_sample": True, "max_length": 50}},
    "output_past": True, "_num_labels": 1},
    "mpt": {
        "attn_config": {"alibi": True, "alibi_bias_max": 8, "attn_impl": "torch", "attn_pdrop": 0,
            "attn_type": "multihead_attention", "prefix_lm": False},
        "init_config": {"name": "kaiming_normal_"}, "tokenizer_name": "EleutherAI/gpt-neox-20b",
        "verbose": 0, "norm_type": "low_precision_layernorm",
    },
    "falcon": {"rope_parameters": None, "num_kv_heads": None, "ffn_hidden_size": None,
        "activation": None, "apply_residual_connection_post_layernorm": False},
    "falcon new": {"ff_factor": 4},
    "bloom": {
        "attention_softmax_in_fp32": True, "bias_dropout_fusion": True,
        "masked_softmax_fusion": True, "n_embed": 64, "n_inner": None, "offset_alibi": 100,
        "skip_bias_add": True, "skip_bias_add_qkv": False, "unk_token_id": 0, "hidden_size": None,
        "num_attention_heads": 4, "n_head": None,
    },
}  # fmt: skip
