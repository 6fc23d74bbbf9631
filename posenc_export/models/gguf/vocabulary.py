"""The vocabulary in the metadata of a GGUF file, checked."""

from typing import Any, Dict, Mapping

import numpy as np

LISTS = (
    ("tokens", str, True),
    ("token_type", int, True),
    ("scores", float, True),
    ("merges", str, False),
)  # name, entries, one for each token
TEXTS = ("ggml.model", "ggml.pre", "chat_template")
FLAGS = ("ggml.add_bos_token", "ggml.add_eos_token", "ggml.add_space_prefix")
IDS = tuple(f"ggml.{name}_token_id" for name in ("bos", "eos", "eot", "eom", "unknown", "padding"))
# Types of single values, with their names in messages.
SINGLE = {
    **dict.fromkeys(TEXTS, (str, "a text")),
    **dict.fromkeys(FLAGS, (bool, "true or false")),
    **dict.fromkeys(IDS, (int, "a whole number")),
}
REMEDY = "put the model's tokenizer.json beside the file, which is then used in its place"


def vocabulary_of(values: Mapping[str, Any]) -> Dict[str, Any]:
    """Return the keys of a vocabulary, with arrays as lists. Empty without a vocabulary.

    Args:
        values: metadata of the file.

    Raises:
        ValueError: a value of another type than llama.cpp writes.
    """
    start, vocabulary = "tokenizer.", {}
    for key, (kind, rule) in SINGLE.items():
        value = values.get(start + key)
        if value is not None and type(value) is not kind:
            raise ValueError(
                f"gguf: expected {start}{key} to be {rule}, got {_brief(value)}; {REMEDY}"
            )
        if value is not None:
            vocabulary[start + key] = value
    for name, kind, _ in LISTS:
        key = f"{start}ggml.{name}"
        value = values.get(key)
        entries = value.tolist() if isinstance(value, np.ndarray) else value
        if value is not None and not (
            isinstance(entries, list) and all(type(entry) is kind for entry in entries)
        ):
            rule = f"a list of {'texts' if kind is str else 'numbers'}"
            raise ValueError(f"gguf: expected {key} to be {rule}, got {_brief(value)}; {REMEDY}")
        if value is not None:
            vocabulary[key] = entries
    return vocabulary


def _brief(value: Any) -> str:
    """Return a value as a message shows it: its beginning, in one line."""
    return f"an array {value[:4].tolist()}" if isinstance(value, np.ndarray) else repr(value)[:80]


def check(values: Mapping[str, Any]) -> None:
    """Check the lists of a vocabulary.

    Raises:
        ValueError: a list is missing or has another length, or a merge gives no token.
    """
    tokens = values.get("tokenizer.ggml.tokens", [])
    for name, _, alike in LISTS:
        entries = values.get(f"tokenizer.ggml.{name}", [])
        if (name == "tokens" and not entries) or (
            alike and entries and len(entries) != len(tokens)
        ):
            raise ValueError(
                f"gguf: expected tokenizer.ggml.{name} to be a list as long as the "
                f"vocabulary, got {len(entries)} entries; {REMEDY}"
            )
    known = set(tokens)
    wrong = next(
        (
            pair
            for pair in values.get("tokenizer.ggml.merges", [])
            if " " not in pair or not {*pair.split(" ", 1), pair.replace(" ", "", 1)} <= known
        ),
        None,
    )
    if wrong is not None:
        raise ValueError(
            "gguf: expected tokenizer.ggml.merges to be pairs of tokens that give a token, "
            f"got {wrong!r:.80}; {REMEDY}"
        )
