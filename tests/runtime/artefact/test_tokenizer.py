"""Token ids of whole texts, and text of a row, piece by piece: never a part of a character, and
nothing is lost.
"""

import json
import threading
import time
from pathlib import Path
from typing import Any, Iterable

import numpy as np
import pytest

from posenc_export.runtime.artefact.tokenizer import REPLACEMENT, ByteCodec, Codec, TokenizerCodec

tokenizers = pytest.importorskip("tokenizers")
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers  # noqa: E402

TEXT = "Zoë 🎉👩‍👩‍👧 café — naïve 東京 \n"


def _numbered(words: Iterable[str]) -> dict[str, int]:
    return {word: index for index, word in enumerate(words)}


def byte_level() -> Any:
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(_numbered(alphabet), []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def _byte_fallback() -> Any:
    """A tokenizer of few letters, with a token for each byte of others, as sentencepiece makes
    them.
    """
    words = _numbered([*(f"<0x{byte:02X}>" for byte in range(256)), *"▁Zoabcfé"])
    tokenizer = Tokenizer(models.BPE(words, [], byte_fallback=True))
    spaces = [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
    tokenizer.normalizer = normalizers.Sequence(spaces)
    joined = [decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    tokenizer.decoder = decoders.Sequence([decoders.Replace("▁", " "), *joined])
    tokenizer.add_special_tokens(["<s>"])
    return tokenizer


def _merged_bytes() -> Any:
    """A tokenizer of bytes with tokens that hold parts of two characters."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    # The last byte of a letter of two bytes with the first byte of the next, and "a" with one.
    pairs = [(last, "Ã") for last in ("©", "¶")] + [("a", "Ã"), ("a", "b"), ("ab", "ab")]
    letters = [*alphabet, *(first + second for first, second in pairs)]
    tokenizer = Tokenizer(models.BPE(_numbered(letters), pairs))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def _metaspace() -> Any:
    """A tokenizer whose decoder drops the space before the first word."""
    letters = ["?", *"▁abcö🎉", "\u200d", "ab", "▁a"]
    merges = [("a", "b"), ("▁", "a")]
    tokenizer = Tokenizer(models.BPE(_numbered(letters), merges, unk_token="?"))
    tokenizer.pre_tokenizer, tokenizer.decoder = pre_tokenizers.Metaspace(), decoders.Metaspace()
    return tokenizer


def _word_pieces() -> Any:
    """A tokenizer whose decoder puts a space between words."""
    words = ["?", "a", "ö", "##b", "##c", "🎉"]
    tokenizer = Tokenizer(models.WordPiece(_numbered(words), unk_token="?"))
    tokenizer.pre_tokenizer, tokenizer.decoder = pre_tokenizers.Whitespace(), decoders.WordPiece()
    return tokenizer


# Where the text of each tokenizer comes back as it was, and where only its tokens are decoded.
DECODED = {
    "parts of two characters": _merged_bytes,
    "a space before words": _metaspace,
    "parts of words": _word_pieces,
}
MADE = {
    "bytes of GPT-2": byte_level,
    "bytes for unknown letters": _byte_fallback,
    "no tokenizer": None,
}


@pytest.fixture(params=MADE)
def codec(request: pytest.FixtureRequest, tmp_path: Path) -> Codec:
    if MADE[request.param] is None:
        return ByteCodec()
    (tmp_path / "tokenizer.json").write_text(MADE[request.param]().to_str())
    return TokenizerCodec(tmp_path)


def _pieces(codec: Codec, prompt: list[int], tokens: list[int]) -> list[str]:
    pieces = codec.pieces(prompt)
    return [*(pieces.push(token) for token in tokens), pieces.rest()]


@pytest.mark.parametrize("cut", range(12))
def test_pieces_are_whole_characters_and_together_the_text(cut: int, codec: Codec) -> None:
    tokens = codec.encode(TEXT)
    result = "".join(_pieces(codec, tokens[:cut], tokens[cut:]))
    assert "".join(_pieces(codec, [], tokens)) == TEXT
    assert REPLACEMENT not in result
    assert TEXT.endswith(result) and len(result) >= len(TEXT) - cut


def test_a_long_text_is_encoded_without_keeping_other_threads_waiting(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_text(byte_level().to_str())
    codec, ended, turns = TokenizerCodec(tmp_path), threading.Event(), []
    codec.encode(TEXT)

    def watch() -> None:
        while not ended.wait(0.001):
            turns.append(time.perf_counter())

    other = threading.Thread(target=watch)
    other.start()
    begun = time.perf_counter()
    codec.encode(TEXT * 20_000)
    until = time.perf_counter()
    ended.set()
    other.join()
    assert sum(begun < turn < until for turn in turns) > 20


def test_a_text_that_ends_within_a_character_shows_it_at_the_end(codec: Codec) -> None:
    tokens = codec.encode("a🎉")
    result = _pieces(codec, [], tokens[:-1])
    assert result[-1].strip(REPLACEMENT) == "" and result[-1] and "".join(result[:-1]) == "a"


def test_bytes_that_are_no_characters_do_not_end_the_row(codec: Codec) -> None:
    first, letter = codec.encode("é🎉"), codec.encode("a")[-1:]
    broken = [*first[:-1], *letter, *codec.encode("🎉")[-4:-1], *letter, *letter]
    result = "".join(_pieces(codec, [], broken))
    assert result.endswith("aa") and REPLACEMENT in result


def test_pieces_of_random_bytes_are_the_text_of_all_of_them() -> None:
    codec = ByteCodec()
    tokens = np.random.default_rng(0).integers(0, 256, 400).tolist()
    assert "".join(_pieces(codec, [], tokens)) == bytes(tokens).decode(errors="replace")


def test_special_tokens_give_no_text_but_have_a_spelling(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_text(_byte_fallback().to_str())
    codec = TokenizerCodec(tmp_path)
    special = codec.encode("<s>", special=False)[-1]
    assert codec.is_special(special) and codec.bytes_of(special) == b"<s>"
    assert _pieces(codec, codec.encode("a"), [special]) == ["", ""]


def _saved(tokenizer: Any, folder: Path) -> TokenizerCodec:
    (folder / "tokenizer.json").write_text(tokenizer.to_str())
    return TokenizerCodec(folder)


@pytest.mark.parametrize("keys", [
    {"truncation": {"max_length": 3, "strategy": "LongestFirst", "stride": 0}},
    {"truncation": {"max_length": 3, "strategy": "LongestFirst", "stride": 100_000_000}},
    {"padding": {"strategy": {"Fixed": 100_000}, "pad_to_multiple_of": None, "pad_id": 0,
        "pad_type_id": 0, "pad_token": "a"}},
], ids=["truncation", "stride", "padding"])  # fmt: skip
def test_settings_of_a_training_script_neither_cut_nor_pad_a_text(
    keys: dict[str, Any], tmp_path: Path
) -> None:
    tokenizer = byte_level()
    expected = tokenizer.encode(TEXT).ids
    content = json.loads(tokenizer.to_str())
    for settings in keys.values():
        settings["direction"] = "Right"
    (tmp_path / "tokenizer.json").write_text(json.dumps({**content, **keys}))
    assert TokenizerCodec(tmp_path).encode(TEXT) == expected


@pytest.mark.parametrize("direction", ["Left", "Right"])
def test_a_text_is_cut_at_the_end_that_the_settings_name(direction: str, tmp_path: Path) -> None:
    content, ids = json.loads(byte_level().to_str()), byte_level().encode(TEXT).ids
    cut = {"max_length": 3, "strategy": "LongestFirst", "stride": 0, "direction": direction}
    (tmp_path / "tokenizer.json").write_text(json.dumps({**content, "truncation": cut}))
    for most, length in ((5, 3), (2, 2)):
        codec = TokenizerCodec(tmp_path, most)
        assert codec.encode(TEXT) == (ids[-length:] if direction == "Left" else ids[:length])
        assert codec.most == length


@pytest.mark.parametrize("length", [1, 5, 40])
@pytest.mark.parametrize("name", ["bytes of GPT-2", *DECODED])
def test_pieces_of_random_tokens_are_the_text_of_all_of_them(
    name: str, length: int, tmp_path: Path
) -> None:
    codec = _saved({**MADE, **DECODED}[name](), tmp_path)  # type: ignore[misc]
    size, random = codec.tokenizer.get_vocab_size(), np.random.default_rng(length)
    for tokens in random.integers(0, size, (60, length)).tolist():
        assert "".join(_pieces(codec, [], tokens)) == codec.tokenizer.decode(tokens)


@pytest.mark.parametrize("name", [*MADE, *DECODED])
def test_pieces_do_not_depend_on_what_of_the_row_is_the_prompt(name: str, tmp_path: Path) -> None:
    result = {**MADE, **DECODED}[name]
    codec = ByteCodec() if result is None else _saved(result(), tmp_path)
    size = 256 if result is None else codec.tokenizer.get_vocab_size()
    random = np.random.default_rng(0)
    texts = ["東京" * 20, "é" * 30, "🎉👩‍👩‍👧" * 6, "Zoë, a b"]
    rows = [codec.encode(text) for text in texts]
    if name != "bytes for unknown letters":
        rows += random.integers(0, size, (40, 40)).tolist()
    for row in rows:
        whole = _pieces(codec, [], row)
        for cut in range(len(row)):
            assert "".join(_pieces(codec, row[:cut], row[cut:])) == "".join(whole[cut:])


@pytest.mark.parametrize("cut", range(61))
def test_special_tokens_between_the_bytes_of_a_character_do_not_end_it(
    cut: int, tmp_path: Path
) -> None:
    codec = _saved(_byte_fallback(), tmp_path)
    special = SILENT["special"]
    row = [token for byte in "東".encode() for token in (*[special] * 20, byte)]
    assert "".join(_pieces(codec, row[:cut], row[cut:])) == "東"


def test_an_invalid_byte_does_not_change_what_was_shown_of_its_run(tmp_path: Path) -> None:
    codec = _saved(_byte_fallback(), tmp_path)
    run = [*"日本".encode(), 0xFF, *"日".encode()]
    letter = codec.encode("a")[-1]
    pieces = _pieces(codec, [], [*run, letter, letter])
    assert "".join(pieces) == "日本" + REPLACEMENT * 4 + "aa"


def test_a_text_that_the_tokenizer_cannot_encode_is_refused_in_one_line(tmp_path: Path) -> None:
    codec = _saved(Tokenizer(models.WordLevel({"a": 0}, unk_token="?")), tmp_path)
    with pytest.raises(ValueError, match=r"^text: expected a text .* can encode, got [^\n]*$"):
        codec.encode("b")


def test_an_id_that_no_tokenizer_has_is_refused_in_one_line(tmp_path: Path) -> None:
    codec = _saved(_byte_fallback(), tmp_path)
    with pytest.raises(ValueError, match=r"^text: expected token ids .* can decode, got [^\n]*$"):
        codec.bytes_of(-1)


WORD = {"type": "WordLevel", "vocab": {"a": 0}, "unk_token": "a"}
PANICS: dict[str, dict[str, Any]] = {
    "while the file is read":
        {"normalizer": {"type": "Precompiled", "precompiled_charsmap": "AAAA"}},
    "while a text is normalized":
        {"normalizer": {"type": "Precompiled", "precompiled_charsmap": "BAAAAAEAAAAA"}},
    "while a text is split": {"pre_tokenizer": {"type": "FixedLength", "length": 0}},
    "while special tokens are added": {"post_processor": {"type": "TemplateProcessing",
        "single": [{"SpecialToken": {"id": "b", "type_id": 0}}], "pair": [], "special_tokens": {}}},
    "while ids are decoded": {"decoder": {"type": "Strip", "content": "a", "start": 3, "stop": 5}},
    "that ends the process": {"model": {"type": "BPE", "vocab": {"a": 0, "é": 1},
        "merges": [["a", "é"]], "continuing_subword_prefix": "#"}},
}  # fmt: skip


@pytest.mark.parametrize("panic", PANICS)
def test_a_panic_of_the_tokenizers_library_is_a_refusal_in_one_line(
    panic: str, tmp_path: Path
) -> None:
    content = {"added_tokens": [], "model": WORD, **PANICS[panic]}
    (tmp_path / "tokenizer.json").write_text(json.dumps(content))
    with pytest.raises(ValueError, match=r"\Atext: expected [^\n]*, got an error [^\n]*\Z"):
        codec = TokenizerCodec(tmp_path)
        codec.bytes_of(codec.encode("a")[0])


SILENT = {"special": 264, "outside the vocabulary": 5000, "no character": 0x80}


@pytest.mark.parametrize("kind", SILENT)
def test_no_call_decodes_more_than_a_few_tokens_while_tokens_give_no_text(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    codec = _saved(_byte_fallback(), tmp_path)
    counts: list[int] = []

    class Counting:
        def __getattr__(self, name: str) -> Any:
            return getattr(tokenizer, name)

        def decode(self, tokens: list[int], **how: bool) -> str:
            counts.append(len(tokens))
            return str(tokenizer.decode(tokens, **how))

    tokenizer = codec.tokenizer
    monkeypatch.setattr(codec, "tokenizer", Counting())
    letter = tokenizer.encode("a").ids[-1]
    tokens = [letter, *[SILENT[kind]] * 500, letter]
    assert "".join(_pieces(codec, [], tokens)) == tokenizer.decode(tokens)
    assert max(counts) < 20
