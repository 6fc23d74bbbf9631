"""Damaged and hostile GGUF files are read or refused in one line, without much memory or time."""

import random
import re
import struct
import tracemalloc
from pathlib import Path
from typing import Any, Callable

import numpy as np
import pytest

pytest.importorskip("gguf", reason="gguf is not installed")
pytest.importorskip("transformers", reason="transformers is not installed")

from posenc_export.models.gguf.checkpoint import GGUFCheckpoint
from posenc_export.models.gguf.file import read_gguf
from posenc_export.models.pretrained import from_pretrained
from tests.models import gguf_bytes, gguf_files
from tests.models.gguf_bytes import ARRAY, BOOL, F32, I32, TEXT, U8, U32, U64

Q4_0 = 2
NUMBERS = struct.pack("<64f", *range(64))
TENSORS: dict[str, Any] = {
    "beyond 64 bits": ((8,), 0, 2**64 - 64),
    "beyond the end": ((8,), 0, 256),
    "partly beyond the end": ((16,), 0, 224),
    "of more numbers than 64 bits count": ((2**33, 2**33), 0, 0),
    "of an empty axis": ((8, 0), 0, 0),
    "without axes": ((), 0, 0),
    "of parts of blocks": ((33,), Q4_0, 0),
    "of an unknown type": ((8,), 999, 0),
}


def _refusal(path: Path, content: bytes) -> str:
    path.write_bytes(content)
    with pytest.raises(ValueError, match=r"^gguf m.gguf: expected a complete GGUF file of version "
        r"2 or 3, got an error \([^\n]*\); download it again$") as refused:  # fmt: skip
        read_gguf(path)
    return str(refused.value)


@pytest.mark.parametrize("case", TENSORS)
def test_a_file_with_a_wrong_tensor_is_refused(case: str, tmp_path: Path) -> None:
    _refusal(tmp_path / "m.gguf", gguf_bytes.file([], [("a", *TENSORS[case])], NUMBERS))


VALUES: dict[str, Any] = {
    "an array of arrays": (ARRAY, (ARRAY, [(U32, [1])])),
    "an array of an unknown type": struct.pack("<IIQ", ARRAY, 99, 1) + b"\0" * 8,
    "an unknown type": struct.pack("<I", 99),
    "more numbers than bytes": struct.pack("<IIQ", ARRAY, U32, 2**62),
    "texts without end": struct.pack("<IIQ", ARRAY, TEXT, 2**62),
    "a text that is not Unicode": (TEXT, b"\xff"),
}
FORMATS: dict[str, bytes] = {
    "nothing": b"",
    "another magic": b"GGML" + gguf_bytes.llama()[4:],
    "the first version": b"GGUF\1\0\0\0" + gguf_bytes.llama()[8:],
    "the other order of bytes": b"GGUF\0\0\0\3" + gguf_bytes.llama()[8:],
    "too many tensors": gguf_bytes.llama()[:8] + b"\xff" * 8 + gguf_bytes.llama()[16:],
    "too many keys": gguf_bytes.llama()[:16] + b"\xff" * 8 + gguf_bytes.llama()[24:],
    "a name in two lines": gguf_bytes.file([], [("a\nb", (8,), 0, 0)], NUMBERS),
    "an alignment of 0": gguf_bytes.llama({"general.alignment": (U32, 0)}),
    "an alignment that is no number": gguf_bytes.llama({"general.alignment": (TEXT, b"32")}),
    **{case: gguf_bytes.llama({"general.name": value}) for case, value in VALUES.items()},
}


@pytest.mark.parametrize("case", FORMATS)
def test_a_file_of_another_format_is_refused(case: str, tmp_path: Path) -> None:
    _refusal(tmp_path / "m.gguf", FORMATS[case])


def test_a_file_that_ends_early_is_refused(tmp_path: Path) -> None:
    content = gguf_bytes.llama()
    for length in (*range(0, len(content) - 1, 13), len(content) - 1):
        _refusal(tmp_path / "m.gguf", content[:length])


def test_tensors_are_where_the_file_says(tmp_path: Path) -> None:
    tensors = [("b", (4, 2), 0, 64), ("a", (16,), 0, 0)]
    pairs = [gguf_bytes.pair("general.alignment", (U32, 64))]
    content = gguf_bytes.file(pairs, tensors, NUMBERS, alignment=64)
    (tmp_path / "m.gguf").write_bytes(content)
    held = read_gguf(tmp_path / "m.gguf").tensors
    assert np.array_equal(held["b"].numbers(), np.arange(16.0, 24.0).reshape(2, 4))
    assert np.array_equal(held["a"].numbers(), np.arange(16.0))


def test_a_matrix_with_exchanged_axes_is_refused(tmp_path: Path) -> None:
    gguf_files.write("llama", gguf_files.made("llama"), tmp_path / "m.gguf")
    content, name = (tmp_path / "m.gguf").read_bytes(), b"blk.0.ffn_down.weight"
    at = content.index(name) + len(name) + 4
    exchanged = content[:at] + struct.pack("<2Q", 64, 96) + content[at + 16 :]
    (tmp_path / "m.gguf").write_bytes(exchanged)
    said = r"blk.0.ffn_down.weight with sizes \[64, 96\] by the metadata, got \[96, 64\]"
    with pytest.raises(ValueError, match=said):
        from_pretrained(tmp_path / "m.gguf")


def test_an_array_of_numbers_costs_no_memory(tmp_path: Path) -> None:
    values = {"general.name": struct.pack("<IIQ", ARRAY, U8, 100_000) + bytes(100_000)}
    (tmp_path / "m.gguf").write_bytes(gguf_bytes.llama(values))
    read_gguf(tmp_path / "m.gguf")  # imports
    tracemalloc.start()
    file = read_gguf(tmp_path / "m.gguf")
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert len(file.values["general.name"]) == 100_000 and peak < 50_000


SOME = [
    *((U32, number) for number in (0, 1, 3, 2**16, 2**32 - 1)),
    *((I32, number) for number in (-1, -(2**31))),
    *((U64, number) for number in (5, 2**63, 2**64 - 1)),
    *((F32, number) for number in (0.0, -1.0, 0.5, 1e30, float("nan"), float("inf"))),
    *((BOOL, flag) for flag in (0, 1, 2)),
    *((TEXT, word) for word in (b"", b"x", b"a\nb", b"\xff", b"none", b"linear", b"llama", b"{%")),
    *((ARRAY, (U32, numbers)) for numbers in ([], [1, 2, 3], [2, 2], [0])),
    *((ARRAY, (kind, entries)) for kind, entries in ((TEXT, [b"a", b"b\n"]), (F32, [1.0, 2.0]))),
    (ARRAY, (ARRAY, [(U32, [])])),
]  # values of any type


def _open(path: Path) -> None:
    """Read metadata and vocabulary; `files` reads the latter."""
    dict(GGUFCheckpoint(path).files)


def _succeeds_or_refuses_in_one_line(path: Path, call: Callable[[Path], Any]) -> None:
    try:
        call(path)
    except ValueError as error:
        assert re.fullmatch(r"[^\n]*: expected [^\n]*", str(error)), repr(str(error))


@pytest.mark.parametrize("key", (*gguf_bytes.LLAMA, "split.count", "general.type"))
def test_any_value_of_a_key_is_read_or_refused_in_one_line(key: str, tmp_path: Path) -> None:
    for value in SOME:
        (tmp_path / "m.gguf").write_bytes(gguf_bytes.llama({key: value}))
        _succeeds_or_refuses_in_one_line(tmp_path / "m.gguf", _open)


@pytest.mark.parametrize(
    "count", [400, pytest.param(None, marks=pytest.mark.exhaustive)], ids=["sample", "all"]
)
def test_a_header_with_one_bit_changed_is_read_or_refused_in_one_line(
    count: Any, tmp_path: Path
) -> None:
    whole, path = gguf_bytes.llama(), tmp_path / "m.gguf"
    _succeeds_or_refuses_in_one_line(path, _open)  # imports
    bits = range(8 * (len(whole) - len(gguf_bytes.DATA)))
    tracemalloc.start()
    for bit in random.Random(0).sample(bits, min(count or len(bits), len(bits))):
        changed = bytearray(whole)
        changed[bit // 8] ^= 1 << bit % 8
        path.write_bytes(changed)
        _succeeds_or_refuses_in_one_line(path, _open)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 2**24


@pytest.mark.exhaustive
@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # blocks of other types hold NaN
@pytest.mark.parametrize("name", ["llama", "llama with experts", "gemma3", "phi3", "stablelm"])
def test_a_model_with_one_bit_of_its_header_changed_is_read_or_refused_in_one_line(
    name: str, tmp_path: Path
) -> None:
    path = tmp_path / "m.gguf"
    gguf_files.write(name, gguf_files.made(name), path)
    whole = path.read_bytes()
    bits = range(8 * (whole.index(b"output_norm.weight") + 50))
    for bit in random.Random(0).sample(bits, 1000):
        changed = bytearray(whole)
        changed[bit // 8] ^= 1 << bit % 8
        path.write_bytes(changed)
        _succeeds_or_refuses_in_one_line(path, from_pretrained)
