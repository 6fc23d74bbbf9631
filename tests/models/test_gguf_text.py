"""Vocabularies of GGUF files give the tokens of the tokenizers that they were written from."""

import itertools
import json
import re
from typing import Any

import pytest

pytest.importorskip("tokenizers", reason="tokenizers is not installed")
pytest.importorskip("transformers", reason="transformers is not installed")
from tokenizers import (
    AddedToken,
    Regex,
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    trainers,
)

from posenc_export.models.gguf import text as vocabulary
from posenc_export.models.gguf.text import (
    CONTROL,
    NORMAL,
    UNKNOWN,
    USER_DEFINED,
    files_of,
    stop_ids,
    tokenizer_of,
)

TEXTS = [
    "The quick brown fox doesn't jump over 12345 lazy dogs, does it?",
    "  two spaces,\n\n    four spaces\ttab ", "def f(x):\n    return x**2  # it's HTTPServer",
    "naïve café ünïcode",
    "日本語のテキスト", "👩‍💻 emoji", "MixedCASEWords and 3.14159", "", " ", "one\r\ntwo",
    "I'LL DON'T cost $1,234.56; ÉCOLE École/\n", "<s>text</s>", "a<|im_end|>b <tool> c",
]  # fmt: skip
SPECIAL = ["<|endoftext|>", "<|im_end|>"]
BYTE = 6  # a token of one byte


def _byte_level(pre: Any) -> Tokenizer:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer, tokenizer.decoder = pre, decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    of = {"special_tokens": SPECIAL, "initial_alphabet": alphabet, "show_progress": False}
    tokenizer.train_from_iterator(TEXTS * 5, trainers.BpeTrainer(vocab_size=420, **of))
    tokenizer.add_tokens([AddedToken("<tool>", normalized=False)])
    return tokenizer


def _keys(made: Tokenizer, kind: str, **others: Any) -> dict[str, Any]:
    """Return the metadata of a tokenizer, without tokenizer.ggml."""
    content = json.loads(made.to_str())
    tokens = [token for token, _ in sorted(made.get_vocab().items(), key=lambda pair: pair[1])]
    added = {
        one["content"]: (USER_DEFINED, CONTROL)[one["special"]] for one in content["added_tokens"]
    }
    kinds = [added.get(token, NORMAL) for token in tokens]
    merges = [" ".join(pair) for pair in content["model"]["merges"]]
    return {"model": kind, "tokens": tokens, "token_type": kinds, "merges": merges, **others}


def _built(keys: dict[str, Any], phi3: bool = False) -> Tokenizer:
    return Tokenizer.from_buffer(tokenizer_of(keys, phi3))


def _values(keys: dict[str, Any], **others: Any) -> dict[str, Any]:
    return {f"tokenizer.ggml.{key}": value for key, value in {**keys, **others}.items()}


# The way of splitting of published tokenizers, with the parts that their tokenizer.json has.
PLAIN = pre_tokenizers.ByteLevel(add_prefix_space=False)
ALONE = pre_tokenizers.Digits(individual_digits=True)
PUBLISHED = {"gpt-2": PLAIN, "smollm": pre_tokenizers.Sequence([ALONE, PLAIN])}


@pytest.mark.parametrize("pre", PUBLISHED)
def test_a_byte_level_vocabulary_gives_the_tokens_of_its_tokenizer(pre: str) -> None:
    wanted = _byte_level(PUBLISHED[pre])
    found = _built(_keys(wanted, "gpt2", pre=pre))
    for text in TEXTS:
        ids: list[int] = wanted.encode(text).ids
        assert found.encode(text).ids == ids and found.decode(ids) == wanted.decode(ids)
        both = (one.decode(ids, skip_special_tokens=False) for one in (found, wanted))
        assert len(set(both)) == 1


@pytest.mark.parametrize("pre", [*vocabulary.AS_GPT2, *vocabulary.DIGITS, *vocabulary.PATTERNS])
def test_every_way_of_splitting_keeps_the_text(pre: str) -> None:
    tokenizer = _built(_keys(_byte_level(PLAIN), "gpt2", pre=pre, add_bos_token=False))
    ids = [tokenizer.encode(text).ids for text in TEXTS]
    assert [tokenizer.decode(one, skip_special_tokens=False) for one in ids] == TEXTS


def test_patterns_are_those_of_transformers() -> None:
    mapping = pytest.importorskip("transformers.integrations.gguf.gguf_tokenizer_mapping")
    theirs = mapping.GGUF_PRE_TOKENIZER_SPLITS
    shared = {*theirs} & {*vocabulary.PATTERNS}
    assert len(shared) > 8
    for name in shared:
        patterns = (vocabulary.PATTERNS[name], theirs[name])
        ours, wanted = (pre_tokenizers.Split(Regex(one), "isolated") for one in patterns)
        for text in TEXTS:
            assert ours.pre_tokenize_str(text) == wanted.pre_tokenize_str(text)


PIECES = {
    **{name: ["year", "Ġ", *"12345"] for name in ("smollm", "qwen2", "stablelm2", "tekken")},
    "gpt-2": ["year", "Ġ12345"],
    "llama-bpe": ["year", "Ġ", "123", "45"],
}


@pytest.mark.parametrize("pre", PIECES)
def test_digits_are_split_as_the_name_says(pre: str) -> None:
    result = _built(_keys(_byte_level(PLAIN), "gpt2", pre=pre)).pre_tokenizer
    assert [text for text, _ in result.pre_tokenize_str("year 12345")] == PIECES[pre]


def test_the_vocabulary_of_qwen_composes_characters_and_that_of_llama_takes_whole_tokens() -> None:
    keys = _keys(_byte_level(PLAIN), "gpt2", pre="qwen2")
    qwen, stable = (_built({**keys, "pre": pre}) for pre in ("qwen2", "stablelm2"))
    assert qwen.encode("cafe\u0301").ids == qwen.encode("café").ids
    assert stable.encode("cafe\u0301").ids != stable.encode("café").ids
    keys["tokens"], keys["token_type"] = keys["tokens"] + ["zq"], keys["token_type"] + [NORMAL]
    whole, merged = (_built({**keys, "pre": pre}).encode("zq").ids for pre in ("llama3", "qwen2"))
    assert whole == [len(keys["tokens"]) - 1] and len(merged) == 2


def _vocabulary() -> dict[str, Any]:
    """Return the keys of a vocabulary like that of Llama 2: special tokens, bytes, then tokens from
    the most frequent on, characters last.
    """
    trained = Tokenizer(models.BPE())
    trained.normalizer = normalizers.Replace(" ", "\u2581")
    trained.train_from_iterator(
        [text for text in TEXTS if text.isascii() and "<" not in text] * 5,
        trainers.BpeTrainer(vocab_size=200, show_progress=False),
    )
    model = json.loads(trained.to_str())["model"]
    merged = list(dict.fromkeys("".join(pair) for pair in model["merges"]))
    tokens = [
        "<unk>",
        "<s>",
        "</s>",
        *(f"<0x{byte:02X}>" for byte in range(256)),
        *merged,
        *sorted(set(model["vocab"]) - set(merged)),
    ]
    kinds = [UNKNOWN, CONTROL, CONTROL, *[BYTE] * 256, *[NORMAL] * (len(tokens) - 259)]
    scores = [float(min(259 - index, 0)) for index in range(len(tokens))]
    own = {"tokens": tokens, "token_type": kinds, "scores": scores, "unknown_token_id": 0}
    return {"model": "llama", **own, "add_bos_token": False}


def _merged(text: str, values: dict[str, Any]) -> list[int]:
    """Return the ids that sentencepiece gives: the pair of neighbours with the highest score
    becomes one token, the first of equal ones, until no pair is a token.
    """
    tokens, scores = values["tokens"], values["scores"]
    known = {token: index for index, token in enumerate(tokens)}
    pieces = list("\u2581" + text.replace(" ", "\u2581")) if text else []
    while True:
        pairs = [(a + b, at) for at, (a, b) in enumerate(itertools.pairwise(pieces))]
        ranks = [(-scores[known[pair]], at) for pair, at in pairs if pair in known]
        if not ranks:
            break
        at = min(ranks)[1]
        pieces[at : at + 2] = ["".join(pieces[at : at + 2])]
    ids = ([known[p]] if p in known else [3 + byte for byte in p.encode()] for p in pieces)
    return [index for one in ids for index in one]


def test_a_vocabulary_of_sentencepiece_gives_the_tokens_of_its_algorithm() -> None:
    keys = _vocabulary()
    tokenizer = _built(keys)
    for text in TEXTS:
        if "<s>" not in text:
            assert tokenizer.encode(text).ids == _merged(text, keys)
            assert tokenizer.decode(tokenizer.encode(text).ids) == text
    assert tokenizer.encode("<s>a").ids[0] == 1


def test_runs_of_spaces_that_are_tokens_are_found_whole() -> None:
    keys = {
        "model": "llama",
        "tokens": ["<unk>", "▁", "a", "▁a", "  ", "   "],
        "scores": [0.0, -9.0, -9.0, -1.0, -1000.0, -1000.0],
        "token_type": [UNKNOWN, *[NORMAL] * 3, USER_DEFINED, USER_DEFINED],
        "add_space_prefix": False,
        "unknown_token_id": 0,
    }
    tokenizer = _built(keys)
    assert tokenizer.encode("a a   a").ids == [2, 3, 5, 2]
    assert tokenizer.decode([2, 3, 5, 2]) == "a a   a"


BEGINNINGS = [
    ("llama", {}, [1]),
    ("gpt2", {"pre": "gpt-2"}, []),
    ("gpt2", {"pre": "llama-bpe"}, [1]),
    ("llama", {"add_bos_token": False}, []),
]


@pytest.mark.parametrize(("kind", "others", "ids"), BEGINNINGS)
def test_a_text_begins_with_bos_where_llama_cpp_begins_it_so(
    kind: str, others: dict[str, Any], ids: list[int]
) -> None:
    tokens = {"tokens": ["<unk>", "<s>", "</s>", "a"], "token_type": [2, 3, 3, 1]}
    of = {"scores": [0.0] * 4, "merges": [], "bos_token_id": 1, "eos_token_id": 2}
    keys = {"model": kind, **tokens, **of, **others}
    assert _built(keys).encode("a").ids[:-1] == ids
    assert _built({**keys, "add_eos_token": True}).encode("a").ids[-1] == 2
    assert _built(keys).encode("a", add_special_tokens=False).ids[:1] != [1]


@pytest.mark.parametrize("kind", [CONTROL, USER_DEFINED, NORMAL])
def test_template_and_tokens_that_end_a_turn_are_taken_along_whatever_their_type(kind: int) -> None:
    ids = {"eos_token_id": 0, "bos_token_id": 0, "padding_token_id": 0}
    values = _values(_keys(_byte_level(PLAIN), "gpt2", pre="gpt-2"), **ids)
    values["tokenizer.ggml.token_type"][:2] = kind, kind
    files = files_of({**values, "tokenizer.chat_template": "{{ messages }}"})
    assert files["chat_template.jinja"] == b"{{ messages }}"
    names = ("generation", "tokenizer")
    generation, settings = (json.loads(files[f"{name}_config.json"]) for name in names)
    assert generation == {"bos_token_id": 0, "eos_token_id": [0, 1], "pad_token_id": 0}
    assert settings["eos_token"] == "<|endoftext|>" and settings["add_bos_token"] is False
    tokenizer = Tokenizer.from_buffer(files["tokenizer.json"])
    found = tokenizer.encode("a<|im_end|>b<tool><|endoftext|>").ids
    assert found.count(1) == found.count(0) == 1 and tokenizer.decode(found) == "ab<tool>"
    assert files_of({}) == {} and files_of(values, b"{}")["tokenizer.json"] == b"{}"


def test_messages_within_a_turn_of_gpt_oss_do_not_stop() -> None:
    tokens = ["<|end|>", "<|return|>", "<|call|>", "<|endoftext|>"]
    assert stop_ids({"tokens": tokens}) == [1, 2, 3]
    assert stop_ids({"tokens": tokens[:2]}) == [0, 1]


def test_added_tokens_of_phi_3_take_the_spaces_behind_them() -> None:
    keys, text = _vocabulary(), "<s> <|user|>\n  two spaces<|end|>\n\n<|assistant|>\n </s> a"
    added = {"<|user|>": USER_DEFINED, "<|end|>": CONTROL, "<|assistant|>": CONTROL}
    for name, new in (("tokens", added), ("token_type", added.values()), ("scores", [0.0] * 3)):
        keys[name] += new
    plain, phi = _built(keys), _built(keys, phi3=True)
    assert phi.encode(text).ids == plain.encode(re.sub(r"(\|>|</s>)\s+", r"\1", text)).ids
    assert len(phi.encode(text).ids) < len(plain.encode(text).ids)


DAMAGED: dict[str, Any] = {
    "no tokens": {"tokens": None},
    "tokens that are no texts": {"tokens": [1, 2]},
    "fewer types than tokens": {"token_type": [1]},
    "a merge that gives no token": {"merges": ["a b"]},
    "a merge of what clears a terminal": {"merges": ["a \x1b[2J"]},
    "scores that are no numbers": {"model": "llama", "scores": ["a", "b"]},
    "an unknown way of splitting": {"pre": "gpt-3"},
    "an unknown kind": {"model": "rwkv"},
}


@pytest.mark.parametrize("case", DAMAGED)
def test_a_damaged_or_unknown_vocabulary_is_refused_in_one_line(case: str) -> None:
    given = {"model": "gpt2", "pre": "gpt-2", "tokens": ["a", "b"], "merges": [], **DAMAGED[case]}
    message = r"^gguf: expected .*tokenizer.ggml.*, got .* put the model's tokenizer.json beside.*$"
    with pytest.raises(ValueError, match=message) as refused:
        files_of(_values({key: value for key, value in given.items() if value is not None}))
    assert str(refused.value).isprintable()
