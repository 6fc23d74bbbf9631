"""Published configurations, with all their unused keys, give the expected descriptions."""

from posenc_export.models import families

USUAL = {
    "attention_dropout": 0.0, "bos_token_id": 1, "eos_token_id": [2, 3], "hidden_act": "silu",
    "initializer_range": 0.02, "torch_dtype": "bfloat16", "transformers_version": "4.46.1",
    "use_cache": True, "rms_norm_eps": 1e-5,
}  # fmt: skip
SMOLLM2 = {
    **USUAL, "model_type": "llama", "architectures": ["LlamaForCausalLM"], "attention_bias": False,
    "hidden_size": 576, "intermediate_size": 1536, "is_llama_config": True,
    "max_position_embeddings": 8192, "mlp_bias": False, "num_attention_heads": 9,
    "num_hidden_layers": 30, "num_key_value_heads": 3, "pretraining_tp": 1,
    "rope_interleaved": False, "rope_scaling": None, "rope_theta": 100000,
    "tie_word_embeddings": True, "vocab_size": 49152,
    "transformers.js_config": {"kv_cache_dtype": {"fp16": "float16"}},
}  # fmt: skip
MISTRAL = {
    **USUAL, "model_type": "mistral", "hidden_size": 4096, "intermediate_size": 14336,
    "max_position_embeddings": 32768, "num_attention_heads": 32, "num_hidden_layers": 32,
    "num_key_value_heads": 8, "rope_theta": 10000.0, "sliding_window": 4096,
    "tie_word_embeddings": False, "vocab_size": 32000,
}  # fmt: skip


def test_a_published_configuration_is_described() -> None:
    result = families.read(SMOLLM2)
    kind, head = result.kinds[0], result.head
    a = kind.attention
    assert (a.heads, a.kv_heads, a.head_size, result.max_positions) == (9, 3, 64, 8192)
    assert a.encodings == ({"name": "rope", "theta": 100000.0},)
    assert head is not None and head.tied
    assert (len(result.order), result.tokens.vocabulary, kind.mlp["hidden"]) == (30, 49152, 1536)
    assert a.projection == {"name": "grouped", "bias": False, "output_bias": False}


def test_a_published_window_is_seen_by_every_layer() -> None:
    sees = [kind.attention.sees for kind in families.read(MISTRAL).kinds]
    assert sees == [{"name": "window", "size": 4096}] * 32
