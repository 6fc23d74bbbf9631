"""The text files of a checkpoint: its tokenizer, and tokens that begin, end or are not in texts.

Artefacts use tokenizer.json alone. transformers 5.23 builds the normalizer and the splitting of its
own tokenizer classes from tokenizer_config.json. Only the classes in AS_WRITTEN use tokenizer.json
as it is, Llama's if it splits bytes.
"""

from typing import Any, Mapping, Sequence

from posenc_export.models.checkpoint import GENERATION, TOKENIZER, object_of
from posenc_export.models.embedding_and_head import Text
from posenc_export.models.folder_files import WHERE
from posenc_export.shared.refusal import refusal

CONFIG = "tokenizer_config.json"
AS_WRITTEN = (
    "PreTrainedTokenizerFast",
    "TokenizersBackend",
    "LlamaTokenizer",
    "LlamaTokenizerFast",
)
DEFAULTS = {"do_lower_case": True, "tokenize_chinese_chars": True}  # of classes like BertTokenizer
# Keys that change the greedy tokens of transformers and that `generate` does not apply, with the
# values that change nothing.
UNAPPLIED: dict[str, Sequence[Any]] = {
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


def text_of(
    files: Mapping[str, bytes],
    config: Mapping[str, Any],
    vocabulary: int,
    decodes: bool,
    part: str | None = None,
) -> Text:
    """Return a checkpoint's tokenizer and, of a decoder, stop ids, start ids and generation.

    Args:
        files: the files of the checkpoint by name.
        config: contents of config.json, which has keys of generation in older checkpoints.
        vocabulary: number of token ids; ids beyond it are dropped.
        part: "encoder" or "decoder" of a model with both; others have no start ids.

    Raises:
        ValueError: the files state two tokenizers; a value of another type than transformers
            writes.
    """
    check(files)
    others = {name: content for name, content in files.items() if name != TOKENIZER}
    tokenizer = files.get(TOKENIZER, b"")
    if not decodes:
        return Text(tokenizer, files=others)

    def ids(key: str) -> tuple[int, ...]:
        return _ids(files, config, key, vocabulary)

    fields: dict[str, Any] = {
        "suppressed": ids("suppress_tokens"),
        "suppressed_first": ids("begin_suppress_tokens"),
        "forced_first": next(iter(ids("forced_bos_token_id")), None),
    }
    generation = {key: value for key, value in fields.items() if value not in (None, ())}
    start_ids = ids("decoder_start_token_id") if part else ()
    return Text(tokenizer, ids("eos_token_id"), start_ids, others, generation)


def check(files: Mapping[str, bytes]) -> None:
    """Raise ValueError if the tokenizer files of a checkpoint, by name, state two tokenizers."""
    config = object_of(CONFIG, files.get(CONFIG, b"{}"))
    named = config.get("tokenizer_class")
    if TOKENIZER not in files or named in AS_WRITTEN:
        return
    written = _written(object_of(TOKENIZER, files[TOKENIZER]))
    stated = {**(DEFAULTS if named else {}), **config}
    if stated.get("strip_accents") is None:  # then accents are removed with capitals
        stated["strip_accents"] = stated.get("do_lower_case")
    for key, value in written.items():
        if stated.get(key, value) not in (None, value):
            rule = f"{key} of {CONFIG} to be {value!r} as in {TOKENIZER}"
            remedy = "load the tokenizer with transformers and save it, or correct one of the files"
            raise refusal(WHERE, rule, repr(stated[key]), remedy)


def _written(content: dict[str, Any]) -> dict[str, Any]:
    """Return the settings of a tokenizer.json by their names in tokenizer_config.json."""
    written: dict[str, Any] = {}
    normalizer, splitting = content.get("normalizer"), content.get("pre_tokenizer")
    if isinstance(normalizer, dict) and normalizer.get("type") == "BertNormalizer":
        lower, accents = normalizer.get("lowercase"), normalizer.get("strip_accents")
        written = {"do_lower_case": lower, "strip_accents": lower if accents is None else accents}
        written["tokenize_chinese_chars"] = normalizer.get("handle_chinese_chars")
    parts = splitting.get("pretokenizers", [splitting]) if isinstance(splitting, dict) else []
    for part in parts if isinstance(parts, list) else []:
        if isinstance(part, dict) and part.get("type") == "ByteLevel":
            written["add_prefix_space"] = part.get("add_prefix_space")
    return written


def _ids(
    files: Mapping[str, bytes], config: Mapping[str, Any], key: str, vocabulary: int
) -> tuple[int, ...]:
    """Return the token ids under a key of generation_config.json, or else of config.json, such as
    eos_token_id. Ids beyond the vocabulary are dropped. ValueError: the value is not null, an
    integer of 0 or more, or a list of such integers.
    """
    value = object_of(GENERATION, files.get(GENERATION, b"{}")).get(key)
    value = config.get(key) if value is None else value
    ids = value if isinstance(value, list) else [] if value is None else [value]
    if not all(type(number) is int and number >= 0 for number in ids):
        rule = f"{key} to be null, an integer of 0 or more, or a list of these"
        raise refusal(WHERE, rule, repr(value), f"correct {GENERATION}")
    return tuple(number for number in ids if number < vocabulary)


def unapplied(files: Mapping[str, bytes]) -> list[str]:
    """Return the keys of UNAPPLIED with values that change tokens, each as KEY=VALUE."""
    values = object_of(GENERATION, files.get(GENERATION, b"{}"))
    stated = {key: values[key] for key in UNAPPLIED if values.get(key) is not None}
    return [f"{key}={value!r}" for key, value in stated.items() if value not in UNAPPLIED[key]]
