"""Settings of tokenizer_config.json that contradict tokenizer.json, which artefacts use alone.

transformers 5.23 builds the normalizer and the splitting of its own tokenizer classes from
tokenizer_config.json. Only the classes in AS_WRITTEN use tokenizer.json as it is, Llama's if it
splits bytes.
"""

from typing import Any, Dict, Mapping

from posenc_export.models.checkpoint import TOKENIZER, object_of
from posenc_export.shared.refusal import refusal

CONFIG = "tokenizer_config.json"
AS_WRITTEN = (
    "PreTrainedTokenizerFast",
    "TokenizersBackend",
    "LlamaTokenizer",
    "LlamaTokenizerFast",
)
DEFAULTS = {"do_lower_case": True, "tokenize_chinese_chars": True}  # of classes like BertTokenizer


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
            raise refusal("checkpoint", rule, repr(stated[key]), remedy)


def _written(content: Dict[str, Any]) -> Dict[str, Any]:
    """Return the settings of a tokenizer.json by their names in tokenizer_config.json."""
    written: Dict[str, Any] = {}
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
