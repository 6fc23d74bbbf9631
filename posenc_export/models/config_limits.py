"""Limits on the values of config.json, checked before anything is built."""

import re
from typing import Any, Mapping, Tuple

from posenc_export.shared.refusal import refusal

# Keys with texts and names of others, which are not read, or are read with the tensors.
UNCHECKED = """compression_config id2label label2id prefix quantization_config
    task_specific_params""".split()
# Kinds of keys: a pattern of the key, the kind, and the largest integer. The first pattern that
# matches is used.
MOST: Tuple[Tuple[str, str, int], ...] = (
    (r"layers?$|layer_interval$|first_k_dense|sparse_step|layer_step|attn_every", "layers", 2**10),
    (r"expert|^n_group$|^topk_group$", "experts", 2**12),
    (r"heads?$", "heads", 2**12),
    (r"head_dim|^d_kv$|^d_head$|rotary_dim|lora_rank", "entries of a head", 2**14),
    (r"vocab", "token ids", 2**24),
    (r"position_buckets|num_buckets|max_distance|max_relative_positions", "distances", 2**20),
    (
        r"position|seq_len|n_ctx|window|chunk|clamp_len|local_attention|floor_scale",
        "positions",
        2**31 - 1,
    ),
    (r"size|hidden|inner|dim|embd?$|d_model|d_ff|ffn|rank|channels|mel", "width", 2**20),
    (r"", "other integers", 2**53),
)
# Keys whose values are names.
NAMES = re.compile(r"^(hidden_)?activation(_function)?$|^hidden_act$|^rope_type$|layer_types\[\]$")
FLOAT32 = 3.4e38  # the largest number
LONGEST = 2**14  # entries of a list; the longest are factors of rotary pairs
DEEPEST = 8  # levels of nested values
TABLE = 2**28  # entries of a table of positions: 2 GiB in float64
CORRECT = "correct config.json"


def check_values(where: str, values: Mapping[str, Any], depth: int = 0) -> None:
    """Check numbers, names, lists and depth of config.json. ValueError: one beyond its limit."""
    for key, value in values.items():
        if not str(key).isprintable():
            rule, got = "keys of printable characters in config.json", f"{str(key)!r:.80}"
            raise refusal(where, rule, got, CORRECT)
        if key not in UNCHECKED:
            _check(where, str(key), value, depth)


def _check(where: str, key: str, value: Any, depth: int) -> None:
    def require(holds: bool, rule: str, got: object) -> None:
        if not holds:
            raise refusal(where, rule, got, CORRECT)

    rule = f"at most {DEEPEST} levels of nested values in config.json"
    require(depth <= DEEPEST, rule, f"more in {key}")
    absent = value is None and not key.endswith("[]")
    named = absent or isinstance(value, str) or not NAMES.search(key)
    require(named, f"{key} to be a name", f"{value!r:.80}")
    if isinstance(value, Mapping):
        return check_values(where, value, depth + 1)
    if isinstance(value, list):
        require(len(value) <= LONGEST, f"{key} with at most {LONGEST} entries", len(value))
        for item in value:
            _check(where, key + "[]", item, depth + 1)
    elif isinstance(value, str):
        require(value.isprintable(), f"{key} to be printable characters", f"{value!r:.80}")
    elif isinstance(value, float):
        require(abs(value) <= FLOAT32, f"{key} to be a number of float32", value)
    elif isinstance(value, int):
        kind, most = next((kind, most) for pattern, kind, most in MOST if re.search(pattern, key))
        require(abs(value) <= most, f"{key} to be at most {most} ({kind})", value)
