"""Small GGUF files, written from transformers' models with the changes that llama.cpp's
conversion makes.
"""

from pathlib import Path
from typing import Any, Callable, Dict, Iterator, Mapping, Optional, Tuple

import gguf
import numpy as np
import torch
import transformers
from gguf import GGMLQuantizationType as Types

SIZES = {
    "vocab_size": 64, "hidden_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2,
    "num_hidden_layers": 2, "intermediate_size": 96, "max_position_embeddings": 256,
    "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
GPT = {
    "vocab_size": 64,
    "n_embd": 64,
    "n_head": 4,
    "n_layer": 2,
    "n_positions": 256,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
YARN = {
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": 4.0,
    "original_max_position_embeddings": 64,
}
LINEAR = {"rope_type": "linear", "rope_theta": 20000.0, "factor": 4.0}
LLAMA3 = {
    "rope_type": "llama3", "rope_theta": 50.0, "factor": 8.0, "low_freq_factor": 1.0,
    "high_freq_factor": 4.0, "original_max_position_embeddings": 64,
}  # fmt: skip
PUBLISHED = {
    **LLAMA3,
    "rope_theta": 500000.0,
    "factor": 32.0,
    "original_max_position_embeddings": 8192,
}
LONGROPE = {
    "rope_type": "longrope",
    "rope_theta": 10000.0,
    "short_factor": [1.0, 1.1, 1.2, 1.3, 1.4, 1.5, 1.6, 1.7],
    "long_factor": [float(n) for n in range(2, 10)],
}
GEMMA = {"head_dim": 32, "query_pre_attn_scalar": 32, "sliding_window": 8}
BY_TYPE = {
    "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0},
    "full_attention": {**LINEAR, "rope_theta": 1000000.0},
}
# Settings of each model; the first word of a name is the architecture.
MODELS: Dict[str, Dict[str, Any]] = {
    "llama": {"rope_parameters": LLAMA3, "tie_word_embeddings": True},
    "llama with biases": {
        "attention_bias": True,
        "mlp_bias": True,
        "head_dim": 24,
        "num_key_value_heads": 4,
    },
    "llama 3.2": {"rope_parameters": PUBLISHED},
    "llama wide": {"hidden_size": 256, "intermediate_size": 256, "num_hidden_layers": 1},
    "llama with experts": {"num_local_experts": 4, "num_experts_per_tok": 2},
    "smollm3": {"num_hidden_layers": 5, "attention_bias": False},
    "qwen2": {"rope_parameters": YARN},
    "qwen3": {"head_dim": 32, "rope_parameters": LINEAR, "tie_word_embeddings": True},
    "qwen3moe": {
        "head_dim": 32,
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 32,
        "norm_topk_prob": True,
    },
    "gemma": {"head_dim": 32, "hidden_act": "gelu_pytorch_tanh"},
    "gemma2": GEMMA,
    "gemma3": {**GEMMA, "rope_parameters": BY_TYPE, "num_hidden_layers": 7},
    "phi2": {"num_key_value_heads": 4},
    "phi2 wide": {"hidden_size": 256, "intermediate_size": 256, "num_hidden_layers": 1},
    "phi3": {
        "rope_parameters": LONGROPE,
        "original_max_position_embeddings": 64,
        "sliding_window": None,
    },
    "phi3 plain": {"tie_word_embeddings": True, "sliding_window": 100},
    "gpt2": GPT,
    "gptneox": {"num_attention_heads": 2, "num_key_value_heads": None},
    "bloom": {"vocab_size": 64, "hidden_size": 64, "n_head": 4, "n_layer": 2, "seq_length": 256},
    "falcon": {"multi_query": True, "num_key_value_heads": None, "intermediate_size": None},
    "falcon new": {
        "new_decoder_architecture": True,
        "num_kv_heads": 2,
        "ffn_hidden_size": 96,
        "num_key_value_heads": None,
        "intermediate_size": None,
    },
    "mpt": {"vocab_size": 64, "d_model": 64, "n_heads": 4, "n_layers": 2, "max_seq_len": 256},
    "stablelm": {"use_qkv_bias": True, "qk_layernorm": True},
    "olmo2": {"rope_parameters": LINEAR},
    "command-r": {"logit_scale": 0.25, "use_qk_norm": True},
    "cohere2": {"num_hidden_layers": 5, "sliding_window": 8, "logit_scale": 0.5},
}
CONFIGS = {
    "llama": "LlamaConfig", "llama with experts": "MixtralConfig", "smollm3": "SmolLM3Config",
    "qwen2": "Qwen2Config", "qwen3": "Qwen3Config", "qwen3moe": "Qwen3MoeConfig",
    "gemma": "GemmaConfig", "gemma2": "Gemma2Config", "gemma3": "Gemma3TextConfig",
    "phi2": "PhiConfig", "phi3": "Phi3Config", "gpt2": "GPT2Config", "gptneox": "GPTNeoXConfig",
    "bloom": "BloomConfig", "falcon": "FalconConfig", "mpt": "MptConfig",
    "stablelm": "StableLmConfig", "olmo2": "Olmo2Config", "command-r": "CohereConfig",
    "cohere2": "Cohere2Config",
}  # fmt: skip
Stored = Dict[str, np.ndarray]
NONE: Dict[str, Types] = {}
SCALES = {
    Types.Q4_K: (0, 2),
    Types.Q5_K: (0, 2),
    Types.Q6_K: (208,),
    Types.Q2_K: (80, 82),
    Types.Q3_K: (108,),
}  # places of float16 numbers in a block
OWN_SIZES = ("gpt2", "bloom", "mpt")


def made(name: str) -> Any:
    """Return transformers' model with random weights, norms included."""
    architecture = name.split()[0]
    sizes = (
        {}
        if architecture in OWN_SIZES
        else {
            key: value for key, value in SIZES.items() if MODELS[name].get(key, value) is not None
        }
    )
    settings = {
        key: value
        for key, value in MODELS[name].items()
        if value is not None or key == "sliding_window"
    }
    config = getattr(transformers, CONFIGS.get(name, CONFIGS[architecture]))(
        **{**sizes, **settings}
    )
    torch.manual_seed(7)
    model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager")
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn_like(parameter) * 0.1)
    return model.eval()


def write(
    name: str,
    model: Any,
    path: Path,
    kind: Types = Types.F32,
    metadata: Optional[Mapping[str, Any]] = None,
    kinds: Mapping[str, Types] = NONE,
    only: Callable[[str], bool] = lambda name: True,
) -> Stored:
    """Write a model as a GGUF file. Return what each tensor of the file is when it is dequantized,
    by its name in the file.

    Args:
        kind: type of matrices whose rows are whole numbers of its blocks; others stay in float32.
            Types that the library gguf cannot write get random blocks.
        metadata: further keys with their values, such as a vocabulary.
        kinds: types of single tensors, by the end of their names.
        only: which tensors to write.
    """
    architecture, config, stored = name.split()[0], model.config, {}
    writer = gguf.GGUFWriter(path, architecture)
    for key, value in {**_keys(architecture, config), **dict(metadata or {})}.items():
        _add(
            writer,
            key if key.startswith(("tokenizer.", "split.")) else f"{architecture}.{key}",
            value,
        )
    for tensor, factors in _factors(config) if only("rope") else ():
        writer.add_tensor(tensor, np.array(factors, np.float32))
    for tensor, numbers in (
        (tensor, numbers) for tensor, numbers in _tensors(architecture, model) if only(tensor)
    ):
        wanted = next((other for end, other in kinds.items() if tensor.endswith(end)), kind)
        fits = numbers.ndim > 1 and numbers.shape[-1] % gguf.GGML_QUANT_SIZES[wanted][0] == 0
        held = quantized(numbers, wanted if fits else Types.F32)
        stored[tensor] = gguf.dequantize(held, wanted if fits else Types.F32)
        writer.add_tensor(tensor, held, raw_dtype=wanted if fits else None)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return stored


def quantized(numbers: np.ndarray, kind: Types) -> np.ndarray:
    """Return numbers in a type of GGUF, or random blocks of it if the library gguf cannot write
    it.
    """
    if kind not in SCALES:
        return gguf.quantize(numbers, kind)
    weights, size = gguf.GGML_QUANT_SIZES[kind]
    blocks = np.random.default_rng(3).integers(0, 256, (numbers.size // weights, size), np.uint8)
    for at in SCALES[kind]:
        blocks[:, at : at + 2] = (
            np.random.default_rng(at)
            .uniform(0.0001, 0.001, len(blocks))
            .astype(np.float16)
            .view(np.uint8)
            .reshape(-1, 2)
        )
    return blocks.reshape(len(numbers), -1)


def _add(writer: gguf.GGUFWriter, key: str, value: Any) -> None:
    kinds: Dict[type, Callable[[str, Any], None]] = {
        bool: writer.add_bool, int: writer.add_uint32, float: writer.add_float32,
        str: writer.add_string, list: writer.add_array,
    }  # fmt: skip
    kinds[type(value)](key, value)


def _keys(architecture: str, config: Any) -> Dict[str, Any]:
    """Return the metadata of an architecture, without its name."""
    width, heads = config.hidden_size, config.num_attention_heads
    falcon = architecture == "falcon"
    of_one_head = falcon and not config.new_decoder_architecture
    name = "num_kv_heads" if falcon and not of_one_head else "num_key_value_heads"
    kv_heads = getattr(config, name, heads if name == "num_key_value_heads" else None)
    size = getattr(config, "head_dim", None) or width // heads
    hidden = (
        getattr(config, "ffn_hidden_size", None)
        or getattr(config, "intermediate_size", None)
        or getattr(config, "n_inner", None)
        or 4 * width
    )
    result: Dict[str, Any] = {
        "context_length": 256, "embedding_length": width, "block_count": config.num_hidden_layers,
        "feed_forward_length": hidden, "attention.head_count": heads,
        "attention.head_count_kv": 1 if of_one_head else kv_heads or heads,
        "attention.key_length": size, "attention.value_length": size,
    }  # fmt: skip
    for key, names in {
        "attention.layer_norm_rms_epsilon": ("rms_norm_eps",),
        "attention.layer_norm_epsilon": ("layer_norm_epsilon", "layer_norm_eps"),
    }.items():
        epsilon = [getattr(config, one) for one in names if hasattr(config, one)]
        result |= {key: epsilon[0]} if epsilon else {}
    for key, other in OTHERS.items():
        if getattr(config, other, None) is not None and architecture in READ_BY.get(
            other, (architecture,)
        ):
            result[key] = getattr(config, other)
    return {**result, **_rotation(architecture, config, size)}


OTHERS = {
    "attn_logit_softcapping": "attn_logit_softcapping",
    "final_logit_softcapping": "final_logit_softcapping",
    "attention.sliding_window": "sliding_window", "logit_scale": "logit_scale",
    "expert_count": "num_local_experts", "expert_used_count": "num_experts_per_tok",
    "expert_feed_forward_length": "moe_intermediate_size",
    "use_parallel_residual": "use_parallel_residual",
}  # fmt: skip
READ_BY = {
    "sliding_window": ("gemma2", "gemma3", "phi3", "cohere2"),
    "use_parallel_residual": ("gptneox", "stablelm"),
}


def _rotation(architecture: str, config: Any, size: int) -> Dict[str, Any]:
    if architecture in ("gpt2", "bloom", "mpt"):
        return {}
    given = config.rope_parameters
    given = given.get("full_attention", given)
    result: Dict[str, Any] = {
        "rope.freq_base": float(given["rope_theta"]),
        "rope.dimension_count": int(size * given.get("partial_rotary_factor", 1.0)),
    }
    if given["rope_type"] in ("linear", "yarn"):
        result |= {
            "rope.scaling.type": given["rope_type"],
            "rope.scaling.factor": float(given["factor"]),
        }
    if given["rope_type"] in ("yarn", "longrope"):
        result["rope.scaling.original_context_length"] = (
            given.get("original_max_position_embeddings") or config.original_max_position_embeddings
        )
    return result


def _factors(config: Any) -> Iterator[Tuple[str, Any]]:
    """Yield the tensors with factors of frequencies."""
    given = getattr(config, "rope_parameters", None) or {}
    if given.get("rope_type") == "longrope":
        yield "rope_factors_short.weight", given["short_factor"]
        yield "rope_factors_long.weight", given["long_factor"]
    if given.get("rope_type") == "llama3":
        size = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        yield (
            "rope_freqs.weight",
            [_llama3(given, given["rope_theta"] ** (-2 * k / size)) for k in range(size // 2)],
        )


def _llama3(given: Mapping[str, Any], frequency: float) -> float:
    length = 2 * np.pi / frequency
    low, high, original = (
        given["low_freq_factor"],
        given["high_freq_factor"],
        given["original_max_position_embeddings"],
    )
    if length < original / high or length > original / low:
        return float(1.0 if length < original / high else given["factor"])
    smooth = (original / length - low) / (high - low)
    return float(1 / ((1 - smooth) / given["factor"] + smooth))


def _tensors(architecture: str, model: Any) -> Iterator[Tuple[str, np.ndarray]]:
    number = next(number for number, name in gguf.MODEL_ARCH_NAMES.items() if name == architecture)
    table = gguf.get_tensor_name_map(number, model.config.num_hidden_layers)
    tied = model.config.tie_word_embeddings
    for name, tensor in model.state_dict().items():
        if not (tied and name == "lm_head.weight") and not name.endswith(
            (".attn.bias", ".attn.masked_bias")
        ):
            yield from _converted(architecture, model.config, table, name, tensor.numpy())


def _converted(
    architecture: str, config: Any, table: Any, name: str, numbers: np.ndarray
) -> Iterator[Tuple[str, np.ndarray]]:
    if name.endswith("experts.gate_up_proj"):  # [experts, 2 hidden, width]
        for part, half in zip(("gate", "up"), np.split(numbers, 2, axis=1), strict=True):
            yield f"blk.{name.split('.')[2]}.ffn_{part}_exps.weight", np.ascontiguousarray(half)
        return
    if name.endswith("experts.down_proj"):
        yield f"blk.{name.split('.')[2]}.ffn_down_exps.weight", numbers
        return
    if ".norms." in name:  # one norm for each head
        before, index = name.split(".norms.")
        if index == "0.weight":
            STACKS[before] = []
        STACKS[before].append(numbers)
        heads = config.num_attention_heads if "q_layernorm" in name else config.num_key_value_heads
        if len(STACKS[before]) < heads:
            return
        name, numbers = f"{before}.weight", np.stack(STACKS.pop(before))
    module, _, kind = name.rpartition(".")
    found = table.get_name(module) or table.get_name(module.removeprefix("transformer."))
    yield (
        f"{found}.{kind}",
        np.ascontiguousarray(
            _changed(architecture, config, found.rpartition(".")[2], kind, numbers)
        ),
    )


STACKS: Dict[str, Any] = {}


def _changed(
    architecture: str, config: Any, tensor: str, kind: str, numbers: np.ndarray
) -> np.ndarray:
    """Change a tensor as llama.cpp's conversion does."""
    if architecture in ("llama", "smollm3") and tensor in (
        "attn_q",
        "attn_k",
    ):  # pairs (k, k + D/2) become pairs (2k, 2k + 1)
        heads = config.num_attention_heads if tensor == "attn_q" else config.num_key_value_heads
        return (
            numbers.reshape(heads, 2, -1, *numbers.shape[1:]).swapaxes(1, 2).reshape(numbers.shape)
        )
    if architecture.startswith("gemma") and tensor.endswith("norm"):
        return numbers + np.float32(1)
    if (
        architecture == "gpt2"
        and tensor in ("attn_qkv", "attn_output", "ffn_up", "ffn_down")
        and kind == "weight"
    ):
        return numbers.T
    if (
        architecture in ("gptneox", "bloom", "falcon") and tensor == "attn_qkv"
    ):  # for each kv head its queries, key and value
        heads = config.num_attention_heads
        groups = (
            heads
            if architecture != "falcon"
            else config.num_kv_heads
            if config.new_decoder_architecture
            else 1
        )
        parts = numbers.reshape(
            groups, heads // groups + 2, config.hidden_size // heads, *numbers.shape[1:]
        )
        return np.concatenate(
            [
                part.reshape(-1, *numbers.shape[1:])
                for part in (parts[:, :-2], parts[:, -2], parts[:, -1])
            ]
        )
    return numbers
