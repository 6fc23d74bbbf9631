"""Text of a row, piece by piece: never a part of a character, and nothing is lost."""

import threading
import time
from pathlib import Path
from typing import Any, List

import numpy as np
import pytest

from posenc_export.runtime.artefact.tokenizer import REPLACEMENT, ByteCodec, Codec, TokenizerCodec

tokenizers = pytest.importorskip("tokenizers")
TEXT = "Zoë 🎉👩‍👩‍👧 café — naïve 東京 \n"


def _byte_level() -> Any:
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    made = Tokenizer(models.BPE({letter: index for index, letter in enumerate(alphabet)}, []))
    made.pre_tokenizer, made.decoder = (
        pre_tokenizers.ByteLevel(add_prefix_space=False),
        decoders.ByteLevel(),
    )
    return made


def _byte_fallback() -> Any:
    """A tokenizer of few letters, with a token for each byte of others, as sentencepiece makes them."""
    from tokenizers import Tokenizer, decoders, models, normalizers

    letters = {letter: 256 + index for index, letter in enumerate("▁Zoabcfé")}
    made = Tokenizer(
        models.BPE(
            {**{f"<0x{byte:02X}>": byte for byte in range(256)}, **letters}, [], byte_fallback=True
        )
    )
    made.normalizer = normalizers.Sequence(
        [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
    )
    made.decoder = decoders.Sequence(
        [
            decoders.Replace("▁", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
    made.add_special_tokens(["<s>"])
    return made


MADE = {
    "bytes of GPT-2": _byte_level,
    "bytes for unknown letters": _byte_fallback,
    "no tokenizer": None,
}


@pytest.fixture(params=MADE)
def codec(request: pytest.FixtureRequest, tmp_path: Path) -> Codec:
    if MADE[request.param] is None:
        return ByteCodec()
    (tmp_path / "tokenizer.json").write_text(MADE[request.param]().to_str())
    return TokenizerCodec(tmp_path)


def _pieces(codec: Codec, prompt: List[int], tokens: List[int]) -> List[str]:
    pieces = codec.pieces(prompt)
    return [*(pieces.push(token) for token in tokens), pieces.rest()]


@pytest.mark.parametrize("cut", range(12))
def test_pieces_are_whole_characters_and_together_the_text(cut: int, codec: Codec) -> None:
    tokens = codec.encode(TEXT)
    found = _pieces(codec, tokens[:cut], tokens[cut:])
    assert "".join(_pieces(codec, [], tokens)) == TEXT
    assert (
        not any(REPLACEMENT in piece for piece in found)
        and TEXT.endswith("".join(found))
        and len("".join(found)) >= len(TEXT) - cut
    )


def test_a_long_text_is_encoded_without_keeping_other_threads_waiting(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_text(_byte_level().to_str())
    codec, ended, turns = TokenizerCodec(tmp_path), threading.Event(), []
    codec.encode(TEXT)
    other = threading.Thread(
        target=lambda: [
            turns.append(time.perf_counter()) for _ in iter(lambda: ended.wait(0.001), True)
        ]
    )
    other.start()
    begun = time.perf_counter()
    codec.encode(TEXT * 20_000)
    until = time.perf_counter()
    ended.set()
    other.join()
    assert sum(begun < turn < until for turn in turns) > 20


def test_a_text_that_ends_within_a_character_shows_it_at_the_end(codec: Codec) -> None:
    tokens = codec.encode("a🎉")
    found = _pieces(codec, [], tokens[:-1])
    assert found[-1].strip(REPLACEMENT) == "" and found[-1] and "".join(found[:-1]) == "a"


def test_bytes_that_are_no_characters_do_not_end_the_row(codec: Codec) -> None:
    first, letter = codec.encode("é🎉"), codec.encode("a")[-1:]
    broken = [*first[:-1], *letter, *codec.encode("🎉")[-4:-1], *letter, *letter]
    found = "".join(_pieces(codec, [], broken))
    assert found.endswith("aa") and REPLACEMENT in found


def test_pieces_of_random_bytes_are_the_text_of_all_of_them() -> None:
    codec = ByteCodec()
    tokens = np.random.default_rng(0).integers(0, 256, 400).tolist()
    assert "".join(_pieces(codec, [], tokens)) == bytes(tokens).decode(errors="replace")


def test_special_tokens_give_no_text_but_have_a_spelling(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_text(_byte_fallback().to_str())
    codec = TokenizerCodec(tmp_path)
    special = codec.encode("<s>", special=False)[-1]
    assert (
        codec.is_special(special)
        and codec.spelled(special) == "<s>"
        and _pieces(codec, codec.encode("a"), [special]) == ["", ""]
    )
