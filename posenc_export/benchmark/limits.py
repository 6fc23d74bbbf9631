"""What a decode step must at least read from memory, from the model's config alone."""

from typing import Any, Mapping

ITEM_BYTES = {"float32": 4, "float16": 2}
MATRICES = {"swiglu": 3, "gelu": 2}  # gate, up, down; up, down


def attention_weights(config: Mapping[str, Any]) -> int:
    """Number of weights of the projections of one block (models.attention)."""
    query, both = config["heads"] * config["head_size"], 2 * config["kv_heads"] * config["head_size"]
    biases = (query + both) * config["qkv_bias"] + config["width"] * config["output_bias"]
    return int(config["width"] * (query + both) + query * config["width"] + biases)


def step_weights(config: Mapping[str, Any]) -> int:
    """Number of weights a decode step reads: every matrix once, of the embedding one row; tables of the encoding are left out."""
    if config["kind"] == "block":
        return attention_weights(config)
    width, hidden = config["attention"]["width"], config["hidden"]
    norm = width * (1 if config["norm"] == "rms" else 2)
    biases = ((MATRICES[config["mlp"]] - 1) * hidden + width) * config["mlp_bias"]
    layer = attention_weights(config["attention"]) + MATRICES[config["mlp"]] * width * hidden + biases + 2 * norm
    return int(config["layers"] * layer + norm + width + config["vocabulary"] * width)


def cache_values(config: Mapping[str, Any], context: int) -> int:
    """Number of values in the valid part of all key and value caches of one row."""
    attention, layers = (config, 1) if config["kind"] == "block" else (config["attention"], config["layers"])
    return int(2 * layers * attention["kv_heads"] * attention["head_size"] * context)


def step_bytes(config: Mapping[str, Any], dtype: str, context: int) -> int:
    """Bytes a decode step at `context` must read: weights and valid cache.

    Raises:
        ValueError: a dtype whose size is not known.
    """
    if dtype not in ITEM_BYTES:
        raise ValueError(f"benchmark: dtype is one of {', '.join(ITEM_BYTES)}, got {dtype!r}; export again")
    return ITEM_BYTES[dtype] * (step_weights(config) + cache_values(config, context))


def share_of_limit(moved: int, seconds: float, bandwidth: float) -> float:
    """moved bytes in seconds, as a share of bandwidth in bytes per second; 1 is the limit of a read-only pass.

    Raises:
        ValueError: a time or bandwidth that is not positive.
    """
    if seconds <= 0.0 or bandwidth <= 0.0:
        raise ValueError(f"benchmark: time and bandwidth are positive, got {seconds} s and {bandwidth} B/s; measure again")
    return moved / seconds / bandwidth
