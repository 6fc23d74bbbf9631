"""The tensors of a GGUF file: their types, shapes and places, as views of the file."""

import math
from dataclasses import dataclass
from typing import Any, List, Mapping, NamedTuple, Sequence, Tuple

import numpy as np

ALIGNMENT, DEFAULT_ALIGNMENT = "general.alignment", 32
# Types whose numbers numpy reads; tensors of other types are blocks of bytes.
PLAIN = {
    "F16": "<f2", "F32": "<f4", "F64": "<f8", "I8": "i1", "I16": "<i2", "I32": "<i4", "I64": "<i8",
}  # fmt: skip


class Listed(NamedTuple):
    """A tensor as a file describes it.

    Args:
        shape: sizes of axes, the first first.
        kind: number of its type.
        offset: its first byte, counted from the first byte of all tensors.
    """

    name: str
    shape: Tuple[int, ...]
    kind: int
    offset: int


@dataclass(frozen=True)
class GGUFTensor:
    """A tensor of a GGUF file.

    Args:
        name: its name in the file.
        tensor_type: GGMLQuantizationType of the library gguf.
        shape: sizes of axes, the first first.
        data: its numbers, or the bytes of its blocks, with a last axis of bytes.
    """

    name: str
    tensor_type: Any
    shape: Tuple[int, ...]
    data: np.ndarray


def placed(
    content: np.ndarray, end: int, values: Mapping[str, Any], listed: Sequence[Listed]
) -> List[GGUFTensor]:
    """Return the tensors of a file.

    Args:
        content: all bytes of the file.
        end: number of bytes before the padding in front of the tensors.
        values: metadata, which may give the alignment.

    Raises:
        ValueError: an alignment that is no power of two, a name twice, an unknown type, an empty
            axis, rows that are no whole blocks, a place that is not aligned, outside the file, or
            within another tensor. The message is the rule and the value.
    """
    alignment = values.get(ALIGNMENT, DEFAULT_ALIGNMENT)
    if type(alignment) is not int or alignment < 1 or alignment & (alignment - 1):
        raise ValueError(f"expected {ALIGNMENT} to be a power of two, got {alignment!r:.80}")
    start = -(-end // alignment) * alignment
    tensors, places, names = [], [], set()
    for tensor in listed:
        if tensor.name in names:
            raise ValueError(f"expected each tensor once, got {tensor.name} twice")
        names.add(tensor.name)
        if tensor.offset % alignment:
            raise ValueError(
                f"expected tensor {tensor.name} at a multiple of {alignment} bytes, "
                f"got offset {tensor.offset}"
            )
        kind, dtype, shape = _form(tensor)
        begin = start + tensor.offset
        size = math.prod(shape) * np.dtype(dtype).itemsize
        if begin + size > len(content):
            raise ValueError(
                f"expected tensor {tensor.name} within the {len(content)} bytes of a complete GGUF "
                f"file, got bytes {begin} .. {begin + size - 1}"
            )
        data = content[begin : begin + size].view(dtype).reshape(shape)
        tensors.append(GGUFTensor(tensor.name, kind, tensor.shape, data))
        places.append((begin, begin + size, tensor.name))
    _check_apart(places)
    return tensors


def _form(tensor: Listed) -> Tuple[Any, str, Tuple[int, ...]]:
    """Return the type of a tensor, and dtype and shape of its data."""
    from gguf import GGML_QUANT_SIZES, GGMLQuantizationType

    known = {kind.value: kind for kind in GGMLQuantizationType}
    if tensor.kind not in known:
        raise ValueError(
            f"expected tensor {tensor.name} to have a type that the library gguf knows, "
            f"got {tensor.kind}"
        )
    if not all(tensor.shape):
        raise ValueError(
            f"expected tensor {tensor.name} to have sizes of at least 1, got {list(tensor.shape)}"
        )
    kind = known[tensor.kind]
    if kind.name in PLAIN:
        return kind, PLAIN[kind.name], tensor.shape
    weights, size = GGML_QUANT_SIZES[kind]
    *first, last = tensor.shape
    if last % weights:
        raise ValueError(
            f"expected tensor {tensor.name} of type {kind.name} with rows of whole blocks of "
            f"{weights}, got rows of {last}"
        )
    return kind, "u1", (*first, last // weights * size)


def _check_apart(places: Sequence[Tuple[int, int, str]]) -> None:
    """Check that no tensor begins before the end of the one before it."""
    ordered = sorted(places)
    for (_, end, name), (begin, _, following) in zip(ordered, ordered[1:], strict=False):
        if begin < end:
            raise ValueError(
                f"expected tensors that do not overlap, got {following} at byte {begin}, "
                f"within {name}, which ends at byte {end}"
            )
