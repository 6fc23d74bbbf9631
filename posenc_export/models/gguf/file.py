"""A GGUF file on disk (the format of llama.cpp, versions 2 and 3): metadata and mapped tensors."""

import math
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Dict, List, Mapping, NamedTuple, Optional, Sequence, Tuple

import numpy as np

from posenc_export.shared.refusal import refusal
from posenc_export.shared.suggestion import download

MAGIC, VERSIONS = b"GGUF", (2, 3)
# dtypes of the types of values in metadata; texts and arrays have types of their own.
NUMBERS = {
    **dict(enumerate(("u1", "i1", "<u2", "<i2", "<u4", "<i4", "<f4", "?"))),
    **{10: "<u8", 11: "<i8", 12: "<f8"},
}
FLOAT32, BOOL, TEXT, ARRAY = 6, 7, 8, 9
# Limits of a file. The largest vocabularies have 2^18 entries, the longest names 64 bytes.
MOST_KEYS, MOST_TENSORS, MOST_TEXTS, LONGEST_NAME, MOST_AXES = 2**16, 2**20, 2**24, 2**16, 4
ALIGNMENT, DEFAULT_ALIGNMENT = "general.alignment", 32
# Types whose numbers numpy reads; tensors of other types are blocks of bytes.
PLAIN = {
    "F16": "<f2", "F32": "<f4", "F64": "<f8", "I8": "i1", "I16": "<i2", "I32": "<i4", "I64": "<i8",
}  # fmt: skip


class Listed(NamedTuple):
    """A tensor as a file describes it: `offset` counts bytes from the first tensor."""

    name: str
    shape: Tuple[int, ...]
    kind: int
    offset: int


@dataclass(frozen=True)
class GGUFTensor:
    """A tensor of a GGUF file."""

    name: str
    tensor_type: Any  # GGMLQuantizationType of the library gguf
    shape: Tuple[int, ...]  # sizes of axes, the first first
    data: np.ndarray  # its numbers, or the bytes of its blocks, with a last axis of bytes


@dataclass(frozen=True)
class GGUFFile:
    """A GGUF file."""

    path: Path
    # Its metadata by key: numbers, texts, arrays of numbers [n], lists of texts. A number in
    # float32 is the shortest decimal that rounds to it, as a config.json has it.
    values: Dict[str, Any]
    tensors: List[GGUFTensor]  # in the order of the file


def read(path: Path) -> GGUFFile:
    """Return the content of a file. Arrays are views of the file. ValueError: the file is missing,
    ends early or breaks a rule of the format; two keys or two tensors have one name; a tensor has
    an unknown type, lies outside the file, is not aligned, or overlaps another;
    ModuleNotFoundError: gguf is not installed.
    """
    if not path.is_file():
        rule, remedy = f"a file {path.name} in {str(path.parent)!r}", download(path)
        raise refusal("checkpoint", rule, "none", remedy or "check the path")
    empty = path.stat().st_size == 0  # which cannot be mapped
    content = np.zeros(0, np.uint8) if empty else np.memmap(path, mode="r").view(np.ndarray)
    try:
        return _read(path, content)
    except ValueError as error:
        raise ValueError(f"gguf {path.name}: {error}; download it again") from None


def dequantized(tensor: GGUFTensor, rows: Optional[slice] = None) -> np.ndarray:
    """Return a tensor, or entries of its first axis, as float32. ValueError: an unknown type."""
    from gguf import dequantize

    data = tensor.data if rows is None else tensor.data[rows]
    if data.dtype == np.float64:  # llama.cpp writes no other whole types for weights
        return data.astype(np.float32)
    try:
        return np.asarray(dequantize(data, tensor.tensor_type), np.float32)
    except NotImplementedError as error:
        rule, got = "tensors of types that the library gguf can read", f"{tensor.name} ({error})"
        raise refusal("checkpoint", rule, got, "quantize the model again") from None


def _check(holds: bool, rule: str, got: object) -> None:
    if not holds:
        raise ValueError(f"expected {rule}, got {got}")


def _read(path: Path, content: np.ndarray) -> GGUFFile:
    header = _Header(content)
    magic = header.bytes(4)
    _check(magic == MAGIC, f"a GGUF file, which begins with {MAGIC!r}", repr(magic))
    version = header.number("<u4")
    _check(version in VERSIONS, "version 2 or 3 of GGUF in little-endian order", version)
    tensors, keys = header.count("tensors", MOST_TENSORS), header.count("keys", MOST_KEYS)
    values: Dict[str, Any] = {}
    for _ in range(keys):
        key = header.name()
        _check(key not in values, "each key once", f"{key} twice")
        values[key] = header.value(key, header.number("<u4"))
    listed = [_listed(header) for _ in range(tensors)]
    return GGUFFile(path, values, _placed(content, header.at, values, listed))


def _listed(header: "_Header") -> Listed:
    """Read the description of a tensor. GGUF lists the sizes of axes from the last to the first."""
    name, axes = header.name(), header.number("<u4")
    _check(1 <= axes <= MOST_AXES, f"tensor {name} to have 1 .. {MOST_AXES} axes", axes)
    sizes = header.numbers("<u8", axes).tolist()
    return Listed(name, tuple(reversed(sizes)), header.number("<u4"), header.number("<u8"))


class _Header:
    """The part of a file before its tensors, read from the first byte on; `at` is the next."""

    def __init__(self, content: np.ndarray) -> None:
        self.content, self.at = content, 0

    def numbers(self, dtype: str, count: int) -> np.ndarray:
        """Return the next numbers, as a view of the file."""
        begin = self._past(np.dtype(dtype).itemsize * count)
        return np.frombuffer(self.content, dtype, count, begin)

    def number(self, dtype: str) -> Any:
        return self.numbers(dtype, 1)[0].item()

    def bytes(self, count: int) -> bytes:
        begin = self._past(count)
        return self.content[begin : begin + count].tobytes()

    def text(self, longest: int = 2**63) -> str:
        (size,) = struct.unpack("<Q", self.bytes(8))
        _check(size <= longest, f"names of at most {longest} bytes", size)
        content = self.bytes(size)
        try:
            return content.decode()
        except UnicodeDecodeError:
            raise ValueError(f"expected texts in UTF-8, got {content[:40]!r}") from None

    def name(self) -> str:
        """Return a name, which messages show."""
        name = self.text(LONGEST_NAME)
        _check(name.isprintable(), "names of printable characters", repr(name[:40]))
        return name

    def count(self, what: str, most: int) -> int:
        count = self.number("<u8")
        _check(count <= most, f"at most {most} {what}", count)
        return int(count)

    def value(self, key: str, kind: int) -> Any:
        """Return the value of a key."""
        if kind == TEXT:
            return self.text()
        if kind == ARRAY:
            return self._array(key)
        _check(kind in NUMBERS, f"{key} to have a type of GGUF, 0 .. 12", kind)
        number = self._flags(key, 1)[0].item() if kind == BOOL else self.number(NUMBERS[kind])
        return float(str(np.float32(number))) if kind == FLOAT32 else number

    def _array(self, key: str) -> Any:
        kind, count = self.number("<u4"), self.number("<u8")
        if kind == TEXT:
            _check(count <= MOST_TEXTS, f"{key} to have at most {MOST_TEXTS} texts", count)
            return [self.text() for _ in range(count)]
        if kind == BOOL:
            return self._flags(key, count)
        got = "one of arrays" if kind == ARRAY else f"one of type {kind}"
        _check(kind in NUMBERS, f"{key} to be an array of numbers or texts", got)
        return self.numbers(NUMBERS[kind], count)

    def _flags(self, key: str, count: int) -> np.ndarray:
        flags = self.numbers("u1", count)
        largest = flags.max(initial=0)
        _check(largest <= 1, f"{key} to be true or false, 1 or 0", largest)
        return flags.view(np.bool_)

    def _past(self, size: int) -> int:
        """Move past some bytes, and return where they begin."""
        begin, end, length = self.at, self.at + size, len(self.content)
        got = f"{length} bytes, which end within its contents"
        _check(end <= length, "a complete GGUF file", got)
        self.at = end
        return begin


def _placed(
    content: np.ndarray, end: int, values: Mapping[str, Any], listed: Sequence[Listed]
) -> List[GGUFTensor]:
    """Return the tensors of a file, whose header ends at byte `end`, as views of its bytes."""
    alignment = values.get(ALIGNMENT, DEFAULT_ALIGNMENT)
    power = type(alignment) is int and alignment >= 1 and not alignment & (alignment - 1)
    _check(power, f"{ALIGNMENT} to be a power of two", f"{alignment!r:.80}")
    start = -(-end // alignment) * alignment
    tensors, places, names = [], [], set()
    for tensor in listed:
        name, begin = f"tensor {tensor.name}", start + tensor.offset
        _check(tensor.name not in names, "each tensor once", f"{tensor.name} twice")
        names.add(tensor.name)
        rule = f"{name} at a multiple of {alignment} bytes"
        _check(tensor.offset % alignment == 0, rule, f"offset {tensor.offset}")
        kind, dtype, shape = _form(tensor)
        size = math.prod(shape) * np.dtype(dtype).itemsize
        rule = f"{name} within the {len(content)} bytes of a complete GGUF file"
        _check(begin + size <= len(content), rule, f"bytes {begin} .. {begin + size - 1}")
        data = content[begin : begin + size].view(dtype).reshape(shape)
        tensors.append(GGUFTensor(tensor.name, kind, tensor.shape, data))
        places.append((begin, begin + size, tensor.name))
    places.sort()
    for (_, end, first), (begin, _, second) in zip(places, places[1:], strict=False):
        got = f"{second} at byte {begin}, within {first}, which ends at byte {end}"
        _check(begin >= end, "tensors that do not overlap", got)
    return tensors


def _form(tensor: Listed) -> Tuple[Any, str, Tuple[int, ...]]:
    """Return the type of a tensor, and dtype and shape of its data."""
    from gguf import GGML_QUANT_SIZES, GGMLQuantizationType

    name, known = f"tensor {tensor.name}", {kind.value: kind for kind in GGMLQuantizationType}
    rule = f"{name} to have a type that the library gguf knows"
    _check(tensor.kind in known, rule, tensor.kind)
    rule = f"{name} to have sizes of at least 1"
    _check(all(tensor.shape), rule, list(tensor.shape))
    kind = known[tensor.kind]
    if kind.name in PLAIN:
        return kind, PLAIN[kind.name], tensor.shape
    weights, size = GGML_QUANT_SIZES[kind]
    *first, last = tensor.shape
    rule = f"{name} of type {kind.name} with rows of whole blocks of {weights}"
    _check(last % weights == 0, rule, f"rows of {last}")
    return kind, "u1", (*first, last // weights * size)
