"""How byte-level vocabularies split a text, by llama.cpp's names (tokenizer.ggml.pre)."""

from typing import Dict, NamedTuple, Tuple

WORDS = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"  # GPT-2
ENDINGS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
REST = r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
DIGITS_BY_THREE = ENDINGS + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}" + REST
DIGITS_ALONE = ENDINGS + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}" + REST
SMALL, LARGE = r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]", r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]"
BEFORE = r"[^\r\n\p{L}\p{N}]?"
REST_OF_CASES = r"| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"


class Split(NamedTuple):
    """How a text is split."""

    # Regular expressions; each one splits what the one before it left, at both ends of each match.
    patterns: Tuple[str, ...]
    composed: bool = False  # whether the text is normalized to composed characters (NFC)
    whole: bool = False  # whether a piece that is itself a token is not merged from its bytes
    begins: bool = False  # whether a text begins with the token bos if the file does not say


def _by_case(endings: str, digits: str) -> str:
    """Words whose capitals begin them, as in o200k and Tekken."""
    words = rf"{BEFORE}{LARGE}*{SMALL}+{endings}|{BEFORE}{LARGE}+{SMALL}*{endings}"
    return rf"{words}|{digits}{REST_OF_CASES}"


GPT2 = Split((WORDS,))
LLAMA3 = Split((DIGITS_BY_THREE,), whole=True, begins=True)
QWEN2 = Split((DIGITS_ALONE,), composed=True)
SPLITS: Dict[str, Split] = {
    **dict.fromkeys(("gpt-2", "gpt2", "mpt", "olmo", "phi-2", "jais", "gigachat"), GPT2),
    **dict.fromkeys(("llama3", "llama-v3", "llama-bpe", "falcon3", "pixtral"), LLAMA3),
    **dict.fromkeys(("dbrx", "smaug-bpe", "chatglm-bpe", "glm4"), Split((DIGITS_BY_THREE,))),
    **dict.fromkeys(("qwen2", "deepseek-r1-qwen", "megrez"), QWEN2),
    "stablelm2": Split((DIGITS_ALONE,)),
    **dict.fromkeys(
        ("smollm", "starcoder", "refact", "command-r", "codeshell", "exaone", "minerva-7b"),
        Split((r"\p{N}", WORDS)),
    ),
    "falcon": Split((r"[\p{P}\$\+<=>\^~\|`]+", WORDS, r"[0-9][0-9][0-9]")),
    "bloom": Split((r" ?[^(\s|.,!?…。，、।۔،)]+",)),
    "tekken": Split((_by_case("", r"\p{N}"),), whole=True, begins=True),
    **dict.fromkeys(("gpt-4o", "llama4"), Split((_by_case(ENDINGS + "?", r"\p{N}{1,3}"),))),
}
