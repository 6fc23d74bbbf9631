"""GGUF files that break a rule of the format are refused in one line with file, rule and value."""

import random
import re
import shutil
import struct
import tracemalloc
from pathlib import Path
from typing import Any, Callable, Dict

import numpy as np
import pytest

pytest.importorskip("gguf", reason="gguf is not installed")
pytest.importorskip("tokenizers", reason="tokenizers is not installed")

from posenc_export.models.gguf.checkpoint import GGUFCheckpoint  # noqa: E402
from posenc_export.models.gguf.file import dequantized, read  # noqa: E402
from posenc_export.models.gguf.metadata import Metadata  # noqa: E402
from posenc_export.models.gguf.rotation import rotation  # noqa: E402
from posenc_export.models.pretrained import from_pretrained  # noqa: E402
from tests.models import gguf_bytes, gguf_files  # noqa: E402
from tests.models.gguf_bytes import ARRAY, BOOL, F32, I32, TEXT, U8, U32, U64  # noqa: E402

LINE = re.compile(r"(checkpoint|gguf)( \S+)?: expected [^\n]*, got [^\n]*; [^\n]*")
Q4_0, Q8_K = 2, 15
NUMBERS = struct.pack("<64f", *range(64))


def _refusal(path: Path, call: Callable[[Path], Any] = read) -> str:
    with pytest.raises(ValueError) as refused:
        call(path)
    message = str(refused.value)
    assert LINE.fullmatch(message)
    return message


TENSORS: Dict[str, Any] = {
    "beyond 64 bits": ([("a", (8,), 0, 2**64 - 64)], "expected tensor a within the "),
    "beyond the end": ([("a", (8,), 0, 256)], "expected tensor a within the 320 bytes"),
    "partly beyond the end": ([("a", (16,), 0, 224)], "expected tensor a within the 320 bytes"),
    "of more numbers than 64 bits count": ([("a", (2**33, 2**33), 0, 0)], "expected tensor a with"),
    "not aligned": ([("a", (8,), 0, 4)],
        "expected tensor a at a multiple of 32 bytes, got offset 4"),
    "that overlap": (
        [("b", (8,), 0, 32), ("a", (9,), 0, 0)],
        "expected tensors that do not overlap, got b at byte 128, within a, which ends at byte 132",
    ),
    "at one place": ([("a", (8,), 0, 0), ("b", (8,), 0, 0)], "that do not overlap, got b at byte"),
    "of one name": ([("a", (8,), 0, 0), ("a", (8,), 0, 32)], "expected each tensor once, got a tw"),
    "of an empty axis": ([("a", (8, 0), 0, 0)], "expected tensor a to have sizes of at least 1"),
    "without axes": ([("a", (), 0, 0)], "expected tensor a to have 1 .. 4 axes, got 0"),
    "of five axes": ([("a", (1,) * 5, 0, 0)], "expected tensor a to have 1 .. 4 axes, got 5"),
    "of parts of blocks": ([("a", (33,), Q4_0, 0)],
        "with rows of whole blocks of 32, got rows of 33"),
    "of an unknown type": ([("a", (8,), 999, 0)],
        "to have a type that the library gguf knows, got 9"),
    "of a name in two lines": ([("a\nb", (8,), 0, 0)],
        r"printable characters, got b'a\\nb'|'a\\nb'"),
}  # fmt: skip


@pytest.mark.parametrize("case", TENSORS)
def test_a_file_with_wrong_tensors_is_refused(case: str, tmp_path: Path) -> None:
    tensors, said = TENSORS[case]
    (tmp_path / "m.gguf").write_bytes(gguf_bytes.file([], tensors, NUMBERS))
    message = _refusal(tmp_path / "m.gguf")
    assert message.startswith("gguf m.gguf: expected ") and re.search(said, message)


KEYS: Dict[str, Any] = {
    "an array of arrays": ((ARRAY, (ARRAY, [(U32, [1])])), "numbers or texts, got one of arrays"),
    "an array of an unknown type": (
        struct.pack("<IIQ", ARRAY, 99, 1) + b"\0" * 8,
        "array of numbers or texts, got one of type 99",
    ),
    "an unknown type": (struct.pack("<I", 99), "to have a type of GGUF, 0 .. 12, got 99"),
    "a flag of 2": ((BOOL, 2), "to be true or false, 1 or 0, got 2"),
    "a flag of 2 in an array": ((ARRAY, (BOOL, [1, 2])), "to be true or false, 1 or 0, got 2"),
    "more numbers than bytes": (
        struct.pack("<IIQ", ARRAY, U32, 2**62),
        "expected a complete GGUF file, got ",
    ),
    "more texts than bytes": (
        struct.pack("<IIQ", ARRAY, TEXT, 2**23),
        "expected a complete GGUF file, got ",
    ),
    "texts without end": (struct.pack("<IIQ", ARRAY, TEXT, 2**62), "to have at most 16777216 tex"),
    "a text that is not Unicode": ((TEXT, b"\xff"), r"expected texts in UTF-8, got b'\\xff'"),
}


@pytest.mark.parametrize("case", KEYS)
def test_a_file_with_a_wrong_value_is_refused(case: str, tmp_path: Path) -> None:
    value, said = KEYS[case]
    (tmp_path / "m.gguf").write_bytes(gguf_bytes.llama({"general.name": value}))
    assert re.search(said, _refusal(tmp_path / "m.gguf"))


@pytest.mark.parametrize("value", [(U32, 0), (U32, 48), (TEXT, b"32"), (ARRAY, (U32, [32]))])
def test_an_alignment_that_is_no_power_of_two_is_refused(value: Any, tmp_path: Path) -> None:
    (tmp_path / "m.gguf").write_bytes(gguf_bytes.llama({"general.alignment": value}))
    message = _refusal(tmp_path / "m.gguf")
    assert "expected general.alignment to be a power of two, got " in message


def test_a_key_given_twice_is_refused(tmp_path: Path) -> None:
    pairs = [gguf_bytes.pair("a", (U32, value)) for value in (1, 2)]
    (tmp_path / "m.gguf").write_bytes(gguf_bytes.file(pairs, []))
    assert "expected each key once, got a twice" in _refusal(tmp_path / "m.gguf")


FORMATS: Dict[str, Any] = {
    "another magic": (b"GGML" + gguf_bytes.llama()[4:], "begins with b'GGUF', got b'GGML'"),
    "the first version": (b"GGUF\1\0\0\0" + gguf_bytes.llama()[8:], "version 2 or 3 .*, got 1;"),
    "the other order of bytes": (b"GGUF\0\0\0\3" + gguf_bytes.llama()[8:], "little-endian order"),
    "a long name": (
        gguf_bytes.file([gguf_bytes.pair("a" * (2**16 + 1), (U32, 1))], []),
        "expected names of at most 65536 bytes, got 65537",
    ),
}


@pytest.mark.parametrize("case", FORMATS)
def test_a_file_of_another_format_is_refused(case: str, tmp_path: Path) -> None:
    content, said = FORMATS[case]
    (tmp_path / "m.gguf").write_bytes(content)
    assert re.search(said, _refusal(tmp_path / "m.gguf"))


def test_a_type_that_the_library_cannot_decode_is_refused(tmp_path: Path) -> None:
    content = gguf_bytes.file([], [("a", (256,), Q8_K, 0)], bytes(292))
    (tmp_path / "m.gguf").write_bytes(content)
    (tensor,) = read(tmp_path / "m.gguf").tensors
    with pytest.raises(ValueError, match=r"expected tensors of types .* can read, got a \(.*\); q"):
        dequantized(tensor)


def test_tensors_are_where_the_file_says(tmp_path: Path) -> None:
    tensors = [("b", (4, 2), 0, 64), ("a", (16,), 0, 0)]
    pairs = [gguf_bytes.pair("general.alignment", (U32, 64))]
    content = gguf_bytes.file(pairs, tensors, NUMBERS, alignment=64)
    (tmp_path / "m.gguf").write_bytes(content)
    first, second = read(tmp_path / "m.gguf").tensors
    assert np.array_equal(first.data, np.arange(16.0, 24.0).reshape(2, 4))
    assert np.array_equal(second.data, np.arange(16.0)) and second.name == "a"


def test_an_array_of_numbers_costs_no_memory(tmp_path: Path) -> None:
    values = {"general.name": struct.pack("<IIQ", ARRAY, U8, 100_000) + bytes(100_000)}
    (tmp_path / "m.gguf").write_bytes(gguf_bytes.llama(values))
    read(tmp_path / "m.gguf")  # imports
    tracemalloc.start()
    file = read(tmp_path / "m.gguf")
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert len(file.values["general.name"]) == 100_000 and peak < 50_000


def _first_part(name: str) -> bool:
    return "blk.1." not in name


def _parts(folder: Path, keys: Any) -> Path:
    """Write a model in two files, the second with further metadata, and return the first."""
    model = gguf_files.made("llama")
    paths = [folder / f"a-0000{part}-of-00002.gguf" for part in (1, 2)]
    gguf_files.write("llama", model, paths[0], metadata={"split.count": 2}, only=_first_part)
    metadata = {"split.count": 2, **keys}
    gguf_files.write(
        "llama", model, paths[1], metadata=metadata, only=lambda name: not _first_part(name)
    )
    return paths[0]


def test_a_part_given_twice_is_refused(tmp_path: Path) -> None:
    first = _parts(tmp_path, {})
    shutil.copy(first, tmp_path / "a-00002-of-00002.gguf")
    message = _refusal(first, from_pretrained)
    assert "gguf a-00002-of-00002.gguf: expected tensors that no other part has, got " in message


@pytest.mark.parametrize(
    ("keys", "said"),
    [
        ({"split.no": 0}, "expected split.no to be 1, got 0"),
        ({"split.count": 3}, "expected split.count to be 2, got 3"),
        ({"split.count": [2, 2]}, "expected split.count to be a whole number, got array"),
    ],
)
def test_a_part_that_is_another_one_is_refused(keys: Any, said: str, tmp_path: Path) -> None:
    assert said in _refusal(_parts(tmp_path, keys), from_pretrained)


@pytest.mark.parametrize("name", ["m.gguf", "m-00001-of-00003.gguf", "m-00002-of-00002.gguf"])
def test_a_first_part_of_another_name_is_refused(name: str, tmp_path: Path) -> None:
    (tmp_path / name).write_bytes(gguf_bytes.llama({"split.count": (U32, 2)}))
    message = _refusal(tmp_path / name, GGUFCheckpoint)
    assert f"expected the first of 2 files, NAME-00001-of-00002.gguf, got {name}; " in message


def test_parts_with_another_number_of_tensors_are_refused(tmp_path: Path) -> None:
    keys = {"split.count": (U32, 2), "split.tensors.count": (I32, 1)}
    for part in (1, 2):
        (tmp_path / f"m-0000{part}-of-00002.gguf").write_bytes(gguf_bytes.llama(keys))
    message = _refusal(tmp_path / "m-00001-of-00002.gguf", GGUFCheckpoint)
    assert "expected split.tensors.count to be 2, as many as the files have, got 1; " in message


@pytest.mark.parametrize(
    "value",
    [(ARRAY, (U32, [2])), (TEXT, b"2"), (F32, 2.0), (I32, -2), (BOOL, 1)],
    ids=["list", "text", "float", "below 0", "flag"],
)
def test_a_count_of_parts_that_is_no_number_is_refused(value: Any, tmp_path: Path) -> None:
    (tmp_path / "m.gguf").write_bytes(gguf_bytes.llama({"split.count": value}))
    message = _refusal(tmp_path / "m.gguf", GGUFCheckpoint)
    assert message.startswith("gguf m.gguf: expected split.count to be a whole number, got ")


@pytest.mark.parametrize("factors", [[], [2.0], [1.0, 2.0, 0.0, 1.0], [float("nan")] * 8])
@pytest.mark.parametrize("name", ["llama", "phi3"])
def test_tables_of_factors_of_another_length_are_refused(
    name: str, factors: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, usual = gguf_files.made(name), gguf_files._factors
    monkeypatch.setattr(
        gguf_files, "_factors", lambda config: [(table, factors) for table, _ in usual(config)]
    )
    gguf_files.write(name, model, tmp_path / "m.gguf")
    wanted = "sizes of at least 1, got" if not factors else "to hold 8 numbers above 0, got"
    assert wanted in _refusal(tmp_path / "m.gguf", from_pretrained)


def test_a_matrix_with_exchanged_axes_is_refused(tmp_path: Path) -> None:
    gguf_files.write("llama", gguf_files.made("llama"), tmp_path / "m.gguf")
    content, name = (tmp_path / "m.gguf").read_bytes(), b"blk.0.ffn_down.weight"
    at = content.index(name) + len(name) + 4
    assert struct.unpack("<2Q", content[at : at + 16]) == (96, 64)
    (tmp_path / "m.gguf").write_bytes(
        content[:at] + struct.pack("<2Q", 64, 96) + content[at + 16 :]
    )
    assert "expected blk.0.ffn_down.weight with sizes [64, 96] by the metadata, got [96, 64]" in (
        _refusal(tmp_path / "m.gguf", from_pretrained)
    )


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


@pytest.mark.parametrize("key", gguf_bytes.LLAMA)
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
@pytest.mark.parametrize("name", ["llama", "llama with experts", "gemma3", "phi3", "falcon"])
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


def test_yarn_without_its_original_length_scales_from_that_of_the_context() -> None:
    values = {"general.architecture": "llama", "llama.context_length": 4096}
    values |= {"llama.rope.scaling.type": "yarn", "llama.rope.scaling.factor": 4.0}
    scaling = rotation(Metadata(values, ()), 64, dict[str, np.ndarray]().__getitem__)[
        "rope_scaling"
    ]
    assert scaling["original_max_position_embeddings"] == 4096
    values["llama.rope.scaling.original_context_length"] = 512
    scaling = rotation(Metadata(values, ()), 64, dict[str, np.ndarray]().__getitem__)[
        "rope_scaling"
    ]
    assert scaling["original_max_position_embeddings"] == 512


@pytest.mark.parametrize("kind", ["adapter", "mmproj"])
def test_a_file_of_a_part_of_a_model_is_refused_by_its_type(kind: str) -> None:
    values = {"general.architecture": "llama", "general.type": kind, "adapter.type": "lora"}
    with pytest.raises(ValueError, match=f"general.type to be model, got '{kind}'; give the file"):
        Metadata(values, ())
