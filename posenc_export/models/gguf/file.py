"""A GGUF file on disk (the format of llama.cpp), read with the library gguf: metadata as Python values, tensors mapped into memory."""

import re
from pathlib import Path
from typing import Any, Dict, Iterator, List, Optional, Tuple

import numpy as np

from posenc_export.shared.suggestion import download

# Exceptions of gguf's reader for a damaged file: it reads beyond the end, or meets a kind, a size or a name that cannot be.
DAMAGED = (ValueError, IndexError, KeyError, TypeError, OverflowError, MemoryError)
PART = re.compile(r"-(\d{5})-of-(\d{5})$")  # end of the name of a file that was split


def read_parts(path: Path) -> List[Any]:
    """Return gguf's reader of a file, or of all the files that it was split into, the first first.

    Raises:
        ValueError: a file is missing, or is no complete GGUF file of known types.
        ModuleNotFoundError: gguf is not installed.
    """
    first = _reader(path)
    count = first.get_field("split.count")
    whole, found = 1 if count is None else int(count.contents()), PART.search(path.stem)
    if whole < 2:
        return [first]
    if found is None or int(found[1]) != 1 or int(found[2]) != whole:
        raise ValueError(
            f"checkpoint: expected the first of {whole} files, NAME-00001-of-{whole:05}.gguf, got {path.name}; give the first, with the others beside it"
        )
    names = [
        path.with_name(f"{path.stem[: found.start()]}-{part:05}-of-{whole:05}.gguf")
        for part in range(2, whole + 1)
    ]
    return [first, *map(_reader, names)]


def fields(reader: Any) -> Dict[str, Any]:
    """Return the metadata by key. A float32 becomes the shortest decimal number that rounds to it, as a config.json has it.

    Raises:
        ValueError: a text that is not UTF-8.
    """
    try:
        return {name: _value(field) for name, field in reader.fields.items()}
    except UnicodeDecodeError as error:
        raise ValueError(
            f"checkpoint: expected texts in UTF-8 in the metadata of a GGUF file, got others ({error}); download it again"
        ) from None


def dequantized(tensor: Any, rows: Optional[slice] = None) -> np.ndarray:
    """Return a tensor, or some entries of its first axis, as float32.

    Raises:
        ValueError: the library gguf cannot read its type.
    """
    from gguf import dequantize

    data = tensor.data if rows is None else tensor.data[rows]
    if data.dtype == np.float64:  # llama.cpp writes no other whole types for weights
        return data.astype(np.float32)  # type: ignore[no-any-return]
    try:
        return np.asarray(dequantize(data, tensor.tensor_type), np.float32)
    except NotImplementedError as error:
        raise ValueError(
            f"checkpoint: expected tensors of types that the library gguf can read, got {tensor.name} ({error}); quantize the model again"
        ) from None


def _reader(path: Path) -> Any:
    from gguf import GGUFReader

    class Complete(GGUFReader):  # type: ignore[misc]
        """The reader, which refuses numbers beyond the end of the file. Without this, a wrong count makes it read nothing for a long time."""

        def _get(self, offset: int, dtype: Any, count: int = 1, *order: Any, **named: Any) -> Any:
            if count < 0 or offset + np.dtype(dtype).itemsize * int(count) > len(self.data):
                raise ValueError(f"{len(self.data)} bytes, which end within its contents")
            # The same mapped memory as a plain array: slices of a memmap take three times as long, and a vocabulary has 250,000.
            self.data = self.data.view(np.ndarray)  # type: ignore[assignment]
            return super()._get(offset, dtype, count, *order, **named)

    if not path.is_file():
        raise ValueError(
            f"checkpoint: expected a file {path.name} in {str(path.parent)!r}, got none; {download(path) or 'check the path'}"
        )
    try:
        with np.errstate(over="ignore"):  # places of tensors beyond 64 bits, which Complete refuses
            return Complete(path)
    except DAMAGED as error:
        why = re.sub(
            r"np\.\w+\((\d+)\)",
            r"\1",
            (str(error).strip("'\"").splitlines() or [type(error).__name__])[0],
        )[:200]
        raise ValueError(
            f"checkpoint: expected {path.name} to be a complete GGUF file of types that the library gguf knows, got {why}; download it again"
        ) from None


def _value(field: Any) -> Any:
    from gguf import GGUFValueType

    value = field.contents()
    if field.types[-1] != GGUFValueType.FLOAT32 or isinstance(value, list):
        return value
    return float(str(np.float32(value)))


def shapes(readers: List[Any]) -> Iterator[Tuple[str, Any, Tuple[int, ...]]]:
    """Yield name, tensor and shape of all tensors. GGUF lists the sizes of axes from the last to the first."""
    for reader in readers:
        for tensor in reader.tensors:
            yield tensor.name, tensor, tuple(reversed([int(size) for size in tensor.shape]))
