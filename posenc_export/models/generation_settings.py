"""Reader of generation_config.json: forbidden and forced tokens."""

from typing import Any, Dict, List, Mapping, Sequence

from posenc_export.models.checkpoint import GENERATION, object_of, read_ids

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
    return {key: value for key, value in fields.items() if value not in (None, ())}


def unapplied(files: Mapping[str, bytes]) -> List[str]:
    """Return the keys of UNAPPLIED with values that change tokens, each as KEY=VALUE."""
    values = object_of(GENERATION, files.get(GENERATION, b"{}"))
    stated = {key: values[key] for key in UNAPPLIED if values.get(key) is not None}
    return [f"{key}={value!r}" for key, value in stated.items() if value not in UNAPPLIED[key]]
