"""Limits on the values of config.json, checked before anything is built."""

import re
from typing import Any, Mapping

from posenc_export.shared.refusal import refusal

# Keys with texts and names of others, which are not read, or are read with the tensors.
UNCHECKED = {
    *("compression_config", "id2label", "label2id", "prefix", "quantization_config"),
    "task_specific_params",
}
# Kinds of keys: a pattern of the key, the kind, and the largest integer. The first pattern that
# matches is used.
MOST: tuple[tuple[str, str, int], ...] = (
    (r"layers?$|layer_interval$|first_k_dense|sparse_step|layer_step|attn_every", "layers", 2**10),
    (r"expert|^n_group$|^topk_group$", "experts", 2**12),
    (r"heads?$", "heads", 2**12),
    (r"head_dim|^d_kv$|^d_head$|rotary_dim|lora_rank", "entries of a head", 2**14),
    (r"vocab", "token ids", 2**24),
    (r"position_buckets|num_buckets|max_distance|max_relative_positions", "distances", 2**20),
    (r"position|seq_len|n_ctx|window|chunk|clamp_len|local_att|floor", "positions", 2**31 - 1),
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


def check_values(where: str, value: Any, key: str = "config.json", depth: int = -1) -> None:
    """Check numbers, names, lists and depth of config.json. ValueError: one beyond its limit."""

    def require(holds: bool, rule: str, got: object) -> None:
        if not holds:
            raise refusal(where, rule, got, CORRECT)

    require(depth <= DEEPEST, f"at most {DEEPEST} levels of nested values in config.json", key)
    absent = value is None and not key.endswith("[]")
    named = absent or isinstance(value, str) or not NAMES.search(key)
    require(named, f"{key} to be a name", f"{value!r:.80}")
    if isinstance(value, Mapping):
        for name, inner in value.items():
            require(str(name).isprintable(), f"printable keys in {key}", f"{str(name)!r:.80}")
            if name not in UNCHECKED:
                check_values(where, inner, str(name), depth + 1)
    elif isinstance(value, list):
        require(len(value) <= LONGEST, f"{key} with at most {LONGEST} entries", len(value))
        for item in value:
            check_values(where, item, f"{key}[]", depth + 1)
    elif isinstance(value, str):
        require(value.isprintable(), f"{key} to be printable characters", f"{value!r:.80}")
    elif isinstance(value, float):
        require(abs(value) <= FLOAT32, f"{key} to be a number of float32", value)
    elif isinstance(value, int):
        kind, most = next((kind, most) for pattern, kind, most in MOST if re.search(pattern, key))
        require(abs(value) <= most, f"{key} to be at most {most} ({kind})", value)
