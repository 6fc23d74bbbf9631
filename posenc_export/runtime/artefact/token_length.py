"""How much text a token can stand for, from tokenizer.json (format of the tokenizers library)."""

from typing import Any, Iterator, Mapping, Optional

# Parts that keep all of a text. Those left out drop or join some of it, such as white space.
NORMALIZERS = ("ByteLevel", "NFC", "Prepend", "Replace")
PRE_TOKENIZERS = ("ByteLevel", "Digits", "Metaspace", "Punctuation", "Split", "UnicodeScripts")
# Bytes that NFC composes to one byte, rounded up: 3.5 for U+1FBE U+0308 U+0301 to U+0390, which is
# the most of all characters of Unicode.
COMPOSED = 4
LETTER = 4  # most bytes of a letter, which an unknown token stands for
# The letters that stand for bytes in a byte-level vocabulary (GPT-2's bytes_to_unicode).
CODES = (range(0x21, 0x7F), range(0xA1, 0xAD), range(0xAE, 0x144))
BYTE_LETTERS = frozenset(chr(code) for codes in CODES for code in codes)
FALLBACK = frozenset(f"<0x{byte:02X}>" for byte in range(256))  # tokens of single bytes


def bytes_of_token(tokenizer: Mapping[str, Any]) -> Optional[int]:
    """Return the most bytes of a text in UTF-8 that a token of tokenizer.json can stand for; None
    if a part of the tokenizer drops or joins any amount of text, or is not known.
    """
    model, added = tokenizer["model"], tokenizer["added_tokens"]
    normalizers = list(_parts(tokenizer["normalizer"], "normalizers"))
    pre_tokenizers = list(_parts(tokenizer["pre_tokenizer"], "pretokenizers"))
    byte_level = any(part["type"] == "ByteLevel" for part in (*normalizers, *pre_tokenizers))
    if not (
        model["type"] == "BPE"
        and _keeps_unknown(model, byte_level)
        and all(_keeps_length(part) for part in normalizers)
        and all(part["type"] in PRE_TOKENIZERS for part in pre_tokenizers)
        and not any(part.get("behavior") == "Removed" for part in pre_tokenizers)
        and not any(token["lstrip"] or token["rstrip"] for token in added)
    ):
        return None
    factor = COMPOSED if any(part["type"] == "NFC" for part in normalizers) else 1
    # A letter of a byte-level vocabulary stands for one byte.
    sizes = [len(token) if byte_level else len(token.encode()) for token in model["vocab"]]
    sizes += [len(token["content"].encode()) for token in added]
    return factor * max([LETTER, *sizes])


def _parts(part: Optional[Mapping[str, Any]], key: str) -> Iterator[Mapping[str, Any]]:
    if part is None:
        return
    if part["type"] != "Sequence":
        yield part
        return
    for inner in part[key]:
        yield from _parts(inner, key)


def _keeps_unknown(model: Mapping[str, Any], byte_level: bool) -> bool:
    """Whether every letter that is no token gets at least one token of its own."""
    if model.get("continuing_subword_prefix") or model.get("end_of_word_suffix"):
        return False
    vocabulary = model["vocab"].keys()
    if byte_level and vocabulary >= BYTE_LETTERS:
        return True
    if model.get("byte_fallback") and vocabulary >= FALLBACK:
        return True
    return model.get("unk_token") is not None and not model.get("fuse_unk")


def _keeps_length(part: Mapping[str, Any]) -> bool:
    """Whether a normalizer makes no text shorter than COMPOSED says."""
    if part["type"] != "Replace":
        return part["type"] in NORMALIZERS
    pattern = part["pattern"].get("String")  # others are regular expressions
    return pattern is not None and len(part["content"].encode()) >= len(pattern.encode())
