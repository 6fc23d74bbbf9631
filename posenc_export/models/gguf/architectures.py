"""Architectures of GGUF files: the metadata of each as a config.json of transformers, and what
llama.cpp's conversion changed in its tensors.
"""

import re
from dataclasses import dataclass, field
from typing import Any, Callable, Dict, Mapping, Tuple

import numpy as np

from posenc_export.models.gguf.metadata import Metadata
from posenc_export.models.gguf.rotation import Read, rotation
from posenc_export.shared.suggestion import suggestion

Config = Dict[str, Any]
Change = Callable[[np.ndarray, Config], np.ndarray]
NORM_ALONE = r"norm\.weight$"
QKV = r"attn_qkv\."
MATRIX = r"attn_(qkv|output)\.weight|ffn_(up|down)\.weight"
Q, K = r"attn_q\.", r"attn_k\."


@dataclass(frozen=True)
class Architecture:
    """An architecture of GGUF files.

    Args:
        model_type: transformers' name of it.
        describe: returns the keys of config.json that `_common` does not.
        undo: what undoes the conversion, by a pattern of the tensor's name. A change of rows is
            also applied to their indices [N,1].
    """

    model_type: str
    describe: Callable[[Metadata, Config], Config]
    undo: Mapping[str, Change] = field(default_factory=dict)


def config_of(
    metadata: Metadata, shapes: Mapping[str, Tuple[int, ...]], read: Read
) -> Tuple[Config, Architecture]:
    """Return the config.json of a GGUF file, and its architecture.

    Args:
        shapes: shapes of its tensors by name.
        read: returns a tensor by name.

    Raises:
        ValueError: an unknown architecture; metadata that is missing, unknown or cannot be
            exported.
    """
    name, experts = str(metadata.architecture), metadata.values.get("llama.expert_count", 0)
    if name not in ARCHITECTURES:
        known = ", ".join(ARCHITECTURES)
        raise ValueError(
            f"gguf: expected general.architecture to be one of {known}, got {name!r}; "
            f"{suggestion(name, list(ARCHITECTURES))}"
        )
    if "token_embd.weight" not in shapes:
        raise ValueError(
            "gguf: expected a file with the tensor token_embd.weight, got none; give the "
            "file of the language model"
        )
    dense = isinstance(experts, int) and experts == 0
    kind = ARCHITECTURES[name] if name != "llama" or dense else MIXTRAL
    config = {
        "model_type": kind.model_type,
        "vocab_size": shapes["token_embd.weight"][0],
        **_common(metadata),
    }
    config |= kind.describe(metadata, config)
    turned = (
        rotation(metadata, config["head_dim"], read) if kind.model_type not in NOT_TURNED else {}
    )
    config |= {
        SPELLED.get(kind.model_type, {}).get(key, key): value for key, value in turned.items()
    }
    if kind.model_type in NO_HEAD_SIZE:
        del config["head_dim"]
    metadata.finish()
    return config, kind


def _common(metadata: Metadata) -> Config:
    width, heads = metadata.whole("embedding_length"), metadata.whole("attention.head_count")
    size = metadata.whole("attention.key_length", width // heads)
    if metadata.whole("attention.value_length", size) != size:
        raise ValueError(
            f"gguf: expected values as long as keys, {size}, got another "
            "attention.value_length; convert the model to safetensors"
        )
    if metadata.take("attention.causal", True) is not True:
        raise ValueError(
            "gguf: expected attention.causal to be true, got false; convert the model to "
            "safetensors"
        )
    return {
        "hidden_size": width,
        "num_attention_heads": heads,
        "num_key_value_heads": metadata.whole("attention.head_count_kv", heads),
        "head_dim": size,
        "num_hidden_layers": metadata.whole("block_count"),
        "intermediate_size": metadata.whole("feed_forward_length"),
        "max_position_embeddings": metadata.whole("context_length"),
        "tie_word_embeddings": not metadata.holds("output.weight"),
    }


def _rms(metadata: Metadata, activation: str = "silu") -> Config:
    return {
        "hidden_act": activation,
        "rms_norm_eps": metadata.number("attention.layer_norm_rms_epsilon"),
    }


def _bias(metadata: Metadata) -> bool:
    return metadata.holds("blk.0.attn_q.bias")


def _llama(metadata: Metadata, config: Config) -> Config:
    for key in ("expert_count", "expert_used_count"):
        metadata.take(key)  # 0 without experts
    return {
        **_rms(metadata),
        "attention_bias": _bias(metadata),
        "mlp_bias": metadata.holds("blk.0.ffn_gate.bias"),
    }


def _mixtral(metadata: Metadata, config: Config) -> Config:
    return {
        **_rms(metadata),
        "num_local_experts": metadata.whole("expert_count"),
        "num_experts_per_tok": metadata.whole("expert_used_count"),
        "sliding_window": None,
    }


def _smollm3(metadata: Metadata, config: Config) -> Config:
    return {
        **_rms(metadata),
        "attention_bias": _bias(metadata),
        "mlp_bias": metadata.holds("blk.0.ffn_gate.bias"),
    }


def _qwen2(metadata: Metadata, config: Config) -> Config:
    return _rms(metadata)


def _qwen3(metadata: Metadata, config: Config) -> Config:
    return {**_rms(metadata), "attention_bias": _bias(metadata)}


def _qwen3_moe(metadata: Metadata, config: Config) -> Config:
    experts = {
        "num_experts": metadata.whole("expert_count"),
        "num_experts_per_tok": metadata.whole("expert_used_count"),
        "norm_topk_prob": True,
    }
    return {
        **_rms(metadata),
        "attention_bias": _bias(metadata),
        **experts,
        "moe_intermediate_size": metadata.whole("expert_feed_forward_length"),
    }


def _gemma(metadata: Metadata, config: Config) -> Config:
    return {**_rms(metadata, "gelu_pytorch_tanh"), "attention_bias": _bias(metadata)}


def _scaled(metadata: Metadata, config: Config, by_width: int) -> Config:
    """Keys of Gemma 2 and 3. llama.cpp knows from the number of layers that the 27B models
    divide scores by the root of width / heads.
    """
    scale = (
        config["hidden_size"] // config["num_attention_heads"]
        if config["num_hidden_layers"] == by_width
        else config["head_dim"]
    )
    found = _rms(metadata)
    return {
        "rms_norm_eps": found["rms_norm_eps"], "hidden_activation": "gelu_pytorch_tanh", "attention_bias": _bias(metadata),
        "query_pre_attn_scalar": scale, "sliding_window": metadata.whole("attention.sliding_window"),
    }  # fmt: skip


def _gemma2(metadata: Metadata, config: Config) -> Config:
    caps = {key: metadata.number(name, default) for key, name, default in CAPS}
    return {**_scaled(metadata, config, 46), **caps}


def _gemma3(metadata: Metadata, config: Config) -> Config:
    local = metadata.number("rope.freq_base_swa", 10000.0)
    pattern = metadata.take("attention.sliding_window_pattern", 6)
    metadata.take("rope.dimension_count_swa")
    found = {**_scaled(metadata, config, 62), "rope_local_base_freq": float(local)}
    if isinstance(pattern, list):  # whether each layer has a window
        types = ["sliding_attention" if one else "full_attention" for one in pattern]
        found["layer_types"] = types
    else:
        found["sliding_window_pattern"] = pattern
    return {
        **found,
        **metadata.given(final_logit_softcapping=metadata.take("final_logit_softcapping")),
    }


CAPS = (
    ("attn_logit_softcapping", "attn_logit_softcapping", 50.0),
    ("final_logit_softcapping", "final_logit_softcapping", 30.0),
)


def _phi3(metadata: Metadata, config: Config) -> Config:
    return {
        **_rms(metadata),
        "sliding_window": metadata.take("attention.sliding_window") or None,
        **_original(metadata),
    }


def _original(metadata: Metadata) -> Config:
    """Take the original length, which Phi-3's files also have without LongRoPE."""
    if not metadata.holds("rope_factors_long.weight"):
        metadata.take("rope.scaling.original_context_length")
        metadata.take("rope.scaling.attn_factor")
    return {}


def _layer_norm(metadata: Metadata, key: str = "layer_norm_eps") -> Config:
    return {key: metadata.number("attention.layer_norm_epsilon")}


def _plain(metadata: Metadata, config: Config) -> Config:
    """Check that keys have as many heads as queries, and remove their number, which config.json
    of these families does not have.
    """
    if config.pop("num_key_value_heads") != config["num_attention_heads"]:
        raise ValueError(
            f"gguf: expected as many key heads as query heads in {metadata.architecture}, "
            "got other numbers; convert the model again"
        )
    return {}


def _gpt2(metadata: Metadata, config: Config) -> Config:
    metadata.take("rope.dimension_count")
    return {**_plain(metadata, config), **_layer_norm(metadata, "layer_norm_epsilon")}


def _gpt_neox(metadata: Metadata, config: Config) -> Config:
    parallel = metadata.take("use_parallel_residual", True)
    return {
        **_plain(metadata, config),
        **_layer_norm(metadata),
        "use_parallel_residual": parallel,
        "hidden_act": "gelu",
    }


def _bloom(metadata: Metadata, config: Config) -> Config:
    return {**_plain(metadata, config), **_layer_norm(metadata, "layer_norm_epsilon")}


def _mpt(metadata: Metadata, config: Config) -> Config:
    if config.pop("intermediate_size") != 4 * config["hidden_size"]:
        raise ValueError(
            "gguf: expected feed_forward_length to be four times embedding_length in mpt, "
            "got another; convert the model to safetensors"
        )
    inside = {
        "alibi_bias_max": metadata.number("attention.max_alibi_bias", 8.0),
        "clip_qkv": metadata.take("attention.clamp_kqv") or None,
    }
    return {
        **_plain(metadata, config),
        **_layer_norm(metadata, "layer_norm_epsilon"),
        "attn_config": inside,
    }


def _falcon(metadata: Metadata, config: Config) -> Config:
    kv_heads, hidden = config.pop("num_key_value_heads"), config.pop("intermediate_size")
    new = kv_heads > 1
    apart = (
        {"num_ln_in_parallel_attn": 2 if metadata.holds("blk.0.attn_norm_2.weight") else 1}
        if new
        else {}
    )
    heads = {
        "new_decoder_architecture": new,
        "num_kv_heads": kv_heads if new else config["num_attention_heads"],
        "multi_query": True,
        "ffn_hidden_size": hidden,
    }
    return {
        **_layer_norm(metadata, "layer_norm_epsilon"),
        **heads,
        **apart,
        "bias": metadata.holds("blk.0.attn_qkv.bias"),
    }


def _phi2(metadata: Metadata, config: Config) -> Config:
    return {**_layer_norm(metadata), "hidden_act": "gelu_new"}


def _stablelm(metadata: Metadata, config: Config) -> Config:
    parallel = bool(metadata.take("use_parallel_residual", False)) and not metadata.holds(
        "blk.0.ffn_norm.weight"
    )
    norms = {
        "use_qkv_bias": _bias(metadata),
        "qk_layernorm": metadata.holds("blk.0.attn_q_norm.weight"),
    }
    return {
        **_layer_norm(metadata),
        "hidden_act": "silu",
        "use_parallel_residual": parallel,
        **norms,
    }


def _olmo2(metadata: Metadata, config: Config) -> Config:
    return {**_rms(metadata), "attention_bias": _bias(metadata)}


def _cohere(metadata: Metadata, config: Config) -> Config:
    norms = {
        "use_qk_norm": metadata.holds("blk.0.attn_q_norm.weight"),
        "attention_bias": _bias(metadata),
    }
    return {
        **_layer_norm(metadata),
        "hidden_act": "silu",
        "logit_scale": metadata.number("logit_scale"),
        **norms,
    }


def _cohere2(metadata: Metadata, config: Config) -> Config:
    window = {
        "sliding_window": metadata.whole("attention.sliding_window"),
        "attention_bias": _bias(metadata),
    }
    return {
        **_layer_norm(metadata),
        "hidden_act": "silu",
        "logit_scale": metadata.number("logit_scale"),
        **window,
    }


def _heads_apart(count: Callable[[Config], int]) -> Change:
    """Return what undoes the permutation of rows that turns pairs (k, k + D/2) of a head into
    pairs (2k, 2k + 1).
    """

    def undo(rows: np.ndarray, config: Config) -> np.ndarray:
        heads = rows.reshape(count(config), -1, 2, *rows.shape[1:])
        return heads.swapaxes(1, 2).reshape(rows.shape)

    return undo


def _in_groups(rows: np.ndarray, config: Config) -> np.ndarray:
    """Undo the sorting of a packed projection into queries, keys and values: for each kv head
    its queries, its key, its value.
    """
    heads = int(config["num_attention_heads"])
    groups = (
        int(config.get("num_kv_heads", heads))
        if config["model_type"] == "falcon" and config["new_decoder_architecture"]
        else heads
    )
    groups = (
        1 if config["model_type"] == "falcon" and not config["new_decoder_architecture"] else groups
    )
    size = len(rows) // (heads + 2 * groups)
    parts = [
        part.reshape(groups, -1, *rows.shape[1:])
        for part in np.split(rows, [heads * size, (heads + groups) * size])
    ]
    return np.concatenate(parts, axis=1).reshape(rows.shape)


def _without_one(weight: np.ndarray, config: Config) -> np.ndarray:
    return weight - np.float32(1)


def _transposed(weight: np.ndarray, config: Config) -> np.ndarray:
    return weight.T


TURNED = {
    Q: _heads_apart(lambda config: int(config["num_attention_heads"])),
    K: _heads_apart(lambda config: int(config["num_key_value_heads"])),
}
ONE_MORE = {NORM_ALONE: _without_one}
MIXTRAL = Architecture("mixtral", _mixtral, TURNED)
ARCHITECTURES = {
    "llama": Architecture("llama", _llama, TURNED),  # also Mistral and Mixtral
    "smollm3": Architecture("smollm3", _smollm3, TURNED),
    "qwen2": Architecture("qwen2", _qwen2),
    "qwen3": Architecture("qwen3", _qwen3),
    "qwen3moe": Architecture("qwen3_moe", _qwen3_moe),
    "gemma": Architecture("gemma", _gemma, ONE_MORE),
    "gemma2": Architecture("gemma2", _gemma2, ONE_MORE),
    "gemma3": Architecture("gemma3_text", _gemma3, ONE_MORE),
    "phi2": Architecture("phi", _phi2),
    "phi3": Architecture("phi3", _phi3),
    "gpt2": Architecture("gpt2", _gpt2, {MATRIX: _transposed}),
    "gptneox": Architecture("gpt_neox", _gpt_neox, {QKV: _in_groups}),
    "bloom": Architecture("bloom", _bloom, {QKV: _in_groups}),
    "falcon": Architecture("falcon", _falcon, {QKV: _in_groups}),
    "mpt": Architecture("mpt", _mpt),
    "stablelm": Architecture("stablelm", _stablelm),
    "olmo2": Architecture("olmo2", _olmo2),
    "command-r": Architecture("cohere", _cohere),
    "cohere2": Architecture("cohere2", _cohere2),
}
# Other names of keys of the rotation.
SPELLED = {"gpt_neox": {"rope_theta": "rotary_emb_base", "partial_rotary_factor": "rotary_pct"}}
NOT_TURNED = ("gpt2", "bloom", "mpt")
NO_HEAD_SIZE = ("gpt2", "bloom", "mpt", "gpt_neox", "falcon", "phi", "stablelm", "cohere")


def undone(name: str, rows: np.ndarray, kind: Architecture, config: Config) -> np.ndarray:
    """Return a tensor as it was before the conversion to GGUF.

    Args:
        name: its name in the file.
        rows: its numbers, or indices of its rows [N,1].
    """
    for pattern, change in kind.undo.items():
        if re.search(pattern, name):
            return np.ascontiguousarray(change(rows, config))
    return rows
