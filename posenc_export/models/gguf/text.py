"""The vocabulary of a GGUF file as tokenizer.json, and the files that belong to it."""

import json
from typing import Any, Dict, Iterator, List, Mapping, NamedTuple, Tuple

from posenc_export.models.gguf.vocabulary import ARCHITECTURE, REMEDY, check
from posenc_export.shared.foreign import explained
from posenc_export.shared.refusal import refusal
from posenc_export.shared.suggestion import suggestion

# Kinds of tokens (gguf.TokenType).
NORMAL, UNKNOWN, CONTROL, USER_DEFINED = 1, 2, 3, 4
SPACE = "\u2581"  # stands for a space in vocabularies of sentencepiece
# Tokens that end a turn or a text, by the names of published chat templates and of llama.cpp, which
# ignores their types, too: files often type them as user's, and name only one stop token.
ENDS = (
    *("<|im_end|>", "<|eot_id|>", "<|eom_id|>", "<|end|>", "<end_of_turn>", "<|end_of_turn|>"),
    *("<|END_OF_TURN_TOKEN|>", "<|endoftext|>", "<|end_of_text|>", "<|return|>", "<|call|>"),
    *("</s>", "<eos>", "<EOT>", "_<EOT>", "\u2581<EOT>", "[EOT]", "[EOS]", "<end_of_utterance>"),
    *("<turn|>", "<\uff5cend\u2581of\u2581sentence\uff5c>"),  # Gemma 4, DeepSeek
)
END, HARMONY = (
    "<|end|>",
    {"<|return|>", "<|call|>"},
)  # with both, messages end, and the turn goes on
UNSTRIPPED = ("<unk>", "<s>", "<|endoftext|>")  # the others of Phi-3 take the spaces behind them
NAMED = {"bos_token": "bos", "eos_token": "eos", "unk_token": "unknown", "pad_token": "padding"}
KEY = "tokenizer.ggml."


# How byte-level vocabularies split a text, by llama.cpp's names (tokenizer.ggml.pre).
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


def files_of(values: Mapping[str, Any]) -> Dict[str, bytes]:
    """Return the files of a tokenizer by name, as transformers saves them: tokenizer.json, its
    settings, the chat template, stop tokens. Empty without a vocabulary (vocabulary_of).
    ValueError: a vocabulary of another kind than those of GPT-2 and sentencepiece;
    ModuleNotFoundError: tokenizers is not installed.
    """
    if values.get(f"{KEY}model") in (None, "none", "no_vocab"):
        return {}
    check(values)
    return {"tokenizer.json": tokenizer_of(values).to_str().encode(), **settings_of(values)}


def settings_of(values: Mapping[str, Any]) -> Dict[str, bytes]:
    """Return generation_config.json, tokenizer_config.json and chat_template.jinja."""
    tokens = values.get(f"{KEY}tokens", [])
    ids = {name: _id(values, key) for name, key in NAMED.items()}
    generation = {f"{name}_id": ids[name] for name in ("bos_token", "pad_token")}
    generation["eos_token_id"] = stop_ids(values) or None
    named = {name: tokens[index] for name, index in ids.items() if index is not None}
    whether = {f"add_{name}_token": _adds(values, name) for name in ("bos", "eos")}
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", **named, **whether}
    files = {
        "generation_config.json": _json(generation),
        "tokenizer_config.json": _json(settings),
    }
    template = values.get("tokenizer.chat_template")
    return files if template is None else {**files, "chat_template.jinja": template.encode()}


def stop_ids(values: Mapping[str, Any]) -> List[int]:
    """Return the tokens that end a text or a turn: those that the file names, and those in ENDS."""
    tokens = values.get(f"{KEY}tokens", [])
    named = [_id(values, key) for key in ("eos", "eot", "eom")]
    ends = [name for name in ENDS if name != END or not set(tokens) >= HARMONY]
    others = [index for index, token in enumerate(tokens) if token in ends]
    return list(dict.fromkeys(index for index in (*named, *others) if index is not None))


def _kinds(values: Mapping[str, Any]) -> List[int]:
    """Return the type of each token. Those that end a text or a turn are control tokens."""
    kinds = list(values.get(f"{KEY}token_type") or [NORMAL] * len(values[f"{KEY}tokens"]))
    for index in stop_ids(values):
        kinds[index] = CONTROL
    return kinds


def tokenizer_of(values: Mapping[str, Any]) -> Any:
    """Return the tokenizer that a vocabulary describes. ValueError: one of another kind, or a way
    of splitting texts that is not in splits.SPLITS.
    """
    kind, tokens = values[f"{KEY}model"], values[f"{KEY}tokens"]
    if kind not in BUILDERS:
        rule = f"{KEY}model to be {' or '.join(BUILDERS)}"
        raise refusal("gguf", rule, repr(kind), REMEDY)
    kinds = _kinds(values)
    split = values.get(f"{KEY}pre")
    if kind == "gpt2" and split not in SPLITS:
        rule, remedy = f"{KEY}pre to be one of {', '.join(SPLITS)}", suggestion(split, SPLITS)
        raise refusal("gguf", rule, f"{split!r:.80}", f"{remedy} Or {REMEDY}")
    with explained("gguf: expected a vocabulary that the tokenizers package can read", REMEDY):
        tokenizer = BUILDERS[kind](values, tokens, kinds)
        # Files do not hold the attributes of tokens. Phi-4 has a vocabulary of another kind.
        strips = values.get(ARCHITECTURE) == "phi3" and kind == "llama"
        _add_whole(tokenizer, tokens, kinds, strips)
        _add_ends(tokenizer, values, tokens)
    return tokenizer


def _byte_level(values: Mapping[str, Any], tokens: List[str], kinds: List[int]) -> Any:
    """A tokenizer that merges bytes (GPT-2)."""
    from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers

    split = SPLITS[values[f"{KEY}pre"]]
    merges = [tuple(pair.split(" ", 1)) for pair in values.get(f"{KEY}merges", [])]
    vocabulary = {token: index for index, token in enumerate(tokens)}
    tokenizer = Tokenizer(models.BPE(vocabulary, merges, ignore_merges=split.whole))
    if split.composed:
        tokenizer.normalizer = normalizers.NFC()
    parts = [pre_tokenizers.Split(Regex(pattern), "isolated") for pattern in split.patterns]
    level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([*parts, level])
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def _sentencepiece(values: Mapping[str, Any], tokens: List[str], kinds: List[int]) -> Any:
    """A tokenizer that merges characters, with bytes for unknown ones (sentencepiece)."""
    from tokenizers import Tokenizer, decoders, models, normalizers

    # Runs of spaces are user-defined tokens. They are spelled as the text has them after
    # normalization.
    spelled = [SPACE * len(token) if token and not token.strip(" ") else token for token in tokens]
    vocabulary = {token: index for index, token in enumerate(spelled)}
    pairs = list(_merges(spelled, kinds, values.get(f"{KEY}scores", []), vocabulary))
    unknown = _id(values, "unknown")
    token = None if unknown is None else spelled[unknown]
    model = models.BPE(vocabulary, pairs, unk_token=token, fuse_unk=True, byte_fallback=True)
    tokenizer = Tokenizer(model)
    prefixed = bool(values.get(f"{KEY}add_space_prefix", True))
    before: List[Any] = [normalizers.Prepend(SPACE)] if prefixed else []
    tokenizer.normalizer = normalizers.Sequence([*before, normalizers.Replace(" ", SPACE)])
    after: List[Any] = [decoders.Strip(" ", 1, 0)] if prefixed else []
    spelled_out = [decoders.Replace(SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
    tokenizer.decoder = decoders.Sequence([*spelled_out, *after])
    return tokenizer


def _merges(
    tokens: List[str], kinds: List[int], scores: List[float], vocabulary: Mapping[str, int]
) -> Iterator[Tuple[str, str]]:
    """Yield the pairs of tokens that are merged, the first first: those of user-defined tokens,
    then those of others by their scores.

    sentencepiece merges the pair whose result has the highest score, so that every way to cut a
    token in two is a pair with its score.
    """
    ranked = enumerate(zip(kinds, scores, strict=False))
    scored = [(kind, score, n) for n, (kind, score) in ranked if kind in (NORMAL, USER_DEFINED)]
    ranks = [(0, 0.0, n) if kind == USER_DEFINED else (1, -score, n) for kind, score, n in scored]
    for *_, index in sorted(ranks):
        token = tokens[index]
        for cut in range(1, len(token)):
            if token[:cut] in vocabulary and token[cut:] in vocabulary:
                yield token[:cut], token[cut:]


def _add_whole(tokenizer: Any, tokens: List[str], kinds: List[int], strips: bool) -> None:
    """Add tokens that a text holds whole: control tokens, which decoding omits, and user's. strips:
    whether they take the spaces behind them, but for UNSTRIPPED.
    """
    from tokenizers import AddedToken

    known, special, users = tokenizer.get_vocab(), [], []
    for text, kind in zip(tokens, kinds, strict=False):
        strip = strips and text not in UNSTRIPPED
        if text in known and kind in (UNKNOWN, CONTROL):
            special.append(AddedToken(text, normalized=False, rstrip=strip, special=True))
        elif text in known and kind == USER_DEFINED:
            users.append(AddedToken(text, normalized=False, rstrip=strip))
    tokenizer.add_special_tokens(special)
    tokenizer.add_tokens(users)


def _add_ends(tokenizer: Any, values: Mapping[str, Any], tokens: List[str]) -> None:
    """Put bos before a text and eos after it, where the file says so."""
    from tokenizers import processors

    bos, eos = (_id(values, name) if _adds(values, name) else None for name in ("bos", "eos"))
    if bos is None and eos is None:
        return
    before, after = ([] if index is None else [tokens[index]] for index in (bos, eos))
    second = [f"{part}:1" for part in (*before, "$B", *after)]
    used = [(tokens[index], index) for index in dict.fromkeys((bos, eos)) if index is not None]
    first = [*before, "$A", *after]
    tokenizer.post_processor = processors.TemplateProcessing(first, [*first, *second], used)


def _adds(values: Mapping[str, Any], name: str) -> bool:
    """Whether a text begins with bos or ends with eos. sentencepiece begins with bos by default."""
    split = SPLITS.get(values.get(f"{KEY}pre", ""))
    begins = values.get(f"{KEY}model") == "llama" or (split is not None and split.begins)
    return bool(values.get(f"{KEY}add_{name}_token", name == "bos" and begins))


def _id(values: Mapping[str, Any], name: str) -> Any:
    """Return the id of a special token, None if the file has none or one beyond its vocabulary."""
    index, tokens = values.get(f"{KEY}{name}_token_id"), values.get(f"{KEY}tokens", [])
    return index if isinstance(index, int) and 0 <= index < len(tokens) else None


def _json(content: Dict[str, Any]) -> bytes:
    return (json.dumps(content, indent=1, sort_keys=True) + "\n").encode()


BUILDERS = {"gpt2": _byte_level, "llama": _sentencepiece}
