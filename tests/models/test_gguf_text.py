"""Vocabularies of GGUF files give the tokens of the tokenizers that they were written from."""

import json
import re
from typing import Any, Dict, List

import pytest

pytest.importorskip("tokenizers", reason="tokenizers is not installed")
from tokenizers import (
    AddedToken,
    Regex,
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    trainers,
)  # noqa: E402

from posenc_export.models.gguf.text import (
    CONTROL,
    NORMAL,
    SPLITS,  # noqa: E402
    UNKNOWN,
    USER_DEFINED,
    files_of,
    stop_ids,
    tokenizer_of,
)  # noqa: E402
from posenc_export.models.gguf.vocabulary import vocabulary_of  # noqa: E402

TEXTS = [
    "The quick brown fox doesn't jump over 12345 lazy dogs, does it?",
    "  two spaces,\n\n    four spaces\ttab ", "def f(x):\n    return x**2  # it's HTTPServer",
    "naïve café ünïcode",
    "日本語のテキスト", "👩‍💻 emoji", "MixedCASEWords and 3.14159", "", " ", "one\r\ntwo",
    "<s>text</s>", "a<|im_end|>b <tool> c",
]  # fmt: skip
SPECIAL = ["<|endoftext|>", "<|im_end|>"]
BYTE = 6  # a token of one byte


def _byte_level(pre: Any) -> Tokenizer:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer, tokenizer.decoder = pre, decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    tokenizer.train_from_iterator(
        TEXTS * 5,
        trainers.BpeTrainer(
            vocab_size=420, special_tokens=SPECIAL, initial_alphabet=alphabet, show_progress=False
        ),
    )
    tokenizer.add_tokens([AddedToken("<tool>", normalized=False)])
    return tokenizer


def _values(made: Tokenizer, kind: str, **others: Any) -> Dict[str, Any]:
    """Return the metadata of a tokenizer."""
    content = json.loads(made.to_str())
    tokens = [token for token, _ in sorted(made.get_vocab().items(), key=lambda pair: pair[1])]
    added = {
        one["content"]: CONTROL if one["special"] else USER_DEFINED
        for one in content["added_tokens"]
    }
    kinds = [
        added.get(token, BYTE if kind == "llama" and token.startswith("<0x") else NORMAL)
        for token in tokens
    ]
    merges = [" ".join(pair) for pair in content["model"]["merges"]]
    results = {
        "model": kind,
        "tokens": tokens,
        "token_type": kinds,
        **({"merges": merges} if kind == "gpt2" else {}),
        **others,
    }
    return {f"tokenizer.ggml.{key}": value for key, value in results.items()}


def _same(found: Tokenizer, wanted: Tokenizer) -> None:
    for text in TEXTS:
        ids: List[int] = wanted.encode(text).ids
        assert found.encode(text).ids == ids
        assert found.decode(ids) == wanted.decode(ids) and found.decode(
            ids, skip_special_tokens=False
        ) == wanted.decode(ids, skip_special_tokens=False)


# The way of splitting of published tokenizers, with the parts that their tokenizer.json has.
PUBLISHED = {
    "gpt-2": pre_tokenizers.ByteLevel(add_prefix_space=False),
    "smollm": pre_tokenizers.Sequence(
        [
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False),
        ]
    ),
}


@pytest.mark.parametrize("pre", PUBLISHED)
def test_a_byte_level_vocabulary_gives_the_tokens_of_its_tokenizer(pre: str) -> None:
    wanted = _byte_level(PUBLISHED[pre])
    _same(tokenizer_of(_values(wanted, "gpt2", pre=pre)), wanted)


@pytest.mark.parametrize("pre", SPLITS)
def test_every_way_of_splitting_keeps_the_text(pre: str) -> None:
    split = SPLITS[pre]
    parts = [pre_tokenizers.Split(Regex(pattern), "isolated") for pattern in split.patterns]
    tokenizer = tokenizer_of(
        _values(
            _byte_level(
                pre_tokenizers.Sequence([*parts, pre_tokenizers.ByteLevel(False, use_regex=False)])
            ),
            "gpt2",
            pre=pre,
        )
    )
    assert [
        tokenizer.decode(tokenizer.encode(text).ids, skip_special_tokens=False) for text in TEXTS
    ] == TEXTS


def test_digits_are_split_as_the_name_says() -> None:
    alone, three = (
        tokenizer_of(_values(_byte_level(PUBLISHED["gpt-2"]), "gpt2", pre=pre))
        for pre in ("qwen2", "llama-bpe")
    )
    pieces = [
        [text for text, _ in result.pre_tokenizer.pre_tokenize_str("year 12345")]
        for result in (alone, three)
    ]
    assert pieces == [["year", "Ġ", "1", "2", "3", "4", "5"], ["year", "Ġ", "123", "45"]]


def _vocabulary() -> Dict[str, Any]:
    """Return the metadata of a vocabulary like that of Llama 2: special tokens, bytes, then
    tokens from the most frequent on, characters last.
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
    results = {
        "model": "llama",
        "tokens": tokens,
        "token_type": kinds,
        "scores": [float(min(259 - index, 0)) for index in range(len(tokens))],
        "unknown_token_id": 0,
    }
    return {
        f"tokenizer.ggml.{key}": value for key, value in {**results, "add_bos_token": False}.items()
    }


def _merged(text: str, values: Dict[str, Any]) -> List[int]:
    """Return the ids that sentencepiece gives: the pair of neighbours with the highest score
    becomes one token, the first of equal ones, until no pair is a token.
    """
    tokens, scores = values["tokenizer.ggml.tokens"], values["tokenizer.ggml.scores"]
    known = {token: index for index, token in enumerate(tokens)}
    pieces = list("\u2581" + text.replace(" ", "\u2581")) if text else []
    while True:
        ranks = [
            (-scores[known[a + b]], at)
            for at, (a, b) in enumerate(zip(pieces, pieces[1:], strict=False))
            if a + b in known
        ]
        if not ranks:
            break
        at = min(ranks)[1]
        pieces[at : at + 2] = ["".join(pieces[at : at + 2])]
    return [
        index
        for piece in pieces
        for index in ([known[piece]] if piece in known else [3 + byte for byte in piece.encode()])
    ]


def test_a_vocabulary_of_sentencepiece_gives_the_tokens_of_its_algorithm() -> None:
    values = _vocabulary()
    tokenizer = tokenizer_of(values)
    for text in TEXTS:
        if "<s>" not in text:
            assert tokenizer.encode(text).ids == _merged(text, values)
            assert tokenizer.decode(tokenizer.encode(text).ids) == text
    assert tokenizer.encode("<s>a").ids[0] == 1


def test_runs_of_spaces_that_are_tokens_are_found_whole() -> None:
    tokens = ["<unk>", "▁", "a", "▁a", "  ", "   "]
    values = {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.scores": [0.0, -9.0, -9.0, -1.0, -1000.0, -1000.0],
    }
    kinds = [UNKNOWN, *[NORMAL] * 3, USER_DEFINED, USER_DEFINED]
    tokenizer = tokenizer_of(
        {
            **values,
            "tokenizer.ggml.token_type": kinds,
            "tokenizer.ggml.add_space_prefix": False,
            "tokenizer.ggml.unknown_token_id": 0,
        }
    )
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
    kind: str, others: Dict[str, Any], ids: List[int]
) -> None:
    tokens = {
        "tokens": ["<unk>", "<s>", "</s>", "a"],
        "token_type": [2, 3, 3, 1],
        "scores": [0.0] * 4,
        "merges": [],
        "bos_token_id": 1,
        "eos_token_id": 2,
    }
    values = {
        f"tokenizer.ggml.{key}": value for key, value in {"model": kind, **tokens, **others}.items()
    }
    assert tokenizer_of(values).encode("a").ids[:-1] == ids
    assert tokenizer_of({**values, "tokenizer.ggml.add_eos_token": True}).encode("a").ids[-1] == 2
    assert tokenizer_of(values).encode("a", add_special_tokens=False).ids[:1] != [1]


def test_template_and_stop_tokens_are_taken_along() -> None:
    wanted = _byte_level(PUBLISHED["gpt-2"])
    values = _values(
        wanted, "gpt2", pre="gpt-2", eos_token_id=0, bos_token_id=0, padding_token_id=0
    )
    files = files_of({**values, "tokenizer.chat_template": "{{ messages }}"})
    assert files["chat_template.jinja"] == b"{{ messages }}"
    assert json.loads(files["generation_config.json"]) == {
        "bos_token_id": 0,
        "eos_token_id": [0, 1],
        "pad_token_id": 0,
    }
    assert json.loads(files["tokenizer_config.json"])["eos_token"] == "<|endoftext|>"
    assert files_of({}) == {}


@pytest.mark.parametrize("kind", [USER_DEFINED, NORMAL])
def test_a_token_that_ends_a_turn_stops_and_is_not_shown_whatever_its_type(kind: int) -> None:
    values = _values(_byte_level(PUBLISHED["gpt-2"]), "gpt2", pre="gpt-2", eos_token_id=0)
    values["tokenizer.ggml.token_type"][:2] = kind, kind
    files = files_of(values)
    assert json.loads(files["generation_config.json"])["eos_token_id"] == [0, 1]
    tokenizer = Tokenizer.from_buffer(files["tokenizer.json"])
    ids = tokenizer.encode("a<|im_end|>b<tool><|endoftext|>").ids
    assert ids.count(1) == ids.count(0) == 1 and tokenizer.decode(ids) == "ab<tool>"


def test_messages_within_a_turn_of_gpt_oss_do_not_stop() -> None:
    tokens = ["<|end|>", "<|return|>", "<|call|>", "<|endoftext|>"]
    values = {"tokenizer.ggml.tokens": tokens, "tokenizer.ggml.token_type": [CONTROL] * 4}
    assert stop_ids(values) == [1, 2, 3]
    assert stop_ids({"tokenizer.ggml.tokens": tokens[:2]}) == [0, 1]


def test_added_tokens_of_phi_3_take_the_spaces_behind_them() -> None:
    values, text = _vocabulary(), "<s> <|user|>\n  two spaces<|end|>\n\n<|assistant|>\n </s> a"
    added = {"<|user|>": USER_DEFINED, "<|end|>": CONTROL, "<|assistant|>": CONTROL}
    for name, new in (("tokens", added), ("token_type", added.values()), ("scores", [0.0] * 3)):
        values[f"tokenizer.ggml.{name}"] += new
    plain = tokenizer_of(values)
    phi = tokenizer_of({**values, "general.architecture": "phi3"})
    assert phi.encode(text).ids == plain.encode(re.sub(r"(\|>|</s>)\s+", r"\1", text)).ids
    assert len(phi.encode(text).ids) < len(plain.encode(text).ids)
    assert vocabulary_of({"general.architecture": "phi3"}) == {"general.architecture": "phi3"}


DAMAGED: Dict[str, Any] = {
    "no tokens": {"tokens": None},
    "tokens that are no texts": {"tokens": [1, 2]},
    "fewer types than tokens": {"token_type": [1]},
    "scores that are no numbers": {"scores": ["a", "b"]},
    "a merge that gives no token": {"merges": ["a b"]},
}


@pytest.mark.parametrize("case", DAMAGED)
def test_a_damaged_vocabulary_is_refused_in_one_line(case: str) -> None:
    given = {"model": "gpt2", "pre": "gpt-2", "tokens": ["a", "b"], "merges": [], **DAMAGED[case]}
    with pytest.raises(
        ValueError,
        match="^gguf: expected tokenizer.ggml.[a-z_]+ to be .*, got .*; put the model's "
        "tokenizer.json beside the file.*$",
    ):
        files_of(
            vocabulary_of(
                {
                    f"tokenizer.ggml.{key}": value
                    for key, value in given.items()
                    if value is not None
                }
            )
        )


def test_an_unknown_vocabulary_is_refused_with_its_remedy() -> None:
    values = {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.tokens": ["a"],
        "tokenizer.ggml.pre": "gpt-3",
    }
    for changed, got in (
        (values, "got 'gpt-3'; did you mean gpt-2"),
        ({**values, "tokenizer.ggml.model": "rwkv"}, "to be gpt2 or llama, got 'rwkv'"),
    ):
        with pytest.raises(ValueError, match=f"{got}.*tokenizer.json beside the file"):
            tokenizer_of(changed)
