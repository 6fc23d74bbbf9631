"""Limits on the values of config.json, checked before anything is built."""

import re
from typing import Any, Mapping, Sequence, Tuple

from posenc_export.models.config import StackConfig
from posenc_export.models.families.shared.keys import IGNORED
from posenc_export.shared.refusal import refusal

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
NAMES = re.compile(
    r"^(hidden_|ff_|feat_extract_)?activation(_function)?$|^hidden_act$|feed_forward_proj|^rope_type$|"
    r"scoring_func$|topk_method$|^attn_type$|norm_type$|norm_rel_ebd$|layer_types\[\]$"
)
FLOAT32 = 3.4e38  # the largest number
LONGEST = 2**14  # entries of a list; the longest are factors of rotary pairs
DEEPEST = 8  # levels of nested values
# Largest number of entries in a table of positions: 2 GiB in float64. Encodings with such tables,
# with the width of a row.
TABLE = 2**28
ROWS = {"rope": "head_size", "mrope": "head_size", "alibi": "heads"}
CORRECT = "correct config.json"


def check_values(family: str, values: Mapping[str, Any], depth: int = 0) -> None:
    """Check numbers, names, lists and depth of config.json. ValueError: one beyond its limit."""
    for key, value in values.items():
        if not str(key).isprintable():
            rule, got = "keys of printable characters in config.json", f"{str(key)!r:.80}"
            raise refusal(family, rule, got, CORRECT)
        if key not in IGNORED:
            _check(family, str(key), value, depth)


def _check(family: str, key: str, value: Any, depth: int) -> None:
    def require(holds: bool, rule: str, got: object) -> None:
        if not holds:
            raise refusal(family, rule, got, CORRECT)

    rule = f"at most {DEEPEST} levels of nested values in config.json"
    require(depth <= DEEPEST, rule, f"more in {key}")
    absent = value is None and not key.endswith("[]")
    named = absent or isinstance(value, str) or not NAMES.search(key)
    require(named, f"{key} to be a name", f"{value!r:.80}")
    if isinstance(value, Mapping):
        return check_values(family, value, depth + 1)
    if isinstance(value, list):
        require(len(value) <= LONGEST, f"{key} with at most {LONGEST} entries", len(value))
        for item in value:
            _check(family, key + "[]", item, depth + 1)
    elif isinstance(value, str):
        require(value.isprintable(), f"{key} to be printable characters", f"{value!r:.80}")
    elif isinstance(value, float):
        require(abs(value) <= FLOAT32, f"{key} to be a number of float32", value)
    elif isinstance(value, int):
        kind, most = next((kind, most) for pattern, kind, most in MOST if re.search(pattern, key))
        require(abs(value) <= most, f"{key} to be at most {most} ({kind})", value)


def check_sizes(family: str, config: StackConfig, sizes: Sequence[int]) -> None:
    """Check that files with tensors of these numbers of entries can hold a model: its token table,
    and a tensor and an MLP for each layer; and that no table of positions exceeds TABLE.
    """
    layers, numbers = len(config.order), config.tokens.vocabulary * config.width
    for kind in config.kinds:
        numbers += config.width * int(kind.mlp["hidden"])
    if layers > len(sizes) or numbers > sum(sizes):
        rule = f"files with at least {layers} tensors and {numbers} numbers for the sizes in config"
        remedy = "download all weights again, or use the config.json that belongs to them"
        raise refusal(family, f"{rule}.json", f"{len(sizes)} and {sum(sizes)}", remedy)
    widths = [config.width for spec in config.tokens.encodings if spec["name"] == "sinusoidal"]
    for kind in config.layers.values():
        names = [spec["name"] for spec in kind.attention.encodings]
        begins = [begin for name in names for begin in ROWS if name.startswith(begin)]
        widths += [getattr(kind.attention, ROWS[begin]) for begin in begins]
    if widths and config.max_positions * max(widths) > TABLE:
        rule = f"a table of positions with at most {TABLE} numbers"
        got = f"{config.max_positions} positions x {max(widths)}"
        raise refusal(family, rule, got, "give a smaller max_positions")
