"""Blocks of GGUF's quantized types as codes of at most 8 bits with a scale and an offset per 32 weights, without rounding them again."""

from dataclasses import dataclass
from typing import Any, Dict, List, Optional, Sequence

import numpy as np

from posenc_export.models.gguf.file import dequantized

BLOCK = 32
# Types with blocks of 32 weights scale * (code + LOWEST) or scale * code + minimum: bits of codes, and the code that becomes 0.
TYPES = {"Q4_0": (4, 8), "Q4_1": (4, 8), "Q5_0": (8, 16), "Q5_1": (8, 16), "Q8_0": (8, 0), "Q4_K": (4, 8), "Q5_K": (8, 16)}
UNQUANTIZED = ("F64", "F32", "F16", "BF16")
SUPER = 8  # blocks that share the scales of their scales in Q4_K and Q5_K


@dataclass(frozen=True)
class Blocks:
    """Weights [N,K] as code * scale + offset.

    Args:
        codes: [N,K/32,32] int8, of `bits` bits.
        scales: [N,K/32] float32.
        offsets: [N,K/32] float32; None for 0.
        bits: 4 or 8.
    """

    codes: np.ndarray
    scales: np.ndarray
    offsets: Optional[np.ndarray]
    bits: int


@dataclass(frozen=True)
class Stored:
    """A weight as the rows of tensors of a GGUF file.

    Args:
        tensors: [*,K] each; their rows are numbered through.
        rows: the row of the tensors that each row of the weight is, [N] int64.
    """

    tensors: Sequence[Any]
    rows: np.ndarray

    def __deepcopy__(self, memo: Dict[int, Any]) -> "Stored":
        return self  # tensors are mapped from the file, and a copy would read them into memory

    @property
    def types(self) -> List[str]:
        """The types of the tensors."""
        return [tensor.tensor_type.name for tensor in self.tensors]

    def weight(self, index: int) -> np.ndarray:
        """Return a tensor as float32, its rows in the order of the file."""
        return dequantized(self.tensors[index])


def blocks_of(tensor: Any) -> Blocks:
    """Return the blocks of a tensor whose type is one of TYPES.

    Codes are what remains of dequantized weights without scale and minimum. Centred codes make the rounding errors of activations matter less.
    """
    kind = tensor.tensor_type.name
    bits, zero = TYPES[kind]
    scales, minima = _scales(tensor.data, kind)
    weights = dequantized(tensor).reshape(*scales.shape, BLOCK)
    above = weights if minima is None else weights - minima[..., None]
    codes = np.rint(above / np.where(scales == 0, np.float32(1), scales)[..., None])
    centred = codes - zero if minima is not None else codes
    return Blocks(centred.astype(np.int8), scales, None if minima is None else minima + zero * scales, bits)


def _scales(data: np.ndarray, kind: str) -> Any:
    """Return scales [N,blocks] float32 and minima, None for types without them."""
    if kind in ("Q4_K", "Q5_K"):
        return _scales_of_scales(data, kind)
    from gguf import GGML_QUANT_SIZES, GGMLQuantizationType

    size = GGML_QUANT_SIZES[GGMLQuantizationType[kind]][1]
    blocks = np.ascontiguousarray(data).reshape(len(data), -1, size)
    scales = np.ascontiguousarray(blocks[..., :2]).view(np.float16)[..., 0].astype(np.float32)
    minima = np.ascontiguousarray(blocks[..., 2:4]).view(np.float16)[..., 0].astype(np.float32) if kind.endswith("_1") else None
    return scales, minima


def _scales_of_scales(data: np.ndarray, kind: str) -> Any:
    from gguf import GGML_QUANT_SIZES, GGMLQuantizationType, quants

    size = GGML_QUANT_SIZES[GGMLQuantizationType[kind]][1]
    blocks = np.ascontiguousarray(data).reshape(-1, size)
    whole, least = (np.ascontiguousarray(blocks[:, at : at + 2]).view(np.float16).astype(np.float32) for at in (0, 2))
    scales, minima = quants.Q4_K.get_scale_min(blocks[:, 4:16])
    shape = (len(data), -1)
    return (whole * scales.astype(np.float32)).reshape(shape), (-least * minima.astype(np.float32)).reshape(shape)
