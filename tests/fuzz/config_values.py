"""Random changes of a config.json: values that transformers accepts, boundary values, values of
another type, deleted keys and keys of other families.
"""

import random
import re
from typing import Any, Dict, List, Mapping, Tuple

ACTIVATIONS = (
    "silu gelu gelu_new gelu_pytorch_tanh gelu_fast relu quick_gelu gelu_python tanh "
    "swish relu2 other"
).split()
LAYER_TYPES = "full_attention sliding_attention chunked_attention linear_attention other".split()
ROTATIONS = "default linear dynamic yarn llama3 proportional ntk other".split()
# Values of keys, by a pattern of their names; the first pattern that matches is used.
VALUES: List[Tuple[str, List[Any]]] = [
    (r"activation|hidden_act$", [*ACTIVATIONS, "gated-gelu", "gated-silu"]),
    (r"^(num_)?(hidden_)?layers$|^n_layers?$|max_window_layers", [0, 1, 2, 3, 4]),
    (r"head_dim|rotary_dim", [0, 2, 4, 6, 8, 10, 12, 16, 24, 32]),
    (r"kv_heads|key_value_heads", [None, 0, 1, 2, 3, 4, 8]),
    (r"heads$|n_head", [1, 2, 3, 4, 6, 8, 12, 16, 32]),
    (r"experts", [0, 1, 2, 3, 4, 8]),
    (r"vocab", [1, 2, 61, 64, 100]),
    (
        r"hidden_size|n_embd|d_model|intermediate|ffn_dim|n_inner|ffn_hidden",
        [None, 16, 32, 40, 48, 64, 96, 128],
    ),
    (r"window|attention_chunk_size", [None, 0, 1, 2, 5, 6, 8, 23, 24, 25, 512]),
    (r"_token_id", [None, -1, 0, 1, 2, 5, 60, 61]),
    (r"position|seq_length|n_ctx", [0, 1, 10, 24, 25, 64, 300, 512]),
    (r"pattern|every_n", [1, 2, 3, 6]),
    (r"theta|base_freq|emb_base", [1.0, 2.0, 20.0, 1000.0, 10000, 1e6]),
    (r"eps", [0.0, 1e-12, 1e-5, 1e-3, 0.1]),
    (r"partial_rotary|rotary_pct", [0.0, 0.1, 0.25, 0.5, 0.75, 1.0, 1.5]),
    (r"pretraining_tp", [0, 1, 2, 4]),
    (
        r"scale|softcap|multiplier|scalar|factor|limit|alpha|beta|clip|temperature",
        [None, 0, 0.0, 0.1, 0.5, 1, 1.0, 2.5, 8, 50.0],
    ),
]
OTHER_TYPES: List[Any] = [
    None, True, False, 0, 1, -1, 3, 0.5, -0.5, "other", "", [], [1], ["silu"], {},
    {"rope_type": "other"}, 1e30,
]  # fmt: skip
HUGE: List[int] = [10**9, 2**31, 2**53, 2**63, -(2**63), 10**30]
# Keys of the run, not of the model: dtype, form of outputs, labels of other tasks.
SKIPPED = re.compile(
    r"^(_name_or_path|architectures|_?attn_implementation.*|(torch_)?dtype|model_type|output_.*|"
    r"_?experts_implementation.*|id2label|label2id|num_labels|problem_type|quantization_config|"
    r"return_dict.*|torchscript|transformers_version|tokenizer_class|use_cache|.*dropout.*|"
    r".*_pdrop|.*initializer.*|is_encoder_decoder|transformers_weights|.*loss.*)$"
)
# Keys from which lists with an entry for each layer follow where they are missing.
DERIVING = re.compile(r"layers?$|pattern|every_n|interval|use_sliding_window")
# Keys of other types.
FOREIGN = ("n_ctx", "n_heads", "rotary_dim", "partial_rotary_factor", "attention_chunk_size")
DELETED, HUGE_SHARE, WRONG_SHARE, FOREIGN_SHARE = object(), 0.03, 0.12, 0.06


def changed(
    config: Mapping[str, Any], known: Mapping[str, Any], choice: random.Random
) -> Dict[str, Any]:
    """Return new values of one to three keys; DELETED for a key that is left out.

    Args:
        config: contents of config.json.
        known: all keys of the model type with their values, defaults included.
    """
    keys = sorted(key for key in {*config, *known} if not SKIPPED.match(key))
    changes: Dict[str, Any] = {}
    for _ in range(choice.choice((1, 1, 1, 2, 2, 3))):
        if choice.random() < FOREIGN_SHARE:
            changes[choice.choice(FOREIGN)] = choice.choice([1, 2, 4, 10, 48])
            continue
        key = choice.choice(keys)
        changes[key] = _value(key, {**known, **config}, choice)
        if DERIVING.search(key) and "layer_types" in config and choice.random() < 0.5:
            changes.setdefault("layer_types", DELETED)
    return changes


def _value(key: str, config: Mapping[str, Any], choice: random.Random) -> Any:
    kind = choice.random()
    if kind < HUGE_SHARE:
        return choice.choice(HUGE)
    if kind < HUGE_SHARE + WRONG_SHARE:
        return choice.choice([*OTHER_TYPES, DELETED])
    current = config.get(key)
    if key in ("rope_parameters", "rope_scaling"):
        return _rotation(current, choice)
    if key == "layer_types":
        count = config.get("num_hidden_layers", 2) + choice.choice((0, 0, 0, 0, 1, -1))
        return [choice.choice(LAYER_TYPES[: choice.choice((2, 2, 5))]) for _ in range(count)]
    if isinstance(current, bool):
        return not current
    if isinstance(current, dict):
        return {
            **current,
            **{
                name: _value(name, current, choice)
                for name in choice.sample(sorted(current), min(1, len(current)))
            },
        }
    pool = next((values for pattern, values in VALUES if re.search(pattern, key)), None)
    if pool is not None:
        return choice.choice(pool)
    return choice.choice(
        OTHER_TYPES
        if current is None or isinstance(current, (str, list))
        else [0, 1, 2, 0.5, current]
    )


def _rotation(current: Any, choice: random.Random) -> Any:
    """Return rotary settings: the current ones with one changed value, or new ones."""
    if isinstance(current, dict) and any(isinstance(value, dict) for value in current.values()):
        return {
            **current,
            **{
                name: _rotation(current[name], choice) for name in choice.sample(sorted(current), 1)
            },
        }
    kind = choice.choice(ROTATIONS)
    parts: Dict[str, Any] = {
        "rope_type": kind, "rope_theta": choice.choice([100.0, 10000.0, 500000.0]),
        "factor": choice.choice([0.5, 1.0, 2.0, 4, 8.0]),
        "original_max_position_embeddings": choice.choice([8, 16, 64, 128]), "low_freq_factor": 1.0,
        "high_freq_factor": choice.choice([2.0, 4.0]), "beta_fast": choice.choice([32, 4]),
        "beta_slow": choice.choice([1, 2]), "attention_factor": choice.choice([None, 0.7, 1.2]),
        "mscale": choice.choice([0.5, 1.0]), "mscale_all_dim": choice.choice([0.0, 0.7, 1.0]),
        "truncate": choice.choice([True, False]),
        "partial_rotary_factor": choice.choice([0.25, 0.5, 0.75, 1.0]),
    }  # fmt: skip
    if isinstance(current, dict) and choice.random() < 0.5:
        key = choice.choice(sorted(set(current) | {"rope_theta"}))
        return {
            **current,
            key: _value(key, {**parts, **current}, choice) if key not in parts else parts[key],
        }
    always = dict.fromkeys(("linear", "dynamic", "ntk", "yarn"), ["factor"])
    llama3 = ["factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"]
    needed = ["rope_type", "rope_theta", *({**always, "llama3": llama3}.get(kind, []))]
    further = [] if choice.random() < 0.6 else choice.sample(sorted(set(parts) - set(needed)), 1)
    if kind == "yarn" and choice.random() < 0.8:
        further.append("original_max_position_embeddings")
    return {
        key: parts[key]
        for key in [*needed, *further]
        if not (key == "rope_theta" and choice.random() < 0.2)
    }
