"""Limits on the values of config.json, checked before anything is built."""

import re
from typing import Any, Mapping, Tuple

from posenc_export.shared.refusal import refusal

# Keys that do not affect the computation of logits from tokens, or are read with the tensors
# (quantization_config, models/packed.py): of training and tasks, and settings of generation, which
# earlier versions of transformers wrote for every model.
IGNORED = frozenset(
    """_attn_implementation _attn_implementation_autoset _attn_implementation_internal _commit_hash
    _experts_implementation _flash_attn_2_enabled _model_name_or_path _name_or_path _num_labels
    architectures attention_dropout attn_implementation auto_map bad_words_ids base_model
    begin_suppress_tokens bos_token_id cache_implementation chunk_size_feed_forward
    classifier_dropout compression_config custom_pipelines decoder_start_token_id
    diversity_penalty do_sample dropout dtype early_stopping encoder_no_repeat_ngram_size
    eos_token_id experts_implementation exponential_decay_length_penalty finetuning_task
    forced_bos_token_id forced_eos_token_id gradient_checkpointing hidden_dropout id2label
    init_config init_device init_std initializer_range is_llama_config
    keys_to_ignore_at_inference label2id length_penalty library_name license max_length min_length
    neftune_noise_alpha no_repeat_ngram_size num_beam_groups num_beams num_labels
    num_return_sequences output_attentions output_hidden_states output_past output_scores
    pad_token_id prefix pretraining_tp problem_type quantization_config remove_invalid_values
    repetition_penalty resid_pdrop return_dict return_dict_in_generate sentence_transformers
    sep_token_id suppress_tokens task_specific_params temperature tf_legacy_loss tokenizer_class
    tokenizer_name top_k top_p torch_dtype torchscript transformers.js_config transformers_version
    typical_p unk_token_id unsloth_fixed unsloth_version use_bfloat16 use_cache
    use_flash_attention use_flash_attn verbose""".split()
)
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
