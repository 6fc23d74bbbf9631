"""GGUF files on disk (the format of llama.cpp, versions 2 and 3): metadata and mapped tensors."""

import math
import re
import struct
from pathlib import Path
from typing import Any, NamedTuple, Sequence

import numpy as np

from posenc_export.shared.foreign import explained
from posenc_export.shared.refusal import refusal
from posenc_export.shared.suggestion import download

# dtypes of numbers in metadata, by type; texts and arrays have types of their own.
NUMBERS = {
    **dict(enumerate(("u1", "i1", "<u2", "<i2", "<u4", "<i4", "<f4", "?"))),
    **{10: "<u8", 11: "<i8", 12: "<f8"},
}
FLOAT32, TEXT, ARRAY = 6, 8, 9
# Of files into which llama.cpp splits a model, NAME-00001-of-00003.gguf and those that follow it.
FIRST = re.compile(r"-00001-of-(\d{5})$")  # end of the name of the first


class GGUFTensor(NamedTuple):
    """A tensor of a GGUF file."""

    kind: Any  # GGMLQuantizationType of the library gguf
    shape: tuple[int, ...]  # sizes of axes, the first first
    data: np.ndarray  # uint8, mapped, with an axis of bytes in place of the last axis

    def numbers(self) -> np.ndarray:
        """Return the tensor as float32. NotImplementedError: gguf does not read its type."""
        from gguf import dequantize

        return np.asarray(dequantize(self.data, self.kind), np.float32)


class GGUFFile(NamedTuple):
    """The content of a GGUF file."""

    # Metadata by key: numbers, texts, arrays of numbers [n], lists of texts. A number in float32 is
    # the shortest decimal that rounds to it, as a config.json has it.
    values: dict[str, Any]
    tensors: dict[str, GGUFTensor]


def read_gguf(path: Path) -> GGUFFile:
    """Return the content of a file, or of all the files that it was split into. Numbers are views
    of the files.

    Args:
        path: the file, or the first of several.

    Raises:
        ValueError: a file that is missing, incomplete or damaged, or no first one.
        ModuleNotFoundError: gguf is not installed.
    """
    whole, name = _read(path), FIRST.search(path.stem)
    count = int(name[1]) if name else 1
    if str(parts := whole.values.get("split.count", count)) not in ("0", str(count)):
        rule = f"the first of {parts!r:.80} files, NAME-00001-of-NUMBER.gguf"
        raise refusal("gguf", rule, path.name, "give the first, with the others beside it")
    for part in range(2, count + 1):
        other = FIRST.sub(f"-{part:05}-of-{count:05}.gguf", path.stem)
        whole.tensors.update(_read(path.with_name(other)).tensors)
    return whole


def _read(path: Path) -> GGUFFile:
    if not path.is_file():
        rule, remedy = f"a file {path.name} in {str(path.parent)!r}", download(path)
        raise refusal("checkpoint", rule, "none", remedy or "check the path")
    rule = f"gguf {path.name}: expected a complete GGUF file of version 2 or 3"
    with explained(rule, "download it again", struct.error):
        content = np.memmap(path, mode="r").view(np.ndarray)
        header = _Header(content.data)
        magic, version, tensors, keys = header.numbers("4sIQQ")
        if magic != b"GGUF" or version not in (2, 3):
            raise ValueError(f"{magic!r} and {version} at its beginning")
        values = {header.text(): header.value(*header.numbers("I")) for _ in range(keys)}
        listed = {header.text(): header.described() for _ in range(tensors)}
        if not "".join((*values, *listed)).isprintable():
            raise ValueError("names of other than printable characters")
        alignment = values.get("general.alignment", 32)
        data = content[-(-header.at // alignment) * alignment :]
        return GGUFFile(values, {name: _tensor(data, *listed[name]) for name in listed})


class _Header:
    """The part of a file before its tensors, read from the first byte on; `at` is the next."""

    def __init__(self, content: memoryview) -> None:
        self.content, self.at = content, 0

    def numbers(self, form: str) -> tuple[Any, ...]:
        """Return the next numbers, in a form of struct."""
        begin, self.at = self.at, self.at + struct.calcsize(f"<{form}")
        return struct.unpack_from(f"<{form}", self.content, begin)

    def array(self, dtype: str, count: int) -> np.ndarray:
        """Return the next numbers as a view of the file."""
        begin, self.at = self.at, self.at + count * np.dtype(dtype).itemsize
        return np.frombuffer(self.content[begin : self.at], dtype, count)

    def text(self) -> str:
        return self.array("u1", *self.numbers("Q")).tobytes().decode()

    def value(self, kind: int) -> Any:
        """Return a value of a type of GGUF."""
        if kind == TEXT:
            return self.text()
        if kind != ARRAY:
            number = self.array(NUMBERS[kind], 1)[0]
            return float(str(number)) if kind == FLOAT32 else number.item()
        of, count = self.numbers("IQ")
        return [self.text() for _ in range(count)] if of == TEXT else self.array(NUMBERS[of], count)

    def described(self) -> tuple[Sequence[int], int, int]:
        """Return shape, type, and offset in bytes of a tensor. Files list the last size first."""
        *sizes, kind, offset = self.numbers("{}QIQ".format(*self.numbers("I")))
        return sizes[::-1], kind, offset


def _tensor(data: np.ndarray, shape: Sequence[int], kind: int, offset: int) -> GGUFTensor:
    """Return a tensor, which begins at byte `offset` of the data."""
    from gguf import GGML_QUANT_SIZES, GGMLQuantizationType

    of = GGMLQuantizationType(kind)
    weights, size = GGML_QUANT_SIZES[of]
    held = (*shape[:-1], shape[-1] // weights * size)
    data = data[offset : offset + math.prod(held)]
    if not all(shape) or shape[-1] % weights or data.size < math.prod(held):
        raise ValueError(f"a tensor {list(shape)} of type {of.name} with {data.size} bytes")
    return GGUFTensor(of, tuple(shape), data.reshape(held))
