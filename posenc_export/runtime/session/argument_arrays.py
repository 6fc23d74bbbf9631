"""What callers pass, converted to arrays. Shapes: B batch, S columns, E model width."""

from typing import Any, List, Optional, Sequence, Tuple, Union

import numpy as np

from posenc_export.runtime.artefact.manifest import Value
from posenc_export.runtime.session.errors import expected

Rows = Union[np.ndarray, Sequence[Any]]
Numbers = Union[None, int, Sequence[int], np.ndarray]  # one number, or one per row
LARGEST = np.iinfo(np.int64).max
SHOWN = 200  # most characters of an argument that an error message quotes


def at_least(name: str, value: Any, least: int) -> int:
    """Return a whole number of at least `least`, or raise ValueError."""
    if isinstance(value, bool) or not isinstance(value, (int, np.integer)) or value < least:
        raise expected(f"{name} to be a whole number of at least {least}", short_repr(value))
    return int(value)


def short_repr(value: Any) -> str:
    """Format a caller's value for an error message: one line of at most SHOWN characters."""
    line = " ".join(repr(value).split())
    return line if len(line) <= SHOWN else f"{line[: SHOWN - 3]}..."


def array_of(name: str, value: Any) -> np.ndarray:
    """Convert an argument to an array. Raise ValueError if its rows differ in length."""
    try:
        return np.asarray(value)
    except ValueError:
        got = f"rows of different shapes: {short_repr(value)}"
        raise expected(f"{name} to be one array", got) from None


def check_tokens(vocabulary: int, rows: Sequence[np.ndarray]) -> None:
    """Raise ValueError, with the range of the ids of a row, unless all are 0 .. vocabulary - 1."""
    for row in rows:
        if row.size and (row.min() < 0 or row.max() >= vocabulary):
            got = f"{int(row.min())} .. {int(row.max())}"
            raise expected(f"token ids 0 .. {vocabulary - 1}", got, "use the model's own tokenizer")


def per_row(name: str, numbers: Numbers, rows: int) -> np.ndarray:
    """Convert one whole number below 2^63, or one per row, to [B] int64; None is 0."""
    array = array_of(name, 0 if numbers is None else numbers)
    whole = array.dtype.kind in "iu" and array.shape in ((), (rows,))
    if not whole or (array.size and int(array.max()) > LARGEST):
        rule = f"{name} to be a whole number below 2^63, or one for each of {rows} rows"
        raise expected(rule, short_repr(numbers))
    return np.full((rows,), array, np.int64)


def align(
    inputs: Rows, attention_mask: Optional[np.ndarray], value: Value
) -> Tuple[np.ndarray, np.ndarray, Optional[List[np.ndarray]]]:
    """Return rows [B,S] or [B,S,E] of value's dtype, with their tokens in the first columns and
    zeros behind, the number of tokens of each row [B], and their columns in the inputs; None if
    these are the first ones. An array is returned as it is if it has this form. Raise ValueError
    for another dtype or shape, or a wrong mask.
    """
    converted = _checked_array if isinstance(inputs, np.ndarray) else padded_rows
    padded, counts = converted(inputs, value)
    if attention_mask is None:
        return padded, counts, None
    mask, shape = array_of("attention_mask", attention_mask), padded.shape[:2]
    if mask.shape != shape:
        rule = f"attention_mask of shape {list(shape)} as the inputs"
        raise expected(rule, list(mask.shape))
    if not ((mask == 0) | (mask == 1)).all():
        rule = "attention_mask to be 1 at tokens and 0 at padding"
        raise expected(rule, f"{mask.min()} .. {mask.max()}")
    inside = (np.arange(shape[1])[None] < counts[:, None]) & (mask == 1)
    if inside.all():
        return padded, counts, None
    columns, first = [np.flatnonzero(row) for row in inside], np.zeros_like(padded)
    for row, valid in enumerate(columns):
        first[row, : len(valid)] = padded[row, valid]
    return first, inside.sum(axis=1), columns


def _checked_array(inputs: Any, value: Value) -> Tuple[np.ndarray, np.ndarray]:
    """Return inputs [B,S,*] and the length of each row. Ids may have any integer dtype."""
    inputs = np.asarray(inputs)
    if inputs.dtype.kind in "iu" and np.dtype(value.dtype).kind == "i":
        inputs = inputs.astype(value.dtype, copy=False)
    if inputs.dtype != np.dtype(value.dtype):
        remedy = _dtype_remedy(value, inputs.dtype)
        raise expected(f"{value.name} of dtype {value.dtype}", inputs.dtype, remedy)
    if inputs.ndim != len(value.axes) or inputs.shape[2:] != value.axes[2:]:
        remedy = f"pass an array with {len(value.axes)} axes and the sizes of the model"
        if inputs.ndim == len(value.axes) - 1:
            remedy = "add an axis of rows, as in inputs[None]"
        raise expected(f"{value.name} of shape {list(value.axes)}", list(inputs.shape), remedy)
    # Graphs read contiguous memory, and torch warns of memory that it must not write.
    plain = inputs if inputs.flags.carray else np.array(inputs, order="C", subok=False)
    return plain, np.full(len(inputs), inputs.shape[1])


def _dtype_remedy(value: Value, dtype: np.dtype) -> str:
    if np.dtype(value.dtype).kind == "i" and dtype.kind == "f":
        return "pass token ids"
    if np.dtype(value.dtype).kind == "f" and dtype.kind in "iu":
        return f"this model reads {value.name}, not token ids"
    return "convert it with astype"


def padded_rows(inputs: Any, value: Value) -> Tuple[np.ndarray, np.ndarray]:
    """Return rows of different lengths as [B,S,*], padded on the right, and their lengths."""
    rows = [_row(row, value) for row in inputs]
    lengths = np.array([len(row) for row in rows], np.int64)
    padded = np.zeros((len(rows), int(lengths.max(initial=0)), *value.token_shape), value.dtype)
    for index, row in enumerate(rows):
        padded[index, : len(row)] = row
    return padded, lengths


def _row(row: Any, value: Value) -> np.ndarray:
    array = array_of(f"a row of {value.name}", row)
    if not array.size and array.ndim:
        return np.zeros((0, *value.token_shape), value.dtype)
    ids = array.ndim == 1 and len(value.axes) == 3
    if ids or not np.can_cast(array.dtype, value.dtype, "same_kind"):
        got, remedy = f"a row of {array.dtype}", _dtype_remedy(value, array.dtype)
        raise expected(f"{value.name} of dtype {value.dtype}", got, remedy)
    if array.ndim != len(value.axes) - 1 or array.shape[1:] != value.axes[2:]:
        rule = f"rows of {value.name} of shape {list(value.axes[1:])}"
        raise expected(rule, list(array.shape))
    return array.astype(value.dtype)
