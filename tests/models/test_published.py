"""Published configurations, with all their unused keys, give the expected descriptions."""

import json
from typing import Any, Dict

import pytest

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
QWEN2 = {
    **USUAL, "model_type": "qwen2", "hidden_size": 3584, "intermediate_size": 18944,
    "max_position_embeddings": 32768, "max_window_layers": 28, "num_attention_heads": 28,
    "num_hidden_layers": 28, "num_key_value_heads": 4, "rope_theta": 1000000.0,
    "sliding_window": 131072, "tie_word_embeddings": False, "use_sliding_window": False,
    "use_mrope": False, "vocab_size": 152064,
}  # fmt: skip
QWEN2_1M = {
    **QWEN2, "max_position_embeddings": 1010000, "rope_theta": 10000000.0,
    "dual_chunk_attention_config": {"chunk_size": 262144, "local_size": 8192,
        "original_max_position_embeddings": 262144},
}  # fmt: skip
MISTRAL = {
    **USUAL, "model_type": "mistral", "hidden_size": 4096, "intermediate_size": 14336,
    "max_position_embeddings": 32768, "num_attention_heads": 32, "num_hidden_layers": 32,
    "num_key_value_heads": 8, "rope_theta": 10000.0, "sliding_window": 4096,
    "tie_word_embeddings": False, "vocab_size": 32000,
}  # fmt: skip
PHI3 = {
    **USUAL, "_name_or_path": "Phi-3-mini-4k-instruct", "model_type": "phi3",
    "auto_map": {"AutoConfig": "configuration_phi3.Phi3Config"}, "embd_pdrop": 0.0,
    "hidden_size": 3072, "intermediate_size": 8192, "max_position_embeddings": 4096,
    "num_attention_heads": 32, "num_hidden_layers": 32, "num_key_value_heads": 32,
    "original_max_position_embeddings": 4096, "pad_token_id": 32000, "resid_pdrop": 0.0,
    "rope_scaling": None, "rope_theta": 10000.0, "sliding_window": 2047,
    "tie_word_embeddings": False, "attention_bias": False, "vocab_size": 32064,
}  # fmt: skip
PHI4_MINI = {
    **PHI3, "full_attn_mod": 1, "interpolate_factor": 1, "lm_head_bias": False, "mlp_bias": False,
    "max_position_embeddings": 131072, "num_attention_heads": 24, "num_key_value_heads": 8,
    "partial_rotary_factor": 0.75, "sliding_window": 262144, "tie_word_embeddings": True,
    "rope_scaling": {"type": "longrope", "short_factor": [1.0] * 48,
        "long_factor": [1.0 + 0.5 * pair for pair in range(48)]},
    "vocab_size": 200064,
}  # fmt: skip
# A configuration, and expected values of its description: heads, kv heads, head size,
# max_positions, name of the encoding, theta, tied.
PUBLISHED: Dict[str, Any] = {
    "SmolLM2-135M": (SMOLLM2, (9, 3, 64, 8192, "rope", 100000.0, True)),
    "Qwen2-7B": (QWEN2, (28, 4, 128, 32768, "rope", 1000000.0, False)),
    "Qwen2.5-7B-Instruct-1M": (QWEN2_1M, (28, 4, 128, 1010000, "dual_chunk", 1e7, False)),
    "Phi-4-mini": (PHI4_MINI, (24, 8, 128, 131072, "rope_longrope", 10000.0, True)),
}


@pytest.mark.parametrize("name", PUBLISHED)
def test_a_published_configuration_is_described(name: str) -> None:
    config, wanted = PUBLISHED[name]
    result, _ = families.read(config)
    kind = result.kinds[0]
    (encoding,), a = kind.attention.encodings, kind.attention
    assert result.head is not None
    assert (
        a.heads,
        a.kv_heads,
        a.head_size,
        result.max_positions,
        encoding["name"],
        encoding["theta"],
        result.head.tied,
    ) == wanted
    assert (len(result.order), result.tokens.vocabulary, kind.mlp["hidden"]) == (
        config["num_hidden_layers"],
        config["vocab_size"],
        config["intermediate_size"],
    )
    assert a.projection == {
        "name": "grouped",
        "bias": config["model_type"] == "qwen2",
        "output_bias": False,
    }


def test_dual_chunks_of_qwen2_are_left_out_of_a_range_with_one_chunk() -> None:
    one, two = (families.read(QWEN2_1M, max_positions=count)[0] for count in (253952, 253953))
    spec = one.kinds[0].attention.encodings[0]
    assert spec == {"name": "rope", "theta": 1e7}
    sizes = {"chunk_size": 262144, "local_size": 8192, "original_max_positions": 262144}
    assert two.kinds[0].attention.encodings[0] == {**spec, "name": "dual_chunk", **sizes}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"sparse_attention_enabled": True}, "got dual_chunk_attention_config.sparse_attention_en"),
        ({"local_size": 0}, "local_size to be an integer above 0, got 0"),
    ],
)
def test_dual_chunks_of_another_attention_are_refused(
    changes: Dict[str, Any], message: str
) -> None:
    chunks = {**QWEN2_1M["dual_chunk_attention_config"], **changes}
    with pytest.raises(ValueError, match=message):
        families.read({**QWEN2_1M, "dual_chunk_attention_config": chunks})


def test_phi_4_mini_turns_three_quarters_of_a_head_with_the_magnitude_of_its_length() -> None:
    spec = families.read(PHI4_MINI, max_positions=4096)[0].kinds[0].attention.encodings[0]
    assert spec["rotary"] == 96 and spec["original_max_positions"] == 4096
    assert spec["attention_factor"] == pytest.approx(
        (1 + 5 * 0.6931471805599453 / 8.317766166719343) ** 0.5
    )  # 131072 / 4096 = 2^5, ln 4096


@pytest.mark.parametrize(("config", "window"), [(MISTRAL, 4096), (PHI3, 2047)])
def test_a_published_window_is_seen_by_every_layer(config: Dict[str, Any], window: int) -> None:
    assert {json.dumps(kind.attention.sees) for kind in families.read(config)[0].kinds} == {
        json.dumps({"name": "window", "size": window})
    }
