"""The vocabulary in the metadata of a GGUF file, checked."""

from typing import Any, Dict, Mapping

import numpy as np

from posenc_export.shared.refusal import refusal

# Lists: name, type of entries, whether there is one for each token.
LISTS = (
    ("tokens", str, True),
    ("token_type", int, True),
    ("scores", float, True),
    ("merges", str, False),
)
TEXTS = ("ggml.model", "ggml.pre", "chat_template")
FLAGS = ("ggml.add_bos_token", "ggml.add_eos_token", "ggml.add_space_prefix")
IDS = tuple(f"ggml.{name}_token_id" for name in ("bos", "eos", "eot", "eom", "unknown", "padding"))
# Types of single values, with their names in messages.
SINGLE = {
    **dict.fromkeys(TEXTS, (str, "a text")),
    **dict.fromkeys(FLAGS, (bool, "true or false")),
    **dict.fromkeys(IDS, (int, "a whole number")),
}
ARCHITECTURE = "general.architecture"
REMEDY = "put the model's tokenizer.json beside the file, which is then used in its place"


def vocabulary_of(values: Mapping[str, Any]) -> Dict[str, Any]:
    """Return the keys of a vocabulary in the metadata of a file, with arrays as lists, and its
    architecture. ValueError: a value of another type than llama.cpp writes.
    """
    vocabulary = {ARCHITECTURE: values[ARCHITECTURE]} if ARCHITECTURE in values else {}
    for name, (kind, rule) in SINGLE.items():
        key = f"tokenizer.{name}"
        value = values.get(key)
        if value is not None and type(value) is not kind:
            raise refusal("gguf", f"{key} to be {rule}", _brief(value), REMEDY)
        if value is not None:
            vocabulary[key] = value
    for name, kind, _ in LISTS:
        key = f"tokenizer.ggml.{name}"
        value = values.get(key)
        entries = value.tolist() if isinstance(value, np.ndarray) else value
        if value is None:
            continue
        if not isinstance(entries, list) or not all(type(entry) is kind for entry in entries):
            rule = f"{key} to be a list of {'texts' if kind is str else 'numbers'}"
            raise refusal("gguf", rule, _brief(value), REMEDY)
        vocabulary[key] = entries
    return vocabulary


def _brief(value: Any) -> str:
    """Return a value as a message shows it: its beginning, in one line."""
    return f"an array {value[:4].tolist()}" if isinstance(value, np.ndarray) else repr(value)[:80]


def check(values: Mapping[str, Any]) -> None:
    """Raise ValueError if a list is missing or has another length, or a merge gives no token."""
    tokens = values.get("tokenizer.ggml.tokens", [])
    for name, _, alike in LISTS:
        entries = values.get(f"tokenizer.ggml.{name}", [])
        other = alike and entries and len(entries) != len(tokens)
        if other or (name == "tokens" and not entries):
            rule = f"tokenizer.ggml.{name} to be a list as long as the vocabulary"
            raise refusal("gguf", rule, f"{len(entries)} entries", REMEDY)
    known = set(tokens)
    for pair in values.get("tokenizer.ggml.merges", []):
        if " " not in pair or not {*pair.split(" ", 1), pair.replace(" ", "", 1)} <= known:
            rule = "tokenizer.ggml.merges to be pairs of tokens that give a token"
            raise refusal("gguf", rule, f"{pair!r:.80}", REMEDY)
