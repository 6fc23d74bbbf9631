"""A GGUF file on disk (the format of llama.cpp, versions 2 and 3): metadata and mapped tensors."""

import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Dict, List, Optional

import numpy as np

from posenc_export.models.gguf.tensors import GGUFTensor, Listed, placed
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
REMEDY = "download it again"


@dataclass(frozen=True)
class GGUFFile:
    """A GGUF file.

    Args:
        path: the file.
        values: its metadata by key: numbers, texts, arrays of numbers [n], lists of texts. A number
            in float32 is the shortest decimal that rounds to it, as a config.json has it.
        tensors: in the order of the file.
    """

    path: Path
    values: Dict[str, Any]
    tensors: List[GGUFTensor]


def read(path: Path) -> GGUFFile:
    """Return the content of a file. Arrays are views of the file.

    Raises:
        ValueError: the file is missing, ends early or breaks a rule of the format; two keys or two
            tensors have one name; a tensor has an unknown type, lies outside the file, is not
            aligned, or overlaps another.
        ModuleNotFoundError: gguf is not installed.
    """
    if not path.is_file():
        raise ValueError(
            f"checkpoint: expected a file {path.name} in {str(path.parent)!r}, got none; "
            f"{download(path) or 'check the path'}"
        )
    empty = path.stat().st_size == 0  # which cannot be mapped
    content = np.zeros(0, np.uint8) if empty else np.memmap(path, mode="r").view(np.ndarray)
    try:
        return _read(path, content)
    except ValueError as error:
        raise ValueError(f"gguf {path.name}: {error}; {REMEDY}") from None


def dequantized(tensor: GGUFTensor, rows: Optional[slice] = None) -> np.ndarray:
    """Return a tensor, or some entries of its first axis, as float32.

    Raises:
        ValueError: the library gguf cannot read its type.
    """
    from gguf import dequantize

    data = tensor.data if rows is None else tensor.data[rows]
    if data.dtype == np.float64:  # llama.cpp writes no other whole types for weights
        return data.astype(np.float32)
    try:
        return np.asarray(dequantize(data, tensor.tensor_type), np.float32)
    except NotImplementedError as error:
        raise ValueError(
            f"checkpoint: expected tensors of types that the library gguf can read, "
            f"got {tensor.name} ({error}); quantize the model again"
        ) from None


def _read(path: Path, content: np.ndarray) -> GGUFFile:
    header = _Header(content)
    if (magic := header.bytes(4)) != MAGIC:
        raise ValueError(f"expected a GGUF file, which begins with {MAGIC!r}, got {magic!r}")
    if (version := header.number("<u4")) not in VERSIONS:
        raise ValueError(f"expected version 2 or 3 of GGUF in little-endian order, got {version}")
    tensors, keys = header.count("tensors", MOST_TENSORS), header.count("keys", MOST_KEYS)
    values: Dict[str, Any] = {}
    for _ in range(keys):
        key = header.name()
        if key in values:
            raise ValueError(f"expected each key once, got {key} twice")
        values[key] = header.value(key, header.number("<u4"))
    listed = [_listed(header) for _ in range(tensors)]
    return GGUFFile(path, values, placed(content, header.at, values, listed))


def _listed(header: "_Header") -> Listed:
    """Read the description of a tensor. GGUF lists the sizes of axes from the last to the first."""
    name, axes = header.name(), header.number("<u4")
    if not 1 <= axes <= MOST_AXES:
        raise ValueError(f"expected tensor {name} to have 1 .. {MOST_AXES} axes, got {axes}")
    sizes = header.numbers("<u8", axes).tolist()
    return Listed(name, tuple(reversed(sizes)), header.number("<u4"), header.number("<u8"))


class _Header:
    """The part of a file before its tensors, read from the first byte to the last.

    Attributes:
        at: place of the next byte.
    """

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
        if size > longest:
            raise ValueError(f"expected names of at most {longest} bytes, got {size}")
        content = self.bytes(size)
        try:
            return content.decode()
        except UnicodeDecodeError:
            raise ValueError(f"expected texts in UTF-8, got {content[:40]!r}") from None

    def name(self) -> str:
        """Return a name, which messages show."""
        name = self.text(LONGEST_NAME)
        if not name.isprintable():
            raise ValueError(f"expected names of printable characters, got {name[:40]!r}")
        return name

    def count(self, what: str, most: int) -> int:
        count = self.number("<u8")
        if count > most:
            raise ValueError(f"expected at most {most} {what}, got {count}")
        return int(count)

    def value(self, key: str, kind: int) -> Any:
        """Return the value of a key."""
        if kind == TEXT:
            return self.text()
        if kind == ARRAY:
            return self._array(key)
        if kind not in NUMBERS:
            raise ValueError(f"expected {key} to have a type of GGUF, 0 .. 12, got {kind}")
        number = self._flags(key, 1)[0].item() if kind == BOOL else self.number(NUMBERS[kind])
        return float(str(np.float32(number))) if kind == FLOAT32 else number

    def _array(self, key: str) -> Any:
        kind, count = self.number("<u4"), self.number("<u8")
        if kind == TEXT:
            if count > MOST_TEXTS:
                raise ValueError(f"expected {key} to have at most {MOST_TEXTS} texts, got {count}")
            return [self.text() for _ in range(count)]
        if kind == BOOL:
            return self._flags(key, count)
        if kind not in NUMBERS:
            got = "arrays" if kind == ARRAY else f"type {kind}"
            raise ValueError(f"expected {key} to be an array of numbers or texts, got one of {got}")
        return self.numbers(NUMBERS[kind], count)

    def _flags(self, key: str, count: int) -> np.ndarray:
        flags = self.numbers("u1", count)
        if flags.max(initial=0) > 1:
            raise ValueError(f"expected {key} to be true or false, 1 or 0, got {flags.max()}")
        return flags.view(np.bool_)

    def _past(self, size: int) -> int:
        """Move past some bytes, and return where they begin."""
        begin, end = self.at, self.at + size
        if end > len(self.content):
            raise ValueError(
                f"expected a complete GGUF file, got {len(self.content)} bytes, "
                "which end within its contents"
            )
        self.at = end
        return begin
