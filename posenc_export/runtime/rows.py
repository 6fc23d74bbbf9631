"""What callers hand to a session, checked and brought to one form.

Shapes: B batch, S columns, E model width.
"""

from dataclasses import dataclass
from typing import Any, Dict, List, Optional, Sequence, Tuple, Union

import numpy as np

from posenc_export.runtime.manifest import Manifest, Value

Rows = Union[np.ndarray, Sequence[Any]]
Beside = Dict[str, List[np.ndarray]]  # whole numbers that stand beside the tokens: of each row [n,count]
Numbers = Union[None, int, Sequence[int], np.ndarray]
LARGEST = np.iinfo(np.int64).max
SHOWN = 200  # characters of what a caller gave, in a refusal


@dataclass(frozen=True)
class Given:
    """Rows that a caller handed in, checked, their valid tokens in front.

    Args:
        tokens: of each row [count] or [count,E].
        numbers: what stands beside them.
        counts: tokens of each row [B].
        columns: where they stood in what was handed in, of each row [count].
        shape: B and S of what was handed in.
        chunk: tokens of a row to be fed at a time.
        logits_to_keep: how many of the last tokens of each row have their outputs wanted, at most those of the longest row; 0 for all.
    """

    tokens: List[np.ndarray]
    numbers: Beside
    counts: np.ndarray
    columns: List[np.ndarray]
    shape: Tuple[int, ...]
    chunk: int
    logits_to_keep: int

    def kept_of(self, begin: int, end: int) -> np.ndarray:
        """How many of the tokens begin .. end - 1 of each row have their outputs wanted [B]: the last ones of them."""
        here = np.clip(self.counts - begin, 0, end - begin)
        if not self.logits_to_keep:
            return here
        behind = np.maximum(self.counts - end, 0)
        return np.clip(self.logits_to_keep - behind, 0, here)

    def spread(self, outputs: Sequence[Sequence[np.ndarray]]) -> np.ndarray:
        """Outputs of each row, by chunk [count,*], as one array [B,S,*] with zeros at padding; of the last tokens alone as [B,n,*] with zeros in front."""
        count = self.logits_to_keep or self.shape[1]
        result = np.zeros((self.shape[0], count, outputs[0][0].shape[-1]), outputs[0][0].dtype)
        for row, columns in enumerate(self.columns):
            made = np.concatenate(outputs[row])
            result[row, np.arange(count - len(made), count) if self.logits_to_keep else columns] = made
        return result


def take(
    manifest: Manifest,
    inputs: Rows,
    attention_mask: Optional[np.ndarray],
    chunk: Optional[int],
    grid: Optional[np.ndarray],
    token_types: Optional[np.ndarray],
    logits_to_keep: Optional[int],
) -> Given:
    """What a caller handed in; arguments as Session.prefill.

    Raises:
        ValueError: no rows, shapes, dtypes, ids or numbers that do not fit.
    """
    columns, padded = align(inputs, attention_mask, manifest.inputs[0])
    tokens = [padded[row, valid] for row, valid in enumerate(columns)]
    if not tokens:
        raise ValueError("session: expected at least one row, got none")
    counts = np.array([len(row) for row in tokens], np.int64)
    size = _at_least("chunk", manifest.chunk if chunk is None else chunk, 1)
    kept = _at_least("logits_to_keep", 0 if logits_to_keep is None else logits_to_keep, 0)
    vocabulary = manifest.vocabulary
    if vocabulary:
        check_tokens(vocabulary, tokens)
    numbers = beside(grid, token_types, manifest, columns, padded.shape[:2])
    longest = int(counts.max())
    # A bidirectional model sees a row at once.
    fed = min(size, max(longest, 1)) if manifest.states else max(longest, 1)
    return Given(tokens, numbers, counts, columns, padded.shape[:2], fed, min(kept, longest))


def _at_least(name: str, value: Any, least: int) -> int:
    if isinstance(value, bool) or not isinstance(value, (int, np.integer)) or value < least:
        raise ValueError(f"session: {name} is a whole number of at least {least}, got {shown(value)}")
    return int(value)


def shown(value: Any) -> str:
    """A value that a caller gave, for a refusal: one line, at most SHOWN characters."""
    line = " ".join(repr(value).split())
    return line if len(line) <= SHOWN else f"{line[: SHOWN - 3]}..."


def array_of(name: str, given: Any) -> np.ndarray:
    """given as an array.

    Raises:
        ValueError: rows of different lengths, or what else is no array.
    """
    try:
        return np.asarray(given)
    except ValueError:
        raise ValueError(f"session: {name} is one array, got rows of different shapes: {shown(given)}") from None


def check_tokens(vocabulary: int, rows: Sequence[np.ndarray]) -> None:
    """Refuse ids outside 0 .. vocabulary - 1.

    Raises:
        ValueError: the lowest and the highest id of the row.
    """
    for row in rows:
        if row.size and (row.min() < 0 or row.max() >= vocabulary):
            raise ValueError(f"session: token ids are 0 .. {vocabulary - 1}, got {int(row.min())} .. {int(row.max())}")


def align(inputs: Rows, attention_mask: Optional[np.ndarray], value: Value) -> Tuple[List[np.ndarray], np.ndarray]:
    """Columns of the valid tokens of each row, and the rows as one array [B,S] or [B,S,E] of value's dtype.

    Raises:
        ValueError: another dtype or shape than the graph input has, a mask of another shape or other values than 0 and 1.
    """
    padded, lengths = _whole(inputs, value) if isinstance(inputs, np.ndarray) else _stacked(inputs, value)
    inside = np.arange(padded.shape[1])[None] < lengths[:, None]
    if attention_mask is not None:
        mask = array_of("attention_mask", attention_mask)
        if mask.shape != inside.shape:
            raise ValueError(f"session: attention_mask is {list(inside.shape)} as the inputs, got {list(mask.shape)}")
        if not ((mask == 0) | (mask == 1)).all():
            raise ValueError(f"session: attention_mask is 1 at tokens and 0 at padding, got {mask.min()} .. {mask.max()}")
        inside &= mask == 1
    return [np.flatnonzero(row) for row in inside], padded


def per_row(name: str, numbers: Numbers, rows: int) -> np.ndarray:
    """One whole number, or one per row, as [B] int64; None is 0.

    Raises:
        ValueError: fractions, numbers beyond 64 bits, or another count than there are rows.
    """
    given = array_of(name, 0 if numbers is None else numbers)
    if given.dtype.kind not in "iu" or given.shape not in ((), (rows,)) or (given.size and int(given.max()) > LARGEST):
        raise ValueError(f"session: {name} is a whole number below 2^63 or one for each of {rows} rows, got {shown(numbers)}")
    return np.broadcast_to(given, (rows,)).astype(np.int64)


def beside(grid: Optional[np.ndarray], token_types: Optional[np.ndarray], manifest: Manifest, valid: Sequence[np.ndarray], shape: Tuple[int, ...]) -> Beside:
    """What is given of grid [axes,B,S] and token types [B,S], for the valid tokens of each row.

    Raises:
        ValueError: an encoding without coordinates, a model without segments, another shape, a dtype of no whole numbers, numbers outside the range.
    """
    found: Beside = {}
    if grid is not None:
        if not manifest.axes:
            raise ValueError("session: grid is for encodings with coordinates of their own, got one that counts positions; leave it out")
        found["grid"] = _numbers("grid", grid, (manifest.axes, *shape), manifest.max_positions, valid)
    if token_types is not None:
        segments = manifest.segments
        if not segments:
            raise ValueError(f"session: token_types are for encoders with segments, got a {manifest.kind}; leave them out")
        found["token_type_ids"] = _numbers("token_types", array_of("token_types", token_types)[None], (1, *shape), segments, valid)
    return found


def _numbers(name: str, given: Any, wanted: Tuple[int, ...], limit: int, valid: Sequence[np.ndarray]) -> List[np.ndarray]:
    """given [n,B,S], checked, as [n,count] of each row."""
    numbers = array_of(name, given)
    if numbers.shape != wanted or numbers.dtype.kind not in "iu":
        raise ValueError(f"session: {name} is {list(wanted)} whole numbers, got {list(numbers.shape)} {numbers.dtype}")
    rows = [numbers[:, row, columns] for row, columns in enumerate(valid)]
    for row in rows:
        if row.size and not (0 <= row.min() and row.max() < limit):
            raise ValueError(f"session: {name} is 0 .. {limit - 1}, got {row.min()} .. {row.max()}; give others, or export a larger range")
    return [row.astype(np.int64) for row in rows]


def _whole(inputs: np.ndarray, value: Value) -> Tuple[np.ndarray, np.ndarray]:
    if inputs.dtype != np.dtype(value.dtype):
        raise ValueError(f"session: inputs are {value.dtype}, got {inputs.dtype}")
    if inputs.ndim != len(value.axes) or inputs.shape[2:] != value.axes[2:]:
        raise ValueError(f"session: {value.name} is {list(value.axes)}, got shape {list(inputs.shape)}")
    return inputs, np.full(len(inputs), inputs.shape[1])


def _stacked(inputs: Sequence[Any], value: Value) -> Tuple[np.ndarray, np.ndarray]:
    rows = [_row(row, value) for row in inputs]
    lengths = np.array([len(row) for row in rows], np.int64)
    padded = _zeros((len(rows), int(lengths.max(initial=0))), value)
    for index, row in enumerate(rows):
        padded[index, : len(row)] = row
    return padded, lengths


def _zeros(leading: Tuple[int, ...], value: Value) -> np.ndarray:
    return np.zeros([*leading, *(int(axis) for axis in value.axes[2:])], value.dtype)


def _row(row: Any, value: Value) -> np.ndarray:
    array = array_of(f"a row of {value.name}", row)
    if not array.size and array.ndim:
        return _zeros((0,), value)
    if not np.can_cast(array.dtype, value.dtype, "same_kind"):
        raise ValueError(f"session: inputs are {value.dtype}, got {array.dtype}")
    if array.ndim != len(value.axes) - 1 or array.shape[1:] != value.axes[2:]:
        raise ValueError(f"session: a row of {value.name} is {list(value.axes[1:])}, got shape {list(array.shape)}")
    return array.astype(value.dtype)
