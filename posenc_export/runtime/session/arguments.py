"""Arguments of session calls: checked against the model and the caches, and converted to one form.

Shapes: B batch, S columns, E model width.
"""

from dataclasses import dataclass
from typing import Any, Dict, List, Optional, Sequence, Tuple, Union

import numpy as np

from posenc_export.runtime.artefact.manifest import Manifest, Value

Rows = Union[np.ndarray, Sequence[Any]]
TokenAttributes = Dict[
    str, List[np.ndarray]
]  # coordinates and token types by graph input: for each row [n,count] int64
Numbers = Union[None, int, Sequence[int], np.ndarray]  # one number, or one per row
LARGEST = np.iinfo(np.int64).max
SHOWN = 200  # most characters of an argument that an error message quotes


@dataclass(frozen=True)
class PrefillArguments:
    """Checked arguments of a prefill, without padding."""

    tokens: List[np.ndarray]  # valid tokens of each row, [count] or [count,E]
    attributes: TokenAttributes  # attributes of these tokens
    counts: np.ndarray  # number of tokens of each row [B]
    columns: List[np.ndarray]  # columns of these tokens in the caller's input, for each row [count]
    shape: Tuple[int, ...]  # B and S of the caller's input
    chunk: int  # number of tokens of a row to feed at a time
    # Number of last tokens of each row whose outputs are requested, at most the length of the
    # longest row; 0 for all tokens.
    logits_to_keep: int

    @property
    def longest(self) -> int:
        """Number of tokens of the longest row that are fed at a time."""
        return min(self.chunk, int(self.counts.max()))

    def requested_in(self, begin: int, end: int) -> np.ndarray:
        """Return how many of the tokens begin .. end - 1 of each row have their outputs
        requested [B]; these are the last ones of the range.
        """
        in_range = np.clip(self.counts - begin, 0, end - begin)
        if not self.logits_to_keep:
            return in_range
        after_range = np.maximum(self.counts - end, 0)
        return np.clip(self.logits_to_keep - after_range, 0, in_range)

    def padded_outputs(self, chunks: Sequence[Sequence[np.ndarray]]) -> np.ndarray:
        """Join the outputs of chunks, one array [count,*] for each row, to [B,S,*] with zeros at
        padding.

        With logits_to_keep = n the result is [B,n,*], aligned to the last column, with zeros in
        front.
        """
        count, first = self.logits_to_keep or self.shape[1], chunks[0][0]
        result = np.zeros((self.shape[0], count, first.shape[-1]), first.dtype)
        for row, columns in enumerate(self.columns):
            outputs = chunks[0][row]
            if len(chunks) > 1:
                outputs = np.concatenate([chunk[row] for chunk in chunks])
            if self.logits_to_keep:
                columns = np.arange(count - len(outputs), count)
            result[row, columns] = outputs
        return result


def check_prefill(
    manifest: Manifest,
    inputs: Rows,
    attention_mask: Optional[np.ndarray],
    chunk: Optional[int],
    grid: Optional[np.ndarray],
    token_types: Optional[np.ndarray],
    logits_to_keep: Optional[int],
) -> PrefillArguments:
    """Check the arguments of Session.prefill. Raise ValueError if there are no rows, or a shape,
    dtype, id or number is not allowed.
    """
    columns, padded = align(inputs, attention_mask, manifest.inputs[0])
    tokens = [padded[row, valid] for row, valid in enumerate(columns)]
    if not tokens:
        raise ValueError(
            "session: expected at least one row, got none; give [B,S] tokens or a list of rows"
        )
    counts = np.array([len(row) for row in tokens], np.int64)
    chunk = at_least("chunk", manifest.chunk if chunk is None else chunk, 1)
    logits_to_keep = at_least("logits_to_keep", 0 if logits_to_keep is None else logits_to_keep, 0)
    if manifest.vocabulary:
        check_tokens(manifest.vocabulary, tokens)
    attributes = _attributes(grid, token_types, manifest, columns, padded.shape[:2])
    longest = int(counts.max())
    if not manifest.states or chunk > longest:  # a bidirectional model reads whole rows
        chunk = max(longest, 1)
    return PrefillArguments(
        tokens, attributes, counts, columns, padded.shape[:2], chunk, min(logits_to_keep, longest)
    )


def at_least(name: str, value: Any, least: int) -> int:
    """Return a whole number of at least `least`, or raise ValueError."""
    if isinstance(value, bool) or not isinstance(value, (int, np.integer)) or value < least:
        raise ValueError(
            f"session: expected {name} to be a whole number of at least {least}, got "
            f"{short_repr(value)}"
        )
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
        raise ValueError(
            f"session: expected {name} to be one array, got rows of different shapes: "
            f"{short_repr(value)}"
        ) from None


def check_tokens(vocabulary: int, rows: Sequence[np.ndarray]) -> None:
    """Raise ValueError unless all ids are in 0 .. vocabulary - 1; the message gives the smallest
    and the largest id of a row.
    """
    for row in rows:
        if row.size and (row.min() < 0 or row.max() >= vocabulary):
            raise ValueError(
                f"session: expected token ids 0 .. {vocabulary - 1}, got {int(row.min())} .. "
                f"{int(row.max())}; use the model's own tokenizer"
            )


def align(
    inputs: Rows, attention_mask: Optional[np.ndarray], value: Value
) -> Tuple[List[np.ndarray], np.ndarray]:
    """Return the columns of the valid tokens of each row, and the rows as one array [B,S] or
    [B,S,E] of value's dtype.

    Raises:
        ValueError: dtype or shape differ from the graph input, the mask has another shape, or it
            has values other than 0 and 1.
    """
    padded, lengths = (
        _checked_array(inputs, value)
        if isinstance(inputs, np.ndarray)
        else _padded_rows(inputs, value)
    )
    inside = np.arange(padded.shape[1])[None] < lengths[:, None]
    if attention_mask is not None:
        mask = array_of("attention_mask", attention_mask)
        if mask.shape != inside.shape:
            raise ValueError(
                f"session: expected attention_mask of shape {list(inside.shape)} as the "
                f"inputs, got {list(mask.shape)}"
            )
        if not ((mask == 0) | (mask == 1)).all():
            raise ValueError(
                "session: expected attention_mask to be 1 at tokens and 0 at padding, got "
                f"{mask.min()} .. {mask.max()}"
            )
        inside &= mask == 1
    return [np.flatnonzero(row) for row in inside], padded


def per_row(name: str, numbers: Numbers, rows: int) -> np.ndarray:
    """Convert one whole number below 2^63, or one per row, to [B] int64. None is 0. Raise
    ValueError for anything else.
    """
    array = array_of(name, 0 if numbers is None else numbers)
    if (
        array.dtype.kind not in "iu"
        or array.shape not in ((), (rows,))
        or (array.size and int(array.max()) > LARGEST)
    ):
        raise ValueError(
            f"session: expected {name} to be a whole number below 2^63, or one for each of "
            f"{rows} rows, got {short_repr(numbers)}"
        )
    return np.full((rows,), array, np.int64)


def starts(
    manifest: Manifest, first: np.ndarray, length: np.ndarray, counts: np.ndarray, start: Numbers
) -> np.ndarray:
    """Check `start` of a prefill and return the position of the first token in the cache, or of the
    first one to read, of each row [B] int64.

    Args:
        first, length: of the rows in the cache: position of the first token, and number of tokens.
        counts: number of tokens that each row reads.

    Raises:
        ValueError: other rows than in the cache, a position where a row with tokens does not
            continue, a position other than 0 with signature mask.
    """
    asked, count = per_row("start", start, len(counts)), len(counts)
    if length.any():
        if count != len(length):
            raise ValueError(
                f"session: expected {len(length)} rows as in the cache, got {count}; reset first"
            )
        following = first + length
        if start is not None and (asked != following)[counts > 0].any():
            rule = (
                f"start {short_repr(following.tolist())}, where rows of "
                f"{short_repr(length.tolist())} cached tokens continue"
            )
            raise ValueError(
                f"session: expected {rule}, got {short_repr(start)}; leave start out, or "
                "reset first"
            )
        return first
    if manifest.signature == "mask" and asked.any():
        raise ValueError(
            f"session: expected start 0 for signature mask, got {short_repr(start)}; export "
            "with signature positions"
        )
    return first if start is None and count == len(length) else asked


def check_room(
    manifest: Manifest, capacity: int, start: np.ndarray, length: np.ndarray, counts: np.ndarray
) -> None:
    """Raise ValueError unless `counts` [B] more tokens fit into the range of positions and into
    in-place caches of `capacity` slots.
    """
    ends = [
        sum(map(int, row)) for row in zip(start, length, counts, strict=True)
    ]  # Python integers do not overflow
    for position in (max(ends) - 1, int(start.max()), int(start.min())):
        if not 0 <= position < manifest.max_positions:
            # Rewinding helps if the rows fit without the tokens in the cache.
            fits = int((start + counts).max()) <= manifest.max_positions
            shorter = f"give shorter rows{' or an earlier start' if start.any() else ''}"
            remedy = f"{'rewind' if manifest.states and fits else shorter}, or export"
            grid = (
                ", which bounds the tokens of a row and their coordinates" if manifest.axes else ""
            )
            raise ValueError(
                f"session: expected positions 0 .. {manifest.max_positions - 1}, got "
                f"{position}; {remedy} with larger max_positions{grid}"
            )
    longest = int((length + counts).max())
    if any(state.update == "in_place" for state in manifest.states) and longest > capacity:
        raise ValueError(
            f"session: expected at most {capacity} tokens of a row in the cache, got "
            f"{longest}; open the session with a larger capacity"
        )


def room(manifest: Manifest, capacity: int, start: np.ndarray, length: np.ndarray) -> np.ndarray:
    """Return how many more tokens each row [B] int64 can read within the range of positions and
    in-place caches of `capacity` slots.
    """
    left = manifest.max_positions - start - length
    return (
        np.minimum(left, capacity - length)
        if any(state.update == "in_place" for state in manifest.states)
        else left
    )


def check_read_out(manifest: Manifest, given: PrefillArguments) -> PrefillArguments:
    """Return the arguments of Session.read_out. Raise ValueError if the model has no second
    output, or a row has no tokens.
    """
    if len(manifest.outputs) < 2:
        rule = "expected an encoder with a second output, such as sentence_embedding, for read_out"
        raise ValueError(
            f"session: {rule}, got kind {manifest.kind} with {manifest.outputs[0].name}; "
            "call prefill, or export a sentence-transformers folder"
        )
    if not given.counts.all():
        raise ValueError(
            "session: expected at least one token in every row, got rows of "
            f"{given.counts.tolist()} tokens; leave empty rows out"
        )
    return given


def check_row(row: Any, rows: int) -> None:
    """Raise ValueError unless there is a row of this index."""
    if isinstance(row, bool) or not isinstance(row, (int, np.integer)) or not 0 <= row < rows:
        raise ValueError(f"session: expected a row index 0 .. {rows - 1}, got {short_repr(row)}")


def check_has_cache(manifest: Manifest, call: str) -> None:
    """Raise ValueError if a call needs a cache and the model is bidirectional."""
    if not manifest.states:
        raise ValueError(
            f"session: expected a model with a cache for {call}, got a bidirectional model, "
            "which reads whole rows; call prefill"
        )


def check_rows_are_independent(manifest: Manifest, call: str) -> None:
    """Raise ValueError unless rows can be added and removed one by one: the model has a cache,
    and its rows do not share cache columns.
    """
    check_has_cache(manifest, call)
    if manifest.layout == "columns":
        raise ValueError(
            f"session: expected rows with cache slots of their own for {call}, got target "
            f"{manifest.target} with signature {manifest.signature}, "
            "whose rows share columns; export target ort, onnx-static or torchscript with "
            "signature positions"
        )


def _attributes(
    grid: Optional[np.ndarray],
    token_types: Optional[np.ndarray],
    manifest: Manifest,
    valid: Sequence[np.ndarray],
    shape: Tuple[int, ...],
) -> TokenAttributes:
    """Check grid [axes,B,S] and token types [B,S], as far as given, and return their values at
    the valid tokens of each row.
    """
    attributes: TokenAttributes = {}
    if grid is not None:
        if not manifest.axes:
            raise ValueError(
                "session: expected an encoding with coordinates for grid, got an encoding "
                "without; leave grid out"
            )
        attributes["grid"] = _numbers(
            "grid", grid, (manifest.axes, *shape), manifest.max_positions, valid
        )
    if token_types is not None:
        segments = manifest.segments
        if not segments:
            raise ValueError(
                "session: expected a model with segments for token_types, got kind "
                f"{manifest.kind} without; leave token_types out"
            )
        attributes["token_type_ids"] = _numbers(
            "token_types", array_of("token_types", token_types)[None], (1, *shape), segments, valid
        )
    return attributes


def _numbers(
    name: str, value: Any, shape: Tuple[int, ...], limit: int, valid: Sequence[np.ndarray]
) -> List[np.ndarray]:
    """Check an argument [n,B,S] and return its values at the valid tokens of each row [n,count]
    int64.
    """
    numbers = array_of(name, value)
    if numbers.shape != shape or numbers.dtype.kind not in "iu":
        raise ValueError(
            f"session: expected {name} of shape {list(shape)} with whole numbers, got shape "
            f"{list(numbers.shape)} {numbers.dtype}"
        )
    rows = [numbers[:, row, columns] for row, columns in enumerate(valid)]
    for row in rows:
        if row.size and not (0 <= row.min() and row.max() < limit):
            raise ValueError(
                f"session: expected {name} in 0 .. {limit - 1}, got {row.min()} .. "
                f"{row.max()}; export a larger range, or give smaller numbers"
            )
    return [row.astype(np.int64) for row in rows]


def _checked_array(inputs: np.ndarray, value: Value) -> Tuple[np.ndarray, np.ndarray]:
    """Return inputs [B,S,*] and the length of each row. Ids may have any integer dtype."""
    if inputs.dtype.kind in "iu" and np.dtype(value.dtype).kind == "i":
        inputs = inputs.astype(value.dtype, copy=False)
    if inputs.dtype != np.dtype(value.dtype):
        raise ValueError(
            f"session: expected {value.name} of dtype {value.dtype}, got {inputs.dtype}; "
            f"{_dtype_remedy(value, inputs.dtype)}"
        )
    if inputs.ndim != len(value.axes) or inputs.shape[2:] != value.axes[2:]:
        raise ValueError(
            f"session: expected {value.name} of shape {list(value.axes)}, got "
            f"{list(inputs.shape)}; {_shape_remedy(value, inputs.ndim)}"
        )
    return inputs, np.full(len(inputs), inputs.shape[1])


def _dtype_remedy(value: Value, dtype: np.dtype) -> str:
    if np.dtype(value.dtype).kind == "i" and dtype.kind == "f":
        return "pass token ids"
    if np.dtype(value.dtype).kind == "f" and dtype.kind in "iu":
        return f"this model reads {value.name}, not token ids"
    return "convert it with astype"


def _shape_remedy(value: Value, axes: int) -> str:
    if axes == len(value.axes) - 1:
        return "add an axis of rows, as in inputs[None]"
    return f"pass an array with {len(value.axes)} axes and the sizes of the model"


def _padded_rows(inputs: Sequence[Any], value: Value) -> Tuple[np.ndarray, np.ndarray]:
    """Return rows of different lengths as one array [B,S,*] with zeros at its right, and the
    length of each row.
    """
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
        raise ValueError(
            f"session: expected {value.name} of dtype {value.dtype}, got a row of "
            f"{array.dtype}; {_dtype_remedy(value, array.dtype)}"
        )
    if array.ndim != len(value.axes) - 1 or array.shape[1:] != value.axes[2:]:
        raise ValueError(
            f"session: expected rows of {value.name} of shape {list(value.axes[1:])}, got "
            f"{list(array.shape)}"
        )
    return array.astype(value.dtype)
