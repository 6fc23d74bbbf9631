"""Check the arguments of session calls and convert them to one form.

Shapes: B batch, S columns, E model width.
"""

from dataclasses import dataclass
from typing import Any, Dict, List, Optional, Sequence, Tuple, Union

import numpy as np

from posenc_export.runtime.artefact.manifest import Manifest, Value

Rows = Union[np.ndarray, Sequence[Any]]
TokenAttributes = Dict[str, List[np.ndarray]]  # coordinates and token types by graph input: for each row [n,count] int64
Numbers = Union[None, int, Sequence[int], np.ndarray]  # one number, or one per row
LARGEST = np.iinfo(np.int64).max
SHOWN = 200  # most characters of an argument that an error message quotes


@dataclass(frozen=True)
class PrefillArguments:
    """Checked arguments of a prefill, without padding.

    Args:
        tokens: valid tokens of each row, [count] or [count,E].
        attributes: attributes of these tokens.
        counts: number of tokens of each row [B].
        columns: columns of these tokens in the caller's input, for each row [count].
        shape: B and S of the caller's input.
        chunk: number of tokens of a row to feed at a time.
        logits_to_keep: number of last tokens of each row whose outputs are requested, at most the length of the longest row; 0 for all tokens.
    """

    tokens: List[np.ndarray]
    attributes: TokenAttributes
    counts: np.ndarray
    columns: List[np.ndarray]
    shape: Tuple[int, ...]
    chunk: int
    logits_to_keep: int

    def kept_of(self, begin: int, end: int) -> np.ndarray:
        """Return how many of the tokens begin .. end - 1 of each row have their outputs requested [B]; these are the last ones of the range."""
        here = np.clip(self.counts - begin, 0, end - begin)
        if not self.logits_to_keep:
            return here
        behind = np.maximum(self.counts - end, 0)
        return np.clip(self.logits_to_keep - behind, 0, here)

    def spread(self, outputs: Sequence[Sequence[np.ndarray]]) -> np.ndarray:
        """Join the outputs of each row, one array [count,*] per chunk, to [B,S,*] with zeros at padding.

        With logits_to_keep = n the result is [B,n,*], aligned to the last column, with zeros in front.
        """
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
) -> PrefillArguments:
    """Check the arguments of Session.prefill.

    Raises:
        ValueError: there are no rows, or a shape, dtype, id or number is not allowed.
    """
    columns, padded = align(inputs, attention_mask, manifest.inputs[0])
    tokens = [padded[row, valid] for row, valid in enumerate(columns)]
    if not tokens:
        raise ValueError("session: expected at least one row, got none; give [B,S] tokens or a list of rows")
    counts = np.array([len(row) for row in tokens], np.int64)
    size = at_least("chunk", manifest.chunk if chunk is None else chunk, 1)
    kept = at_least("logits_to_keep", 0 if logits_to_keep is None else logits_to_keep, 0)
    vocabulary = manifest.vocabulary
    if vocabulary:
        check_tokens(vocabulary, tokens)
    attributes = attributes_of(grid, token_types, manifest, columns, padded.shape[:2])
    longest = int(counts.max())
    # A bidirectional model reads whole rows.
    fed = min(size, max(longest, 1)) if manifest.states else max(longest, 1)
    return PrefillArguments(tokens, attributes, counts, columns, padded.shape[:2], fed, min(kept, longest))


def at_least(name: str, value: Any, least: int) -> int:
    """Return a whole number of at least `least`, or raise ValueError."""
    if isinstance(value, bool) or not isinstance(value, (int, np.integer)) or value < least:
        raise ValueError(f"session: expected {name} to be a whole number of at least {least}, got {short_repr(value)}")
    return int(value)


def short_repr(value: Any) -> str:
    """Format a caller's value for an error message: one line of at most SHOWN characters."""
    line = " ".join(repr(value).split())
    return line if len(line) <= SHOWN else f"{line[: SHOWN - 3]}..."


def array_of(name: str, given: Any) -> np.ndarray:
    """Convert an argument to an array.

    Raises:
        ValueError: the rows differ in length, or the argument cannot be converted.
    """
    try:
        return np.asarray(given)
    except ValueError:
        raise ValueError(f"session: expected {name} to be one array, got rows of different shapes: {short_repr(given)}") from None


def check_tokens(vocabulary: int, rows: Sequence[np.ndarray]) -> None:
    """Check that all ids are in 0 .. vocabulary - 1.

    Raises:
        ValueError: an id is outside; the message gives the smallest and the largest id of its row.
    """
    for row in rows:
        if row.size and (row.min() < 0 or row.max() >= vocabulary):
            raise ValueError(f"session: expected token ids 0 .. {vocabulary - 1}, got {int(row.min())} .. {int(row.max())}; use the model's own tokenizer")


def align(inputs: Rows, attention_mask: Optional[np.ndarray], value: Value) -> Tuple[List[np.ndarray], np.ndarray]:
    """Return the columns of the valid tokens of each row, and the rows as one array [B,S] or [B,S,E] of value's dtype.

    Raises:
        ValueError: dtype or shape differ from the graph input, the mask has another shape, or it has values other than 0 and 1.
    """
    padded, lengths = _whole(inputs, value) if isinstance(inputs, np.ndarray) else _stacked(inputs, value)
    inside = np.arange(padded.shape[1])[None] < lengths[:, None]
    if attention_mask is not None:
        mask = array_of("attention_mask", attention_mask)
        if mask.shape != inside.shape:
            raise ValueError(f"session: expected attention_mask of shape {list(inside.shape)} as the inputs, got {list(mask.shape)}")
        if not ((mask == 0) | (mask == 1)).all():
            raise ValueError(f"session: expected attention_mask to be 1 at tokens and 0 at padding, got {mask.min()} .. {mask.max()}")
        inside &= mask == 1
    return [np.flatnonzero(row) for row in inside], padded


def per_row(name: str, numbers: Numbers, rows: int) -> np.ndarray:
    """Convert one whole number, or one per row, to [B] int64. None is 0.

    Raises:
        ValueError: a number is not whole or exceeds int64, or the count differs from the number of rows.
    """
    given = array_of(name, 0 if numbers is None else numbers)
    if given.dtype.kind not in "iu" or given.shape not in ((), (rows,)) or (given.size and int(given.max()) > LARGEST):
        raise ValueError(f"session: expected {name} to be a whole number below 2^63, or one for each of {rows} rows, got {short_repr(numbers)}")
    return np.full((rows,), given, np.int64)


def starts(manifest: Manifest, first: np.ndarray, held: np.ndarray, counts: np.ndarray, start: Numbers) -> np.ndarray:
    """Check `start` of a prefill and return the position of the first token in the cache, or of the first one to read, of each row [B] int64.

    Args:
        first, held: of the rows in the cache: position of the first token, and number of tokens.
        counts: number of tokens that each row reads.

    Raises:
        ValueError: other rows than in the cache, a position where a row with tokens does not continue, a position other than 0 with signature mask.
    """
    given, count = per_row("start", start, len(counts)), len(counts)
    if held.any():
        if count != len(held):
            raise ValueError(f"session: expected {len(held)} rows as in the cache, got {count}; reset first")
        following = first + held
        if start is not None and (given != following)[counts > 0].any():
            rule = f"start {short_repr(following.tolist())}, where rows of {short_repr(held.tolist())} cached tokens continue"
            raise ValueError(f"session: expected {rule}, got {short_repr(start)}; leave start out, or reset first")
        return first
    if manifest.signature == "mask" and given.any():
        raise ValueError(f"session: expected start 0 for signature mask, got {short_repr(start)}; export with signature positions")
    return first if start is None and count == len(held) else given


def attributes_of(
    grid: Optional[np.ndarray], token_types: Optional[np.ndarray], manifest: Manifest, valid: Sequence[np.ndarray], shape: Tuple[int, ...]
) -> TokenAttributes:
    """Return grid [axes,B,S] and token types [B,S], as far as given, for the valid tokens of each row.

    Raises:
        ValueError: grid is given for an encoding without coordinates, token types for a model without segments; a shape or dtype differs; a number is outside
            its range.
    """
    found: TokenAttributes = {}
    if grid is not None:
        if not manifest.axes:
            raise ValueError("session: expected an encoding with coordinates for grid, got an encoding without; leave grid out")
        found["grid"] = _numbers("grid", grid, (manifest.axes, *shape), manifest.max_positions, valid)
    if token_types is not None:
        segments = manifest.segments
        if not segments:
            raise ValueError(f"session: expected a model with segments for token_types, got kind {manifest.kind} without; leave token_types out")
        found["token_type_ids"] = _numbers("token_types", array_of("token_types", token_types)[None], (1, *shape), segments, valid)
    return found


def _numbers(name: str, given: Any, wanted: Tuple[int, ...], limit: int, valid: Sequence[np.ndarray]) -> List[np.ndarray]:
    """Check an argument [n,B,S] and return its valid tokens for each row [n,count] int64."""
    numbers = array_of(name, given)
    if numbers.shape != wanted or numbers.dtype.kind not in "iu":
        raise ValueError(f"session: expected {name} of shape {list(wanted)} with whole numbers, got shape {list(numbers.shape)} {numbers.dtype}")
    rows = [numbers[:, row, columns] for row, columns in enumerate(valid)]
    for row in rows:
        if row.size and not (0 <= row.min() and row.max() < limit):
            raise ValueError(f"session: expected {name} in 0 .. {limit - 1}, got {row.min()} .. {row.max()}; export a larger range, or give smaller numbers")
    return [row.astype(np.int64) for row in rows]


def _whole(inputs: np.ndarray, value: Value) -> Tuple[np.ndarray, np.ndarray]:
    if inputs.dtype != np.dtype(value.dtype):
        raise ValueError(f"session: expected {value.name} of dtype {value.dtype}, got {inputs.dtype}; convert it with astype")
    if inputs.ndim != len(value.axes) or inputs.shape[2:] != value.axes[2:]:
        raise ValueError(f"session: expected {value.name} of shape {list(value.axes)}, got {list(inputs.shape)}")
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
        raise ValueError(f"session: expected {value.name} of dtype {value.dtype}, got a row of {array.dtype}; convert it with astype")
    if array.ndim != len(value.axes) - 1 or array.shape[1:] != value.axes[2:]:
        raise ValueError(f"session: expected rows of {value.name} of shape {list(value.axes[1:])}, got {list(array.shape)}")
    return array.astype(value.dtype)
