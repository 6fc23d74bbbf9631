"""What a decoder keeps of the sequence that an encoder has read: keys and values of each row, given once, read by every call.

Shapes: B batch, Q tokens of the longest encoder sequence, N numbers of a token, K kv heads, D head size.
"""

from dataclasses import dataclass
from typing import Any, Dict, Optional

import numpy as np

from posenc_export.runtime import rows
from posenc_export.runtime.schema import Manifest, Value

MASK = "encoder_attention_mask"


@dataclass(frozen=True)
class Encoded:
    """The graph inputs of Manifest.encoder for all rows.

    Args:
        arrays: encoder_attention_mask [B,Q] int64 first, then the keys and values [B,K,Q,D].
    """

    arrays: Dict[str, np.ndarray]

    def of(self, window: slice) -> Dict[str, np.ndarray]:
        """The inputs of some rows."""
        return {name: array[window] for name, array in self.arrays.items()}

    def joined(self, other: "Encoded") -> "Encoded":
        """With the rows of another one behind; shorter sequences are padded."""
        most = max(self._length, other._length)
        return Encoded({name: np.concatenate((_padded(array, most), _padded(other.arrays[name], most))) for name, array in self.arrays.items()})

    def ordered(self, order: np.ndarray) -> "Encoded":
        """The rows of these indices."""
        return Encoded({name: array[order] for name, array in self.arrays.items()})

    @property
    def _length(self) -> int:
        return self.arrays[MASK].shape[1]


def take(manifest: Manifest, given: Any, attention_mask: Optional[np.ndarray], count: int) -> Optional[Encoded]:
    """What a caller handed in for `count` rows; None for a decoder without an encoder.

    Args:
        given: outputs of the encoder, [B,Q,N] or a list of rows [q,N].
        attention_mask: [B,Q], 0 at padding of the encoder's sequence.

    Raises:
        ValueError: none where the decoder reads one, or some where it does not; another number of rows, shape or dtype; a row without tokens.
    """
    if not manifest.encoder:
        if given is not None or attention_mask is not None:
            raise ValueError("session: expected no encoder for a model that reads none, got one; leave it out")
        return None
    if given is None:
        raise ValueError("session: expected encoder=, the outputs of the encoder for each row, got none; run the encoder's artefact on the source first")
    numbers = sum(_row_size(value) for value in manifest.encoder[1:])
    value = Value("encoder", manifest.dtype, ("batch_size", "encoder_sequence_length", numbers))
    columns, padded = rows.align(given, attention_mask, value)
    lengths = [len(valid) for valid in columns]
    if len(columns) != count or not all(lengths):
        raise ValueError(f"session: expected encoder with {count} rows of at least one token, got rows of {lengths} tokens")
    tokens = np.zeros((count, max(lengths), numbers), manifest.dtype)
    for row, valid in enumerate(columns):
        tokens[row, : len(valid)] = padded[row, valid]
    mask = (np.arange(tokens.shape[1])[None] < np.array(lengths)[:, None]).astype(np.int64)
    arrays, at = {MASK: mask}, 0
    for value in manifest.encoder[1:]:
        heads, size = int(value.axes[1]), int(value.axes[3])
        part = tokens[:, :, at : at + heads * size].reshape(count, -1, heads, size)
        arrays[value.name] = np.ascontiguousarray(part.transpose(0, 2, 1, 3))
        at += heads * size
    return Encoded(arrays)


def for_call(
    manifest: Manifest, kept: Optional[Encoded], held: np.ndarray, count: int, given: Any, attention_mask: Optional[np.ndarray]
) -> Optional[Encoded]:
    """What a prefill of `count` rows reads: what is handed in, or what the rows have.

    Args:
        kept: of the rows of the session.
        held: tokens of each of them.
        given, attention_mask: as `take`.

    Raises:
        ValueError: as `take`; an encoder for rows that have tokens in the cache.
    """
    if given is None and attention_mask is None and kept is not None and len(held) == count:
        return kept
    if held.any() and given is not None:
        raise ValueError(f"session: expected encoder with the first tokens of its rows, got it with {held.tolist()} tokens cached; reset first")
    return take(manifest, given, attention_mask, count)


def _row_size(value: Value) -> int:
    """Numbers of a token K*D."""
    return int(value.axes[1]) * int(value.axes[3])


def _padded(array: np.ndarray, length: int) -> np.ndarray:
    """Zeros behind the tokens of [B,Q] or [B,K,Q,D] up to Q = length."""
    axis = min(2, array.ndim - 1)
    widths = [(0, length - array.shape[axis] if index == axis else 0) for index in range(array.ndim)]
    return np.pad(array, widths)
