"""Small GGUF files, written from transformers' models with the changes that llama.cpp's conversion
makes.
"""

from pathlib import Path
from typing import Any, Callable, Iterator, Mapping

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
ORIGINAL = {"original_max_position_embeddings": 64}
YARN = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, **ORIGINAL}
LINEAR = {"rope_type": "linear", "rope_theta": 20000.0, "factor": 4.0}
LLAMA3 = {
    "rope_type": "llama3", "rope_theta": 50.0, "factor": 8.0, "low_freq_factor": 1.0,
    "high_freq_factor": 4.0, **ORIGINAL,
}  # fmt: skip
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
BIASES = {"attention_bias": True, "mlp_bias": True, "head_dim": 24, "num_key_value_heads": 4}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
WIDE = {"hidden_size": 256, "intermediate_size": 256, "num_hidden_layers": 1}
# Settings of each model, and transformers' class of its configuration; the first word of a name is
# the architecture.
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("Llama", {"rope_parameters": LLAMA3, "tie_word_embeddings": True}),
    "llama with biases": ("Llama", BIASES),
    "llama wide": ("Llama", WIDE),
    "llama with experts": ("Mixtral", {"num_local_experts": 4, "num_experts_per_tok": 2}),
    "smollm3": ("SmolLM3", {"num_hidden_layers": 5, "attention_bias": False}),
    "qwen2": ("Qwen2", {"rope_parameters": YARN}),
    "qwen3": ("Qwen3", {"head_dim": 32, "rope_parameters": LINEAR, "tie_word_embeddings": True}),
    "qwen3moe": ("Qwen3Moe", {"head_dim": 32, **EXPERTS, "norm_topk_prob": True}),
    "gemma": ("Gemma", {"head_dim": 32, "hidden_act": "gelu_pytorch_tanh"}),
    "gemma2": ("Gemma2", GEMMA),
    "gemma3": ("Gemma3Text", {**GEMMA, "rope_parameters": BY_TYPE, "num_hidden_layers": 7}),
    "phi2": ("Phi", {"num_key_value_heads": 4}),
    "phi2 wide": ("Phi", WIDE),
    "phi3": ("Phi3", {"rope_parameters": LONGROPE, **ORIGINAL, "sliding_window": None}),
    "phi3 plain": ("Phi3", {"tie_word_embeddings": True, "sliding_window": 100}),
    "stablelm": ("StableLm", {"use_qkv_bias": True}),
    "olmo2": ("Olmo2", {"rope_parameters": LINEAR}),
    "command-r": ("Cohere", {"logit_scale": 0.25, "use_qk_norm": True}),
    "cohere2": ("Cohere2", {"num_hidden_layers": 5, "sliding_window": 8, "logit_scale": 0.5}),
}
# Keys of the metadata, by the attribute of a configuration that they state.
KEYS = {
    "hidden_size": "embedding_length", "num_hidden_layers": "block_count",
    "intermediate_size": "feed_forward_length", "num_attention_heads": "attention.head_count",
    "num_key_value_heads": "attention.head_count_kv", "max_position_embeddings": "context_length",
    "rms_norm_eps": "attention.layer_norm_rms_epsilon",
    "layer_norm_eps": "attention.layer_norm_epsilon",
    "attn_logit_softcapping": "attn_logit_softcapping",
    "final_logit_softcapping": "final_logit_softcapping",
    "sliding_window": "attention.sliding_window", "logit_scale": "logit_scale",
    "num_local_experts": "expert_count", "num_experts_per_tok": "expert_used_count",
    "moe_intermediate_size": "expert_feed_forward_length",
    "use_parallel_residual": "use_parallel_residual",
}  # fmt: skip
# Places of float16 numbers in a block of types that the library gguf does not write.
SCALES = {
    Types.Q4_K: (0, 2),
    Types.Q5_K: (0, 2),
    Types.Q6_K: (208,),
    Types.Q2_K: (80, 82),
    Types.Q3_K: (108,),
}


def made(name: str) -> Any:
    """Return transformers' model with random weights, norms included."""
    kind, settings = MODELS[name]
    config = getattr(transformers, f"{kind}Config")(**{**SIZES, **settings})
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
    metadata: Mapping[str, Any] | None = None,
    kinds: Mapping[str, Types] = {},
    only: Callable[[str], bool] = lambda name: True,
) -> dict[str, np.ndarray]:
    """Write a model as a GGUF file. Return what each tensor of the file is when it is dequantized,
    by its name in the file.

    Args:
        kind: type of matrices whose rows are whole numbers of its blocks; others stay in float32.
            Types that the library gguf cannot write get random blocks.
        metadata: further keys with their values, such as a vocabulary.
        kinds: types of single tensors, by the end of their names.
        only: which tensors to write.
    """
    architecture, stored = name.split()[0], {}
    writer = gguf.GGUFWriter(path, architecture)
    values = {f"{architecture}.{key}": value for key, value in _keys(model.config).items()}
    for key, value in {**values, **dict(metadata or {})}.items():
        add = {bool: writer.add_bool, int: writer.add_uint32, float: writer.add_float32,
            str: writer.add_string, list: writer.add_array}  # fmt: skip
        add[type(value)](key, value)
    for tensor, numbers in _tensors(architecture, model):
        if not only(tensor):
            continue
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
        scales = np.random.default_rng(at).uniform(0.0001, 0.001, len(blocks)).astype(np.float16)
        blocks[:, at : at + 2] = scales.view(np.uint8).reshape(-1, 2)
    return blocks.reshape(len(numbers), -1)


def _size(config: Any) -> int:
    return getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads


def _keys(config: Any) -> dict[str, Any]:
    """Return the metadata of an architecture, without its name."""
    size, given = _size(config), config.rope_parameters
    given, turned = given.get("full_attention", given), given.get("partial_rotary_factor", 1.0)
    result: dict[str, Any] = {"attention.value_length": size}
    result |= {"attention.key_length": size} if getattr(config, "head_dim", None) else {}
    result |= {"rope.freq_base": float(given["rope_theta"])}
    result |= {"rope.dimension_count": int(size * turned)}
    for own, key in KEYS.items():
        if (value := getattr(config, own, None)) is not None:
            result[key] = value
    if given["rope_type"] in ("linear", "yarn"):
        result["rope.scaling.type"] = given["rope_type"]
        result["rope.scaling.factor"] = float(given["factor"])
    if given["rope_type"] in ("yarn", "longrope"):
        result["rope.scaling.original_context_length"] = 64
    return result


def _tensors(architecture: str, model: Any) -> Iterator[tuple[str, np.ndarray]]:
    config, rope = model.config, model.config.rope_parameters
    for name, key in (("short", "short_factor"), ("long", "long_factor")):
        if key in rope:
            yield f"rope_factors_{name}.weight", np.array(rope[key], np.float32)
    if rope.get("rope_type") == "llama3":
        plain = rope["rope_theta"] ** (-np.arange(0, _size(config), 2) / _size(config))
        scaled = model.base_model.rotary_emb.inv_freq.numpy()
        yield "rope_freqs.weight", (plain / scaled).astype(np.float32)
    number = next(number for number, name in gguf.MODEL_ARCH_NAMES.items() if name == architecture)
    table = gguf.get_tensor_name_map(number, config.num_hidden_layers)
    for name, tensor in model.state_dict().items():
        numbers, module = tensor.numpy(), name.rpartition(".")[0]
        if config.tie_word_embeddings and module == "lm_head":
            continue
        if name.endswith("experts.gate_up_proj"):  # [experts, 2 hidden, width]
            for part, half in zip(("gate", "up"), np.split(numbers, 2, axis=1), strict=True):
                yield f"blk.{name.split('.')[2]}.ffn_{part}_exps.weight", np.ascontiguousarray(half)
        elif name.endswith("experts.down_proj"):
            yield f"blk.{name.split('.')[2]}.ffn_down_exps.weight", numbers
        else:
            theirs = table.get_name(module)
            changed = _changed(architecture, config, theirs.rpartition(".")[2], numbers)
            yield f"{theirs}.{name.rpartition('.')[2]}", np.ascontiguousarray(changed)


def _changed(architecture: str, config: Any, tensor: str, numbers: np.ndarray) -> np.ndarray:
    """Change a tensor as llama.cpp's conversion does."""
    if architecture in ("llama", "smollm3") and tensor in ("attn_q", "attn_k"):
        # Pairs (k, k + D/2) become pairs (2k, 2k + 1).
        heads = config.num_attention_heads if tensor == "attn_q" else config.num_key_value_heads
        apart = numbers.reshape(heads, 2, -1, *numbers.shape[1:])
        return apart.swapaxes(1, 2).reshape(numbers.shape)
    if architecture.startswith("gemma") and tensor.endswith("norm"):
        return numbers + np.float32(1)
    return numbers
