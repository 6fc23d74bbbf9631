"""Encoder outputs that a decoder reads, given once: cross-attention keys and values of each row.

Shapes: B batch, Q tokens of the longest encoder sequence, N numbers per token, K kv heads, D head
size.
"""

from dataclasses import dataclass
from typing import Dict, Optional

import numpy as np

from posenc_export.runtime.artefact.schema import Manifest, Value
from posenc_export.runtime.session import errors
from posenc_export.runtime.session.argument_arrays import align
from posenc_export.runtime.session.arguments import Passed

MASK = "encoder_attention_mask"


@dataclass(frozen=True)
class EncoderOutputs:
    """The graph inputs listed in Manifest.encoder, for all rows."""

    # encoder_attention_mask [B,Q] int64 first, then the keys and values [B,K,Q,D].
    arrays: Dict[str, np.ndarray]

    def select(self, window: slice) -> Dict[str, np.ndarray]:
        """Return the graph inputs of a range of rows."""
        return {name: array[window] for name, array in self.arrays.items()}

    def joined(self, other: "EncoderOutputs") -> "EncoderOutputs":
        """Return these rows followed by those of `other`. Shorter sequences are padded."""
        length = max(self.arrays[MASK].shape[1], other.arrays[MASK].shape[1])
        arrays = {}
        for name, array in self.arrays.items():
            rows = (_padded(array, length), _padded(other.arrays[name], length))
            arrays[name] = np.concatenate(rows)
        return EncoderOutputs(arrays)

    def ordered(self, order: np.ndarray) -> "EncoderOutputs":
        """Return the rows with these indices."""
        return EncoderOutputs({name: array[order] for name, array in self.arrays.items()})


def new(manifest: Manifest, passed: Passed, count: int) -> Optional[EncoderOutputs]:
    """Check the encoder outputs that a caller passes for `count` rows. Return None for a model that
    reads no encoder. Raise ValueError for missing or unneeded ones, other rows, shapes or dtypes,
    and rows without tokens.
    """
    encoder, attention_mask = passed.encoder, passed.encoder_attention_mask
    if not manifest.encoder:
        if encoder is not None or attention_mask is not None:
            raise errors.expected("no encoder for a model that reads none", "one", "leave it out")
        return None
    if encoder is None:
        rule = "encoder=, the outputs of the encoder for each row"
        raise errors.expected(rule, "none", "run the encoder's artefact on the source first")
    key_values = manifest.encoder[1:]
    sizes = [(int(value.axes[1]), int(value.axes[3])) for value in key_values]  # K and D of each
    numbers = sum(heads * size for heads, size in sizes)
    axes = ("batch_size", "encoder_sequence_length", numbers)
    value = Value("encoder", manifest.passed_dtype, axes)
    tokens, lengths, _ = align(encoder, attention_mask, value)
    if len(tokens) != count or not lengths.all():
        rule = f"encoder with {count} rows of at least one token"
        got = f"rows of {lengths.tolist()} tokens"
        raise errors.expected(rule, got, "give one row per sequence")
    tokens = tokens[:, : lengths.max()]
    inside = np.arange(tokens.shape[1])[None] < lengths[:, None]
    arrays, begin = {MASK: inside.astype(np.int64)}, 0
    for value, (heads, size) in zip(key_values, sizes, strict=True):
        part = tokens[:, :, begin : begin + heads * size].reshape(count, -1, heads, size)
        arrays[value.name] = np.ascontiguousarray(part.transpose(0, 2, 1, 3))
        begin += heads * size
    return EncoderOutputs(arrays)


def _padded(array: np.ndarray, length: int) -> np.ndarray:
    """Pad [B,Q] or [B,K,Q,D] with zeros to Q = length."""
    widths = [(0, 0)] * array.ndim
    axis = min(2, array.ndim - 1)
    widths[axis] = (0, length - array.shape[axis])
    return np.pad(array, widths)
