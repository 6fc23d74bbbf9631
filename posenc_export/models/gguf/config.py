"""The metadata of GGUF files as config.json of transformers, and what the conversion changed."""

from typing import Any, Callable, Mapping

import numpy as np

from posenc_export.models.gguf.file import GGUFFile, GGUFTensor
from posenc_export.shared.foreign import explained
from posenc_export.shared.refusal import refusal
from posenc_export.shared.suggestion import suggestion

Config = dict[str, Any]
Tensors = Mapping[str, GGUFTensor]
Change = Callable[[np.ndarray, Config], np.ndarray]
AGAIN = "convert the model again, or to safetensors and export that"
# Keys of an architecture that say nothing that the tensors and the other keys do not say.
REPEATED = ("vocab_size", "rope.scaling.finetuned", "tensor_data_layout")
TABLE, HEAD = "token_embd.weight", "output.weight"
LONGEST = 2**12  # entries of an array that is read, one for each layer
FACTORS, SHORT, LONG = "rope_freqs.weight", "rope_factors_short.weight", "rope_factors_long.weight"
ORIGINAL = "original_max_position_embeddings"
BETAS = ("beta_fast", "beta_slow")  # of YaRN
# Keys with their names in config.json: those that all files have, and others. Values of 0 and keys
# that are missing leave the default of the model type.
SIZES = {
    "embedding_length": "hidden_size",
    "attention.head_count": "num_attention_heads",
    "block_count": "num_hidden_layers",
    "feed_forward_length": "intermediate_size",
    "context_length": "max_position_embeddings",
}
KEYS = {
    "attention.layer_norm_rms_epsilon": "rms_norm_eps",
    "attention.layer_norm_epsilon": "layer_norm_eps",
    "attention.sliding_window": "sliding_window",
    "attn_logit_softcapping": "attn_logit_softcapping",
    "final_logit_softcapping": "final_logit_softcapping",
    "logit_scale": "logit_scale",
    "expert_count": "num_experts",
    "expert_used_count": "num_experts_per_tok",
    "expert_feed_forward_length": "moe_intermediate_size",
}
# Keys of config.json that say whether layers have a tensor.
FLAGS = {"attention_bias": "blk.0.attn_output.bias", "mlp_bias": "blk.0.ffn_gate.bias"}


class Metadata:
    """The keys of an architecture, without its name. Each is taken once."""

    def __init__(self, architecture: str, values: Mapping[str, Any]) -> None:
        start = f"{architecture}."
        own = {key.removeprefix(start): values[key] for key in values if key.startswith(start)}
        self.left: dict[str, Any] = {key: own[key] for key in own if key not in REPEATED}

    def take(self, key: str, *default: Any) -> Any:
        """Remove a key and return its value; an array as a list, or as one value if all entries are
        equal. ValueError: there is no such key and no default, an array is too long.
        """
        if key not in self.left and not default:
            raise ValueError(f"no {key}")
        value = self.left.pop(key, *default)
        if not isinstance(value, np.ndarray):
            return value
        if len(value) > LONGEST:
            raise ValueError(f"{key} with {len(value)} entries")
        return value[0].item() if len({*value.tolist()}) == 1 else value.tolist()

    def only(self, key: str, wanted: Any) -> None:
        """Take a key. ValueError: it has another value than the only one that is read."""
        if (value := self.take(key, wanted)) != wanted:
            raise ValueError(f"{key} {value!r:.80}, not {wanted}")


def config_of(file: GGUFFile) -> tuple[Config, Mapping[str, Change]]:
    """Return the config.json of a GGUF file, and what undoes its conversion. ValueError: metadata
    that are missing, unknown or cannot be exported.
    """
    name = str(file.values.get("general.architecture"))
    kind = str(file.values.get("general.type", "model"))
    if kind != "model" or TABLE not in file.tensors:
        got = f"no {TABLE}" if kind == "model" else f"general.type {kind!r:.80}"
        remedy = "give the file of the model; an adapter must be merged into it first"
        raise refusal("gguf", f"the file of a language model, with {TABLE}", got, remedy)
    if name not in ARCHITECTURES:
        rule = f"general.architecture to be one of {', '.join(ARCHITECTURES)}"
        raise refusal("gguf", rule, f"{name!r:.80}", suggestion(name, list(ARCHITECTURES)))
    with explained(f"gguf: expected keys {name}.* of a model that can be exported", AGAIN):
        metadata, (model_type, undo) = Metadata(name, file.values), ARCHITECTURES[name]
        config = {"model_type": model_type} | _config(metadata, file.tensors)
        config |= MORE[name](metadata, config, file.tensors) if name in MORE else {}
        if metadata.left:
            raise ValueError(f"{', '.join(sorted(metadata.left))}, which are not read")
    return config, undo


def _config(metadata: Metadata, tensors: Tensors) -> Config:
    config: Config = {
        "vocab_size": tensors[TABLE].shape[0],
        "tie_word_embeddings": HEAD not in tensors,
        "pad_token_id": None,  # the default of a type may be beyond the vocabulary
        **{own: metadata.take(key) for key, own in SIZES.items()},
    }
    heads, positions = config["num_attention_heads"], config["max_position_embeddings"]
    size = metadata.take("attention.key_length", None)
    config |= _given(head_dim=size)
    size = size or config["hidden_size"] // heads
    metadata.only("attention.value_length", size)
    metadata.only("attention.causal", True)
    config["num_key_value_heads"] = metadata.take("attention.head_count_kv", heads)
    config |= {own: value for key, own in KEYS.items() if (value := metadata.take(key, 0))}
    if not {"rms_norm_eps", "layer_norm_eps"} & {*config}:
        raise ValueError("no attention.layer_norm_rms_epsilon")
    config |= {key: True for key, tensor in FLAGS.items() if tensor in tensors}
    config["rope_parameters"] = _rotation(metadata, size, positions, tensors)
    return config


def _rotation(metadata: Metadata, size: int, positions: int, tensors: Tensors) -> Config:
    """Return rope_parameters. What the file leaves open is as in llama.cpp. Factors of frequencies,
    with which files have the scaling of Llama 3, are factors of LongRoPE for all lengths.

    Args:
        size: D.
        positions: number of positions.
        tensors: those of the file, perhaps with factors of frequencies [D/2].
    """
    turned, theta = (metadata.take(f"rope.{key}", None) for key in ("dimension_count", "freq_base"))
    rope: Config = {"rope_type": "default", "rope_theta": float(theta or 10000)}
    if turned not in (None, size):
        rope["partial_rotary_factor"] = turned / size
    kind = metadata.take("rope.scaling.type", "linear")
    factor = metadata.take("rope.scaling.factor", metadata.take("rope.scale_linear", 1.0))
    original = metadata.take("rope.scaling.original_context_length", positions)
    tables = (SHORT, LONG) if SHORT in tensors else (FACTORS, FACTORS)
    if tables[0] in tensors:
        short, long = (_factors(tensors[name], (turned or size) // 2) for name in tables)
        rope |= {"rope_type": "longrope", "short_factor": short, "long_factor": long}
        if SHORT in tensors:
            magnitude = metadata.take("rope.scaling.attn_factor", None)
            return rope | {ORIGINAL: original} | _given(attention_factor=magnitude)
        if factor not in (0, 1) and kind != "none":
            raise ValueError(f"rope.scaling.factor {factor} beside {FACTORS}")
        return rope | {ORIGINAL: positions, "attention_factor": 1.0}
    if kind == "yarn":
        betas = {key: metadata.take(f"rope.scaling.yarn_{key}", None) for key in BETAS}
        return rope | {"rope_type": kind, "factor": factor, ORIGINAL: original} | _given(**betas)
    if kind not in ("none", "linear"):
        raise ValueError(f"rope.scaling.type {kind!r:.80} without its factors")
    scaled = kind == "linear" and factor not in (0, 1)
    return rope | ({"rope_type": kind, "factor": factor} if scaled else {})


def _given(**keys: Any) -> Config:
    return {key: value for key, value in keys.items() if value is not None}


def _factors(tensor: GGUFTensor, pairs: int) -> list[float]:
    factors = tensor.numbers()
    if factors.shape != (pairs,) or not (np.isfinite(factors) & (factors > 0)).all():
        raise ValueError(f"factors of the rotation, not {pairs} numbers above 0")
    return [float(str(factor)) for factor in factors]


def _gemma(metadata: Metadata, config: Config, tensors: Tensors) -> Config:
    """Keys of Gemma 2 and 3. llama.cpp knows from the number of layers that the 27B models divide
    scores by the root of width / heads.
    """
    layers = {"gemma2": 46, "gemma3_text": 62}[config["model_type"]]
    by_head = config["hidden_size"] // config["num_attention_heads"]
    widest = config["num_hidden_layers"] == layers
    return {"query_pre_attn_scalar": by_head if widest else config["head_dim"]}


def _gemma3(metadata: Metadata, config: Config, tensors: Tensors) -> Config:
    pattern = metadata.take("attention.sliding_window_pattern", 6)
    metadata.take("rope.dimension_count_swa", None)
    layers = range(1, min(config["num_hidden_layers"], len(tensors)) + 1)
    windows = pattern if isinstance(pattern, list) else [layer % pattern for layer in layers]
    types = ["sliding_attention" if window else "full_attention" for window in windows]
    theta = metadata.take("rope.freq_base_swa", 10000.0)
    local = {"rope_type": "default", "rope_theta": theta}
    turned = {"full_attention": config["rope_parameters"], "sliding_attention": local}
    scaled = _gemma(metadata, config, tensors)
    return {**scaled, "layer_types": types, "rope_parameters": turned}


def _stablelm(metadata: Metadata, config: Config, tensors: Tensors) -> Config:
    metadata.take("use_parallel_residual", None)  # the tensors tell
    bias = "blk.0.attn_q.bias" in tensors
    return {"use_parallel_residual": "blk.0.ffn_norm.weight" not in tensors, "use_qkv_bias": bias}


def undone(name: str, rows: np.ndarray, undo: Mapping[str, Change], config: Config) -> np.ndarray:
    """Return a tensor of the file, or indices [N,1] of its rows, as before the conversion."""
    for part, change in undo.items():
        if part in name:
            return np.ascontiguousarray(change(rows, config))
    return rows


def _heads_apart(key: str) -> Change:
    """Return what undoes the turn of pairs (k, k + D/2) of a head into (2k, 2k + 1)."""

    def undo(rows: np.ndarray, config: Config) -> np.ndarray:
        heads = rows.reshape(int(config[key]), -1, 2, *rows.shape[1:])
        return heads.swapaxes(1, 2).reshape(rows.shape)

    return undo


TURNED: dict[str, Change] = {
    ".attn_q.": _heads_apart("num_attention_heads"),
    ".attn_k.": _heads_apart("num_key_value_heads"),
}
ONE_MORE: dict[str, Change] = {"norm.weight": lambda weight, config: weight - np.float32(1)}
# transformers' name of each architecture, and what undoes its conversion, by a part of the tensor's
# name. A change of rows is also applied to their indices [N,1].
ARCHITECTURES: dict[str, tuple[str, Mapping[str, Change]]] = {
    "llama": ("llama", TURNED),  # also Mistral, and Mixtral with experts
    "smollm3": ("smollm3", TURNED),
    "qwen2": ("qwen2", {}),
    "qwen3": ("qwen3", {}),
    "qwen3moe": ("qwen3_moe", {}),
    "gemma": ("gemma", ONE_MORE),
    "gemma2": ("gemma2", ONE_MORE),
    "gemma3": ("gemma3_text", ONE_MORE),
    "phi2": ("phi", {}),
    "phi3": ("phi3", {}),
    "stablelm": ("stablelm", {}),
    "olmo2": ("olmo2", {}),
    "command-r": ("cohere", {}),
    "cohere2": ("cohere2", {}),
}
# What follows from other keys and tensors.
MORE: dict[str, Callable[[Metadata, Config, Tensors], Config]] = {
    "llama": lambda _, config, __: {"model_type": "mixtral"} if "num_experts" in config else {},
    "qwen3moe": lambda *_: {"norm_topk_prob": True},
    "gemma2": _gemma,
    "gemma3": _gemma3,
    "phi3": lambda _, config, __: _given(**{ORIGINAL: config["rope_parameters"].get(ORIGINAL)}),
    "command-r": lambda _, __, held: {"use_qk_norm": "blk.0.attn_q_norm.weight" in held},
    "stablelm": _stablelm,
}
