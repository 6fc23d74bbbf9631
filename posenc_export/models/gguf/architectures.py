"""Architectures of GGUF files: metadata as config.json, and what the conversion changed."""

from dataclasses import dataclass, field
from typing import Any, Callable, Mapping, Tuple

from posenc_export.models.gguf.conversion import CONV1D, GROUPED, ONE_MORE, TURNED, Change, Config
from posenc_export.models.gguf.metadata import AGAIN, SAFETENSORS, Metadata, present
from posenc_export.models.gguf.rotation import Read, rotation
from posenc_export.shared.refusal import refusal
from posenc_export.shared.suggestion import suggestion

Further = Callable[[Metadata, Config], Config]


@dataclass(frozen=True)
class Architecture:
    """An architecture of GGUF files."""

    model_type: str  # transformers' name of it
    # Keys of config.json that `_common` does not return: values, or functions of the metadata.
    keys: Mapping[str, Any]
    # What undoes the conversion, by a pattern of the tensor's name. A change of rows is also
    # applied to their indices [N,1].
    undo: Mapping[str, Change] = field(default_factory=dict)
    further: Further = lambda metadata, config: {}  # returns keys that depend on other keys
    without: Tuple[str, ...] = ()  # keys of `_common` that config.json of this type does not have
    rotates: bool = True  # whether it has a rotation
    spelled: Mapping[str, str] = field(default_factory=dict)  # other names of keys of the rotation


def config_of(
    metadata: Metadata, shapes: Mapping[str, Tuple[int, ...]], read: Read
) -> Tuple[Config, Architecture]:
    """Return the config.json of a GGUF file with tensors of these shapes, which `read` returns by
    name, and its architecture. ValueError: metadata that is missing, unknown or cannot be exported.
    """
    name, experts = str(metadata.architecture), metadata.values.get("llama.expert_count", 0)
    if name not in ARCHITECTURES:
        rule = f"general.architecture to be one of {', '.join(ARCHITECTURES)}"
        raise refusal("gguf", rule, repr(name), suggestion(name, list(ARCHITECTURES)))
    if "token_embd.weight" not in shapes:
        remedy = "give the file of the language model"
        raise refusal("gguf", "a file with the tensor token_embd.weight", "none", remedy)
    dense = isinstance(experts, int) and experts == 0
    kind = ARCHITECTURES[name] if name != "llama" or dense else MIXTRAL
    config: Config = {"model_type": kind.model_type, "vocab_size": shapes["token_embd.weight"][0]}
    config |= _common(metadata)
    for key, value in kind.keys.items():
        config[key] = value(metadata) if callable(value) else value
    config |= kind.further(metadata, config)
    turned = rotation(metadata, config["head_dim"], read) if kind.rotates else {}
    config |= {kind.spelled.get(key, key): value for key, value in turned.items()}
    metadata.finish()
    return {key: value for key, value in config.items() if key not in kind.without}, kind


def _common(metadata: Metadata) -> Config:
    width, heads = metadata.whole("embedding_length"), metadata.whole("attention.head_count")
    size = metadata.whole("attention.key_length", width // heads)
    if metadata.whole("attention.value_length", size) != size:
        rule = f"values as long as keys, {size}"
        raise refusal("gguf", rule, "another attention.value_length", SAFETENSORS)
    if metadata.take("attention.causal", True) is not True:
        raise refusal("gguf", "attention.causal to be true", "false", SAFETENSORS)
    return {
        "hidden_size": width,
        "num_attention_heads": heads,
        "num_key_value_heads": metadata.whole("attention.head_count_kv", heads),
        "head_dim": size,
        "num_hidden_layers": metadata.whole("block_count"),
        "intermediate_size": metadata.whole("feed_forward_length"),
        "max_position_embeddings": metadata.whole("context_length"),
        "tie_word_embeddings": not metadata.holds("output.weight"),
        "pad_token_id": None,  # the default of a type may be beyond the vocabulary
    }


def _whole(key: str) -> Callable[[Metadata], int]:
    return lambda metadata: metadata.whole(key)


def _number(key: str, *default: float) -> Callable[[Metadata], float]:
    return lambda metadata: float(metadata.number(key, *default))


def _holds(tensor: str) -> Callable[[Metadata], bool]:
    return lambda metadata: metadata.holds(tensor)


def _dense(metadata: Metadata, config: Config) -> Config:
    """Take the numbers of experts, which are 0."""
    metadata.take("expert_count")
    metadata.take("expert_used_count")
    return {}


def _scaled(by_width: int) -> Further:
    """Keys of Gemma 2 and 3. llama.cpp knows from the number of layers that the 27B models,
    with `by_width` layers, divide scores by the root of width / heads.
    """

    def further(metadata: Metadata, config: Config) -> Config:
        by_head = config["hidden_size"] // config["num_attention_heads"]
        widest = config["num_hidden_layers"] == by_width
        return {"query_pre_attn_scalar": by_head if widest else config["head_dim"]}

    return further


def _gemma3(metadata: Metadata, config: Config) -> Config:
    pattern = metadata.take("attention.sliding_window_pattern", 6)
    metadata.take("rope.dimension_count_swa")
    types: Config = {"sliding_window_pattern": pattern}
    if isinstance(pattern, list):  # whether each layer has a window
        names = ["sliding_attention" if window else "full_attention" for window in pattern]
        types = {"layer_types": names}
    cap = present(final_logit_softcapping=metadata.take("final_logit_softcapping"))
    return {**_scaled(62)(metadata, config), **types, **cap}


def _phi3(metadata: Metadata, config: Config) -> Config:
    """Take the original length, which Phi-3's files also have without LongRoPE."""
    if not metadata.holds("rope_factors_long.weight"):
        metadata.take("rope.scaling.original_context_length")
        metadata.take("rope.scaling.attn_factor")
    return {}


def _equal_heads(metadata: Metadata, config: Config) -> Config:
    """Check that keys have as many heads as queries."""
    if config["num_key_value_heads"] != config["num_attention_heads"]:
        rule = f"as many key heads as query heads in {metadata.architecture}"
        raise refusal("gguf", rule, "other numbers", AGAIN)
    return {}


def _gpt2(metadata: Metadata, config: Config) -> Config:
    metadata.take("rope.dimension_count")
    return _equal_heads(metadata, config)


def _mpt(metadata: Metadata, config: Config) -> Config:
    if config["intermediate_size"] != 4 * config["hidden_size"]:
        rule = "feed_forward_length to be four times embedding_length in mpt"
        raise refusal("gguf", rule, "another", SAFETENSORS)
    if (slopes := metadata.number("attention.max_alibi_bias", 8.0)) != 8:
        raise refusal("gguf", "attention.max_alibi_bias to be 8", slopes, SAFETENSORS)
    clip = metadata.take("attention.clamp_kqv") or None
    _equal_heads(metadata, config)
    return {"attn_config": {"clip_qkv": clip}}


def _falcon(metadata: Metadata, config: Config) -> Config:
    new = config["num_key_value_heads"] > 1
    norms = 2 if metadata.holds("blk.0.attn_norm_2.weight") else 1
    return {
        "new_decoder_architecture": new,
        "num_kv_heads": config["num_key_value_heads" if new else "num_attention_heads"],
        "ffn_hidden_size": config["intermediate_size"],
        **({"num_ln_in_parallel_attn": norms} if new else {}),
    }


def _parallel(metadata: Metadata) -> bool:
    parallel = bool(metadata.take("use_parallel_residual", False))
    return parallel and not metadata.holds("blk.0.ffn_norm.weight")


# Keys of several types.
RMS = {"rms_norm_eps": _number("attention.layer_norm_rms_epsilon"), "hidden_act": "silu"}
LAYER_NORM = {"layer_norm_eps": _number("attention.layer_norm_epsilon")}
EPSILON = {"layer_norm_epsilon": _number("attention.layer_norm_epsilon")}
BIAS, GELU = {"attention_bias": _holds("blk.0.attn_q.bias")}, "gelu_pytorch_tanh"
MLP_BIAS = {"mlp_bias": _holds("blk.0.ffn_gate.bias")}
EXPERTS = {"num_experts_per_tok": _whole("expert_used_count")}
HEAD_NORMS, WINDOW = _holds("blk.0.attn_q_norm.weight"), _whole("attention.sliding_window")
GEMMA = {
    "rms_norm_eps": RMS["rms_norm_eps"],
    "hidden_activation": GELU,
    "sliding_window": WINDOW,
    **BIAS,
}
COHERE = {**LAYER_NORM, **BIAS, "hidden_act": "silu", "logit_scale": _number("logit_scale")}
SIZE, HEADS = ("head_dim",), ("head_dim", "num_key_value_heads")

MIXTRAL = Architecture(
    "mixtral",
    {**RMS, **EXPERTS, "num_local_experts": _whole("expert_count"), "sliding_window": None},
    TURNED,
)
ARCHITECTURES = {
    "llama": Architecture("llama", {**RMS, **BIAS, **MLP_BIAS}, TURNED, _dense),  # also Mistral
    "smollm3": Architecture("smollm3", {**RMS, **BIAS, **MLP_BIAS}, TURNED),
    "qwen2": Architecture("qwen2", RMS),
    "qwen3": Architecture("qwen3", {**RMS, **BIAS}),
    "qwen3moe": Architecture(
        "qwen3_moe",
        {
            **{**RMS, **BIAS, **EXPERTS, "norm_topk_prob": True},
            "num_experts": _whole("expert_count"),
            "moe_intermediate_size": _whole("expert_feed_forward_length"),
        },
    ),
    "gemma": Architecture("gemma", {**RMS, **BIAS, "hidden_act": GELU}, ONE_MORE),
    "gemma2": Architecture(
        "gemma2",
        {
            **GEMMA,
            "attn_logit_softcapping": _number("attn_logit_softcapping", 50.0),
            "final_logit_softcapping": _number("final_logit_softcapping", 30.0),
        },
        ONE_MORE,
        _scaled(46),
    ),
    "gemma3": Architecture(
        "gemma3_text",
        {**GEMMA, "rope_local_base_freq": _number("rope.freq_base_swa", 10000.0)},
        ONE_MORE,
        _gemma3,
    ),
    "phi2": Architecture("phi", {**LAYER_NORM, "hidden_act": "gelu_new"}, without=SIZE),
    "phi3": Architecture(
        "phi3",
        {
            **RMS,
            "sliding_window": lambda metadata: metadata.take("attention.sliding_window") or None,
        },
        further=_phi3,
    ),
    "gpt2": Architecture("gpt2", EPSILON, CONV1D, _gpt2, HEADS, rotates=False),
    "gptneox": Architecture(
        "gpt_neox",
        {
            **LAYER_NORM,
            "use_parallel_residual": lambda metadata: metadata.take("use_parallel_residual", True),
            "hidden_act": "gelu",
        },
        GROUPED,
        _equal_heads,
        HEADS,
        spelled={"rope_theta": "rotary_emb_base", "partial_rotary_factor": "rotary_pct"},
    ),
    "bloom": Architecture("bloom", EPSILON, GROUPED, _equal_heads, HEADS, rotates=False),
    "falcon": Architecture(
        "falcon",
        {**EPSILON, "multi_query": True, "bias": _holds("blk.0.attn_qkv.bias")},
        GROUPED,
        _falcon,
        (*HEADS, "intermediate_size"),
    ),
    "mpt": Architecture("mpt", EPSILON, {}, _mpt, (*HEADS, "intermediate_size"), rotates=False),
    "stablelm": Architecture(
        "stablelm",
        {
            **LAYER_NORM,
            "hidden_act": "silu",
            "use_parallel_residual": _parallel,
            "use_qkv_bias": _holds("blk.0.attn_q.bias"),
            "qk_layernorm": HEAD_NORMS,
        },
        without=SIZE,
    ),
    "olmo2": Architecture("olmo2", {**RMS, **BIAS}),
    "command-r": Architecture("cohere", {**COHERE, "use_qk_norm": HEAD_NORMS}, without=SIZE),
    "cohere2": Architecture("cohere2", {**COHERE, "sliding_window": WINDOW}),
}
