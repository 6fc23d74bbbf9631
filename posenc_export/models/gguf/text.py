"""The vocabulary of a GGUF file as tokenizer.json, and the files that belong to it."""

import json
import math
from typing import Any, Callable, Mapping

import numpy as np

from posenc_export.shared.foreign import explained
from posenc_export.shared.refusal import refusal
from posenc_export.shared.suggestion import suggestion

# Kinds of tokens (gguf.TokenType).
NORMAL, UNKNOWN, CONTROL, USER_DEFINED = 1, 2, 3, 4
SPACE = "\u2581"  # stands for a space in vocabularies of sentencepiece
KEY, NONE = "tokenizer.ggml.", ("none", "no_vocab")
NAMED = {"bos_token": "bos", "eos_token": "eos", "unk_token": "unknown", "pad_token": "padding"}
Keys = Mapping[str, Any]  # tokenizer.ggml.* of the metadata, without this beginning
REMEDY = "put the model's tokenizer.json beside the file, which is then used in its place"
# Tokens that end a turn or a text, by the names of published chat templates and of llama.cpp, which
# ignores their types, too: files often type them as user's, and name only one stop token.
ENDS = (
    *("<|im_end|>", "<|eot_id|>", "<|eom_id|>", "<|end|>", "<end_of_turn>", "<|end_of_turn|>"),
    *("<|END_OF_TURN_TOKEN|>", "<|endoftext|>", "<|end_of_text|>", "<|return|>", "<|call|>"),
    *("</s>", "<eos>", "<EOT>", "_<EOT>", "\u2581<EOT>", "[EOT]", "[EOS]", "<end_of_utterance>"),
    *("<turn|>", "<\uff5cend\u2581of\u2581sentence\uff5c>"),  # Gemma 4, DeepSeek
)
# With both, messages end, and the turn goes on.
END, HARMONY = "<|end|>", {"<|return|>", "<|call|>"}
UNSTRIPPED = ("<unk>", "<s>", "<|endoftext|>")  # the others of Phi-3 take the spaces behind them


ENDINGS, NOT_WORDS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)", r" ?[^\s\p{L}\p{N}]+[\r\n%s]*"
SMALL, LARGE = r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]", r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]"
BEFORE, SPACES = r"[^\r\n\p{L}\p{N}]?", r"\s*[\r\n]+|\s+(?!\S)|\s+"


def _words(digits: str) -> str:
    return rf"{ENDINGS}|{BEFORE}\p{{L}}+|{digits}|{NOT_WORDS % ''}|{SPACES}"


def _cases(digits: str, endings: str = "") -> str:
    """Words whose capitals begin them, as in Tekken and o200k."""
    words = rf"{BEFORE}{LARGE}*{SMALL}+{endings}|{BEFORE}{LARGE}+{SMALL}*{endings}"
    return rf"{words}|{digits}|{NOT_WORDS % '/'}|{SPACES}"


# How byte-level vocabularies split a text, by llama.cpp's names (tokenizer.ggml.pre): as GPT-2,
# perhaps with each digit alone, or by a regular expression.
AS_GPT2 = ("gpt-2", "gpt2", "olmo", "phi-2", "gigachat")
DIGITS = ("smollm", "starcoder", "refact", "command-r", "minerva-7b")
COMPOSED = ("qwen2", "deepseek-r1-qwen", "megrez")  # which normalize a text, too (NFC)
# Those of Llama 3 and Tekken. A piece that is a token is not merged from its bytes, and a text
# begins with the token bos if the file does not say.
WHOLE = ("llama3", "llama-v3", "llama-bpe", "falcon3", "pixtral", "tekken")
PATTERNS = {
    **dict.fromkeys((*WHOLE, "dbrx", "smaug-bpe"), _words(r"\p{N}{1,3}")),
    **dict.fromkeys((*COMPOSED, "stablelm2"), _words(r"\p{N}")),
    "tekken": _cases(r"\p{N}"),
    "gpt-4o": _cases(r"\p{N}{1,3}", f"{ENDINGS}?"),
}


def files_of(values: Mapping[str, Any], tokenizer: bytes | None = None) -> dict[str, bytes]:
    """Return the files of a tokenizer by name, as transformers saves them: tokenizer.json, its
    settings, the chat template, stop tokens. Empty without a vocabulary.

    Args:
        values: the metadata of a file.
        tokenizer: a tokenizer.json in place of the vocabulary.

    Raises:
        ValueError: a vocabulary of another kind than those of GPT-2 and sentencepiece, or a value
            of another type than llama.cpp writes.
        ModuleNotFoundError: tokenizers is not installed.
    """
    own = {key.removeprefix(KEY): values[key] for key in values if key.startswith(KEY)}
    keys = {key: one.tolist() if isinstance(one, np.ndarray) else one for key, one in own.items()}
    if tokenizer is None and str(keys.get("model", "none")) in NONE:
        return {}
    if tokenizer is None:
        tokenizer = tokenizer_of(keys, values.get("general.architecture") == "phi3")
    with explained(f"gguf: expected keys {KEY}* as llama.cpp writes them", REMEDY):
        named = {name: _token(keys, end) for name, end in NAMED.items()}
        known = {name: token for name, token in named.items() if token is not None}
        ids = {f"{name}_id": keys[f"{NAMED[name]}_token_id"] for name in known if name[0] != "u"}
        adds_eos = bool(keys.get("add_eos_token"))
        whether = {"add_bos_token": _adds_bos(keys), "add_eos_token": adds_eos}
        generation = {**ids, "eos_token_id": stop_ids(keys) or None}
        settings = {"tokenizer_class": "PreTrainedTokenizerFast", **known, **whether}
        files = {"generation_config.json": generation, "tokenizer_config.json": settings}
        written = {name: json.dumps(one, sort_keys=True).encode() for name, one in files.items()}
        if "tokenizer.chat_template" in values:
            written["chat_template.jinja"] = values["tokenizer.chat_template"].encode()
    return {"tokenizer.json": tokenizer, **written}


def stop_ids(keys: Keys) -> list[int]:
    """Return the tokens that end a text or a turn: those that the file names, and those in ENDS."""
    tokens = keys.get("tokens", [])
    named = [end for end in ("eos", "eot", "eom") if _token(keys, end) is not None]
    ends = [name for name in ENDS if name != END or not set(tokens) >= HARMONY]
    others = [index for index, token in enumerate(tokens) if token in ends]
    return list(dict.fromkeys([*(keys[f"{end}_token_id"] for end in named), *others]))


def tokenizer_of(keys: Keys, phi3: bool = False) -> bytes:
    """Return the tokenizer.json of a vocabulary. ValueError: a vocabulary of another kind, or a way
    of splitting texts that is not known. phi3: whether it belongs to Phi-3.
    """
    kind, split = str(keys.get("model")), str(keys.get("pre"))
    splits = (*AS_GPT2, *DIGITS, *PATTERNS)
    for key, value, known in (("model", kind, (*BUILDERS,)), ("pre", split, splits)):
        if value not in known and (key == "model" or kind == "gpt2"):
            rule, near = f"{KEY}{key} to be one of {', '.join(known)}", suggestion(value, known)
            raise refusal("gguf", rule, f"{value!r:.80}", f"{near} Or {REMEDY}")
    with explained(f"gguf: expected keys {KEY}* of a vocabulary", REMEDY):
        # Tokens that end a text or a turn are control tokens, whatever the file says.
        kinds = list(keys.get("token_type") or [NORMAL] * len(keys["tokens"]))
        for index in stop_ids(keys):
            kinds[index] = CONTROL
        tokenizer = BUILDERS[kind](keys, kinds)
        # Files do not hold the attributes of tokens. Phi-4 has a vocabulary of another kind.
        _add_whole(tokenizer, keys["tokens"], kinds, phi3 and kind == "llama")
        _add_ends(tokenizer, keys)
        content: str = tokenizer.to_str()
    return content.encode()


def _byte_level(keys: Keys, kinds: list[int]) -> Any:
    """A tokenizer that merges bytes (GPT-2)."""
    from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers

    split, pattern = keys["pre"], PATTERNS.get(keys["pre"])
    merges = [tuple(pair.split(" ", 1)) for pair in keys.get("merges", [])]
    ids = {token: index for index, token in enumerate(keys["tokens"])}
    tokenizer = Tokenizer(models.BPE(ids, merges, ignore_merges=split in WHOLE))
    if split in COMPOSED:
        tokenizer.normalizer = normalizers.NFC()
    parts: list[Any] = [pre_tokenizers.Digits(True)] if split in DIGITS else []
    parts += [pre_tokenizers.Split(Regex(pattern), "isolated")] if pattern else []
    level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=pattern is None)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([*parts, level])
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def _sentencepiece(keys: Keys, kinds: list[int]) -> Any:
    """A tokenizer that merges characters, with bytes for unknown ones (sentencepiece)."""
    from tokenizers import Tokenizer, decoders, models, normalizers
    from transformers.tokenization_utils_base import generate_merges

    # Runs of spaces are user-defined tokens. They are spelled as the text has them after
    # normalization.
    tokens = [SPACE * len(one) if one and not one.strip(" ") else one for one in keys["tokens"]]
    ids = {token: index for index, token in enumerate(tokens)}
    # Every way to cut a token in two is a pair with its score. User-defined tokens are whole.
    ranks = zip(tokens, kinds, keys["scores"], strict=True)
    own = {NORMAL: 0.0, USER_DEFINED: math.inf}
    scores = {token: score + own[kind] for token, kind, score in ranks if kind in own}
    pairs = generate_merges(ids, scores)
    unknown = _token(keys, "unknown")
    model = models.BPE(ids, pairs, unk_token=unknown, fuse_unk=True, byte_fallback=True)
    tokenizer, prefixed = Tokenizer(model), bool(keys.get("add_space_prefix", True))
    before: list[Any] = [normalizers.Prepend(SPACE)] if prefixed else []
    tokenizer.normalizer = normalizers.Sequence([*before, normalizers.Replace(" ", SPACE)])
    after: list[Any] = [decoders.Strip(" ", 1, 0)] if prefixed else []
    spelled_out = [decoders.Replace(SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
    tokenizer.decoder = decoders.Sequence([*spelled_out, *after])
    return tokenizer


def _add_whole(tokenizer: Any, tokens: list[str], kinds: list[int], strips: bool) -> None:
    """Add tokens that a text holds whole: control tokens, which decoding omits, and user's. strips:
    whether they take the spaces behind them, but for UNSTRIPPED.
    """
    from tokenizers import AddedToken

    known, added = tokenizer.get_vocab(), []
    for text, kind in zip(tokens, kinds, strict=True):
        if text in known and kind in (UNKNOWN, CONTROL, USER_DEFINED):
            strip, special = strips and text not in UNSTRIPPED, kind != USER_DEFINED
            added.append(AddedToken(text, normalized=False, rstrip=strip, special=special))
    tokenizer.add_tokens(added)


def _add_ends(tokenizer: Any, keys: Keys) -> None:
    """Put bos before a text and eos after it, where the file says so."""
    from tokenizers import processors

    bos = _token(keys, "bos") if _adds_bos(keys) else None
    eos = _token(keys, "eos") if keys.get("add_eos_token") else None
    before, after = ([] if token is None else [token] for token in (bos, eos))
    first, second = [*before, "$A", *after], [f"{part}:1" for part in (*before, "$B", *after)]
    if used := {token: keys["tokens"].index(token) for token in (*before, *after)}:
        processor = processors.TemplateProcessing(first, [*first, *second], list(used.items()))
        tokenizer.post_processor = processor


def _adds_bos(keys: Keys) -> bool:
    """Whether a text begins with bos. sentencepiece begins with it by default."""
    begins = keys.get("model") == "llama" or str(keys.get("pre")) in WHOLE
    return bool(keys.get("add_bos_token", begins))


def _token(keys: Keys, name: str) -> str | None:
    """Return a special token, None if the file has none or one beyond its vocabulary."""
    index, tokens = keys.get(f"{name}_token_id"), keys.get("tokens", [])
    return tokens[index] if type(index) is int and 0 <= index < len(tokens) else None


BUILDERS: dict[str, Callable[[Keys, list[int]], Any]] = {
    "gpt2": _byte_level,
    "llama": _sentencepiece,
}
