"""Blocks of GGUF's types as codes of at most 8 bits with scale and offset for 32 weights."""

import numpy as np

from posenc_export.models.gguf.file import GGUFTensor
from posenc_export.models.weight_blocks import Blocks, Matrix

BLOCK = 32
# Types with blocks of 32 weights scale * (code - zero) or scale * code + minimum: bits of codes,
# and the code that becomes 0.
TYPES = {
    **{"Q4_0": (4, 8), "Q4_1": (4, 8), "Q4_K": (4, 8)},
    **{"Q5_0": (8, 16), "Q5_1": (8, 16), "Q5_K": (8, 16), "Q8_0": (8, 0)},
}
UNQUANTIZED = ("F64", "F32", "F16", "BF16")


class GGUFMatrix(Matrix):
    """A matrix of a GGUF file. rows: those of the tensor in the order of the matrix, [N] int64."""

    def __init__(self, tensor: GGUFTensor, rows: np.ndarray) -> None:
        self._tensor, self._kind = tensor, tensor.kind.name
        self._order, self.rows = rows, len(rows)

    def _ordered(self) -> GGUFTensor:
        return self._tensor._replace(data=self._tensor.data[self._order])

    def weight(self) -> np.ndarray:
        return self._ordered().numbers()

    def blocks(self) -> Blocks | None:
        """Return the blocks of a tensor whose type is one of TYPES, with centred codes, for which
        rounding errors of activations matter less.
        """
        if self._kind not in TYPES:
            return None
        bits, zero = TYPES[self._kind]
        scales, minima = _scales(self._ordered().data, self._kind)
        weights = self.weight().reshape(*scales.shape, BLOCK)
        above = weights if minima is None else weights - minima[..., None]
        codes = np.rint(above / np.where(scales == 0, np.float32(1), scales)[..., None])
        if minima is None:
            return Blocks(codes.astype(np.int8), scales, None, bits)
        offsets = minima + np.float32(zero) * scales
        return Blocks((codes - zero).astype(np.int8), scales, offsets, bits)


def _scales(data: np.ndarray, kind: str) -> tuple[np.ndarray, np.ndarray | None]:
    """Return scales [N,blocks] float32 and minima, None for types without them."""
    from gguf import GGML_QUANT_SIZES, GGMLQuantizationType, quants

    size = GGML_QUANT_SIZES[GGMLQuantizationType[kind]][1]
    blocks = np.ascontiguousarray(data).reshape(-1, size)
    halves = [np.ascontiguousarray(blocks[:, at : at + 2]).view(np.float16) for at in (0, 2)]
    first, second = (half.astype(np.float32) for half in halves)
    shape = (len(data), -1)
    if kind in ("Q4_K", "Q5_K"):  # scales and minima of 6 bits, with a scale each for 8 blocks
        parts = quants.Q4_K.get_scale_min(blocks[:, 4:16])
        scales, minima = (part.astype(np.float32) for part in parts)
        return (first * scales).reshape(shape), (-second * minima).reshape(shape)
    return first.reshape(shape), second.reshape(shape) if kind.endswith("_1") else None
