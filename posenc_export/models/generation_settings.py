"""Reader of generation_config.json: forbidden and forced tokens, first tokens of Whisper."""

from typing import Any, Dict, List, Mapping, Sequence

from posenc_export.models.checkpoint import GENERATION, object_of, read_ids
from posenc_export.shared.refusal import refusal

# Keys that change the greedy tokens of transformers and that `generate` does not apply, with the
# values that change nothing.
UNAPPLIED: Dict[str, Sequence[Any]] = {
    "num_beams": (1,),
    "repetition_penalty": (1.0,),
    "no_repeat_ngram_size": (0,),
    "encoder_repetition_penalty": (1.0,),
    "encoder_no_repeat_ngram_size": (0,),
    "bad_words_ids": ([],),
    "sequence_bias": ({}, []),
    "min_length": (0,),
    "min_new_tokens": (0,),
    "forced_eos_token_id": (),
    "exponential_decay_length_penalty": (),
    "return_timestamps": (False,),
}


def read(files: Mapping[str, bytes], config: Mapping[str, Any], vocabulary: int) -> Dict[str, Any]:
    """Return the fields of runtime.artefact.records.Generation that differ from their defaults.

    Args:
        files: the files of the checkpoint by name.
        config: contents of config.json, which has these keys in older checkpoints.
        vocabulary: number of token ids; ids beyond it are dropped.

    Raises:
        ValueError: a value of another type than transformers writes.
    """
    first = read_ids(files, config, "forced_bos_token_id", vocabulary)
    fields: Dict[str, Any] = {
        "suppressed": read_ids(files, config, "suppress_tokens", vocabulary),
        "suppressed_first": read_ids(files, config, "begin_suppress_tokens", vocabulary),
        "forced_first": first[0] if first else None,
    }
    if config.get("model_type") == "whisper":
        fields |= _speech(_settings(files), config)
    return {key: value for key, value in fields.items() if value not in (None, (), {}, "")}


def unapplied(files: Mapping[str, bytes]) -> List[str]:
    """Return the keys of UNAPPLIED with values that change tokens, each as KEY=VALUE."""
    values = _settings(files)
    stated = {key: values[key] for key in UNAPPLIED if values.get(key) is not None}
    return [f"{key}={value!r}" for key, value in stated.items() if value not in UNAPPLIED[key]]


def _settings(files: Mapping[str, bytes]) -> Dict[str, Any]:
    return object_of(GENERATION, files.get(GENERATION, b"{}"))


def _speech(values: Mapping[str, Any], config: Mapping[str, Any]) -> Dict[str, Any]:
    """Return the fields of Whisper's first tokens. An id of None is that of the language."""
    forced = values.get("forced_decoder_ids") or config.get("forced_decoder_ids") or []
    places = [pair[0] for pair in forced if isinstance(pair, list) and len(pair) == 2]
    listed = isinstance(forced, list) and places == list(range(1, len(forced) + 1))
    if not listed or not all(pair[1] is None or _is_id(pair[1]) for pair in forced):
        rule = "forced_decoder_ids to be pairs of a place, from 1 on, and a token id"
        raise _refusal(rule, forced)
    fields: Dict[str, Any] = {"forced": tuple(pair[1] for pair in forced)}
    for ours, key in (("languages", "lang_to_id"), ("tasks", "task_to_id")):
        table = values.get(key) or {}
        if not isinstance(table, dict) or not all(map(_is_id, table.values())):
            raise _refusal(f"{key} to map names to token ids", table)
        fields[ours] = table
    for key in ("language", "task"):
        fields[key] = values.get(key) or ""
        if not isinstance(fields[key], str):
            raise _refusal(f"{key} to be a name", values[key])
    times = values.get("no_timestamps_token_id")
    if times is not None and not _is_id(times):
        raise _refusal("no_timestamps_token_id to be a token id", times)
    return {**fields, "no_timestamps": times}


def _is_id(value: Any) -> bool:
    return type(value) is int and value >= 0


def _refusal(rule: str, got: Any) -> ValueError:
    return refusal("checkpoint", rule, repr(got), f"correct {GENERATION}")
