"""Encoder outputs that a decoder reads: cross-attention keys and values of each row, given once and read by every call.

Shapes: B batch, Q tokens of the longest encoder sequence, N numbers per token, K kv heads, D head size.
"""

from dataclasses import dataclass
from typing import Any, Dict, Optional

import numpy as np

from posenc_export.runtime.artefact.schema import Manifest, Value
from posenc_export.runtime.session import arguments

MASK = "encoder_attention_mask"


@dataclass(frozen=True)
class EncoderOutputs:
    """The graph inputs listed in Manifest.encoder, for all rows.

    Args:
        arrays: encoder_attention_mask [B,Q] int64 first, then the keys and values [B,K,Q,D].
    """

    arrays: Dict[str, np.ndarray]

    def select(self, window: slice) -> Dict[str, np.ndarray]:
        """Return the graph inputs of a range of rows."""
        return {name: array[window] for name, array in self.arrays.items()}

    def joined(self, other: "EncoderOutputs") -> "EncoderOutputs":
        """Return these rows followed by those of `other`. Shorter sequences are padded."""
        most = max(self._length, other._length)
        return EncoderOutputs({name: np.concatenate((_padded(array, most), _padded(other.arrays[name], most))) for name, array in self.arrays.items()})

    def ordered(self, order: np.ndarray) -> "EncoderOutputs":
        """Return the rows with these indices."""
        return EncoderOutputs({name: array[order] for name, array in self.arrays.items()})

    @property
    def _length(self) -> int:
        return self.arrays[MASK].shape[1]


def take(manifest: Manifest, given: Any, attention_mask: Optional[np.ndarray], count: int) -> Optional[EncoderOutputs]:
    """Check the encoder outputs that a caller passes for `count` rows. Returns None for a model that reads no encoder.

    Args:
        given: outputs of the encoder, [B,Q,N] or a list of rows [q,N].
        attention_mask: [B,Q], 0 at padding of the encoder's sequence.

    Raises:
        ValueError: encoder outputs are missing for a decoder that reads them or given for a model that does not; the number of rows, the shape or the dtype
            differs; a row has no tokens.
    """
    if not manifest.encoder:
        if given is not None or attention_mask is not None:
            raise ValueError("session: expected no encoder for a model that reads none, got one; leave it out")
        return None
    if given is None:
        raise ValueError("session: expected encoder=, the outputs of the encoder for each row, got none; run the encoder's artefact on the source first")
    numbers = sum(_row_size(value) for value in manifest.encoder[1:])
    value = Value("encoder", manifest.passed_dtype, ("batch_size", "encoder_sequence_length", numbers))
    columns, padded = arguments.align(given, attention_mask, value)
    lengths = [len(valid) for valid in columns]
    if len(columns) != count or not all(lengths):
        raise ValueError(f"session: expected encoder with {count} rows of at least one token, got rows of {lengths} tokens; give one row per sequence")
    tokens = np.zeros((count, max(lengths), numbers), manifest.passed_dtype)
    for row, valid in enumerate(columns):
        tokens[row, : len(valid)] = padded[row, valid]
    mask = (np.arange(tokens.shape[1])[None] < np.array(lengths)[:, None]).astype(np.int64)
    arrays, at = {MASK: mask}, 0
    for value in manifest.encoder[1:]:
        heads, size = int(value.axes[1]), int(value.axes[3])
        part = tokens[:, :, at : at + heads * size].reshape(count, -1, heads, size)
        arrays[value.name] = np.ascontiguousarray(part.transpose(0, 2, 1, 3))
        at += heads * size
    return EncoderOutputs(arrays)


def for_call(
    manifest: Manifest, kept: Optional[EncoderOutputs], held: np.ndarray, count: int, given: Any, attention_mask: Optional[np.ndarray]
) -> Optional[EncoderOutputs]:
    """Return the encoder outputs for a prefill of `count` rows: those that the caller passes, or those that the rows already have.

    Args:
        kept: encoder outputs of the session's rows.
        held: number of tokens of each row of the session [B].
        given, attention_mask: as for `take`.

    Raises:
        ValueError: as for `take`; encoder outputs are given for rows that have tokens in the cache.
    """
    if given is None and attention_mask is None and kept is not None and len(held) == count:
        return kept
    if held.any() and given is not None:
        raise ValueError(f"session: expected encoder only with the first tokens of a row, got it with {held.tolist()} tokens cached; reset first")
    return take(manifest, given, attention_mask, count)


def _row_size(value: Value) -> int:
    """Numbers per token, K*D."""
    return int(value.axes[1]) * int(value.axes[3])


def _padded(array: np.ndarray, length: int) -> np.ndarray:
    """Pad [B,Q] or [B,K,Q,D] with zeros to Q = length."""
    axis = min(2, array.ndim - 1)
    widths = [(0, length - array.shape[axis] if index == axis else 0) for index in range(array.ndim)]
    return np.pad(array, widths)
