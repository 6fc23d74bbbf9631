"""Arguments of session calls, checked and converted to arrays.

Shapes: B batch, S columns, E model width, Q tokens of the longest encoder sequence, N numbers per
token, K kv heads, D head size.
"""

from dataclasses import dataclass
from typing import Any, Iterator, NamedTuple, Sequence

import numpy as np

from posenc_export.runtime.artefact.manifest import Manifest, Value
from posenc_export.runtime.session.errors import expected
from posenc_export.shared.refusal import short_repr
from posenc_export.shared.tables import counted

Inputs = np.ndarray | Sequence[Any]  # an array, or a list of rows of different lengths
Numbers = None | int | Sequence[int] | np.ndarray  # one number, or one per row


class RowTokens(NamedTuple):
    """Tokens that consecutive rows read, in the first columns of each row, with zeros behind."""

    rows: slice  # indices of the rows
    x: np.ndarray  # tokens [n,S] or [n,S,E]
    counts: np.ndarray  # number of tokens of each row [n] int64
    planes: dict[str, np.ndarray]  # coordinates and token types by graph input [A,n,S] int64
    # Column of the outputs [n] for the first token of each row; those of negative columns are not
    # requested.
    columns: np.ndarray

    def part(self, some: slice, columns: slice) -> "RowTokens":
        """Return the tokens of some of these rows, and of them those in some columns."""
        first, begin, x = self.rows.start, columns.start, self.x[some, columns]
        planes = {name: plane[:, some, columns] for name, plane in self.planes.items()}
        counts = np.clip(self.counts[some] - begin, 0, x.shape[1])
        rows = slice(first + some.start, first + some.stop)
        return RowTokens(rows, x, counts, planes, self.columns[some] + begin)


@dataclass(frozen=True)
class Prompt:
    """Checked arguments of a prefill, without padding."""

    tokens: RowTokens  # of all rows
    start: Numbers  # as passed, like `encoder`
    encoder: Inputs | None
    # Column of each row's first token in the caller's input [B]; None for the first one
    begins: np.ndarray | None
    chunk: int  # largest number of tokens of a row to feed at a time, at most that of any row
    # Number of last tokens of each row whose outputs are requested, at most the length of the
    # longest row; 0 for all tokens
    logits_to_keep: int

    def chunks(self, first: int, most: int) -> Iterator[RowTokens]:
        """Yield the tokens of each chunk. first: index of the first row in the session. most: limit
        of the tokens of a row in a chunk, beside `chunk`; 0 for none.
        """
        counts = self.tokens.counts
        most, longest, count = min(self.chunk, most or self.chunk), int(counts.max()), len(counts)
        tokens = self.tokens._replace(rows=slice(first, first + count))
        for begin in range(0, longest, most):
            yield tokens.part(slice(0, count), slice(begin, min(begin + most, longest)))

    def outputs(self, value: Value) -> np.ndarray:
        """Return memory for the outputs of the requested tokens [B,S,*] with zeros at padding; with
        logits_to_keep = n [B,n,*], aligned to the last column.
        """
        rows, columns = self.tokens.x.shape[:2]
        width = self.logits_to_keep or columns
        make = np.empty if self.tokens.counts.min() >= width else np.zeros
        return make((rows, width, *value.axes[2:]), value.dtype)  # type: ignore[arg-type]

    def in_columns(self, outputs: np.ndarray) -> np.ndarray:
        """Return outputs in the columns of the caller's input."""
        if self.begins is None or self.logits_to_keep:
            return outputs
        result = np.zeros_like(outputs)
        for row, (begin, count) in enumerate(zip(self.begins, self.tokens.counts, strict=True)):
            result[row, begin : begin + count] = outputs[row, :count]
        return result


def check_prefill(
    manifest: Manifest,
    inputs: Inputs,
    start: Numbers = None,
    attention_mask: np.ndarray | None = None,
    chunk: int | None = None,
    grid: np.ndarray | None = None,
    token_types: np.ndarray | None = None,
    encoder: Inputs | None = None,
    logits_to_keep: int | None = None,
) -> Prompt:
    """Check what does not depend on the session's rows in a prefill. Raise ValueError."""
    x, counts = padded_rows(inputs, manifest.inputs[0])
    begins = None
    if attention_mask is not None:
        x, counts, begins = align(x, counts, attention_mask)
    if not len(x):
        raise expected("at least one row", "none", "give [B,S] tokens or a list of rows")
    most, keep, longest = manifest.chunk, 0, int(counts.max())
    if chunk is not None:
        most = at_least("chunk", chunk, 1)
    if logits_to_keep is not None:
        keep = min(at_least("logits_to_keep", logits_to_keep, 0), longest)
    vocabulary = manifest.vocabulary
    if vocabulary and x.size and (x.min() < 0 or x.max() >= vocabulary):
        raise unknown_id(vocabulary, x)
    if not manifest.states or most > longest:  # a model without caches reads whole rows
        most = max(longest, 1)
    columns = keep - counts if keep else np.zeros_like(counts)
    tokens = RowTokens(slice(0, len(x)), x, counts, {}, columns)
    prompt, planes = Prompt(tokens, start, encoder, begins, most, keep), tokens.planes
    if grid is not None:
        numbers, limit = array_of("grid", grid), manifest.coordinate_range or manifest.max_positions
        planes["grid"] = _plane(prompt, "grid", numbers, manifest.axes, limit)
    if token_types is not None:
        numbers, limit = array_of("token_types", token_types)[None], manifest.segments
        planes["token_type_ids"] = _plane(prompt, "token_types", numbers, min(limit, 1), limit)
    return prompt


def check_every_row(counts: np.ndarray, rows: str) -> None:
    """Raise ValueError unless every row has a token. rows: what they are called."""
    if not counts.all():
        got = f"rows of {counts.tolist()} tokens"
        raise expected(f"at least one token in every {rows}", got, "leave empty rows out")


def check_rewind(manifest: Manifest, length: list[int], n: Numbers) -> list[int]:
    """Return how many tokens `n` takes back from each row. Raise ValueError for too many."""
    check_has_cache(manifest, "rewind")
    counts: list[int] = per_row("n of rewind", n, len(length) or 1).tolist()
    if any(counts) and not length:
        raise no_rows("rewind")
    if any(a > b for a, b in zip(counts, length or [0], strict=True)):
        raise expected(f"n of rewind to be at most the lengths {length}", counts)
    return counts


def check_read_out(manifest: Manifest) -> None:
    """Raise ValueError if the model has no second output."""
    if len(manifest.outputs) < 2:
        rule = "a model with a second output, such as sentence_embedding, for read_out"
        got = f"kind {manifest.kind} with {manifest.outputs[0].name}"
        raise expected(rule, got, "call prefill, or export a sentence-transformers folder")


def no_rows(call: str) -> ValueError:
    """Return the error for a call that needs rows, in a session without any."""
    return expected(f"a prefill before {call}", "an empty session", "call prefill")


def check_row(row: Any, rows: int) -> None:
    """Raise ValueError unless there is a row of this index."""
    if not rows:
        raise no_rows("a call on a row")
    if isinstance(row, bool) or not isinstance(row, (int, np.integer)) or not 0 <= row < rows:
        raise expected(f"a row index 0 .. {rows - 1}", short_repr(row))


def check_has_cache(manifest: Manifest, call: str) -> None:
    """Raise ValueError if a call needs a cache and the model has none."""
    if not manifest.states:
        got = "a model without caches, which reads whole rows"
        raise expected(f"a model with a cache for {call}", got, "call prefill")


def check_rows_are_independent(manifest: Manifest, call: str) -> None:
    """Raise ValueError unless rows can be added and removed one by one."""
    check_has_cache(manifest, call)
    if manifest.by_columns:
        target = f"target {manifest.target} with signature {manifest.signature}"
        remedy = "export target ort, onnx-static or torchscript with signature positions"
        rule = f"rows with cache slots of their own for {call}"
        raise expected(rule, f"{target}, whose rows share columns", remedy)


def _plane(prompt: Prompt, name: str, numbers: np.ndarray, planes: int, limit: int) -> np.ndarray:
    """Check coordinates or token types [planes,B,S], which must be in 0 .. limit - 1. Return those
    of the tokens of a prompt, moved to the first columns of each row, int64.
    """
    if not planes:
        rule = "an encoding with coordinates" if name == "grid" else "a model with segments"
        raise expected(f"{rule} for {name}", "one without", f"leave {name} out")
    tokens, begins = prompt.tokens, prompt.begins
    shape = (planes, *tokens.x.shape[:2])
    if numbers.shape != shape or numbers.dtype.kind not in "iu":
        got = f"shape {list(numbers.shape)} {numbers.dtype}"
        raise expected(f"{name} of shape {list(shape)} with whole numbers", got)
    inside = np.zeros(shape, np.int64)
    for row, count in enumerate(tokens.counts.tolist()):
        begin = 0 if begins is None else int(begins[row])
        part = inside[:, row, :count] = numbers[:, row, begin : begin + count]
        if part.size and not (part.min() >= 0 and part.max() < limit):
            got, remedy = f"{part.min()} .. {part.max()}", "export a larger range"
            raise expected(f"{name} in 0 .. {limit - 1}", got, f"{remedy}, or give smaller numbers")
    return inside


def encoder_outputs(manifest: Manifest, prompt: Prompt) -> dict[str, np.ndarray]:
    """Check the encoder outputs that a caller passes for the rows of a prompt, and return the graph
    inputs listed in Manifest.encoder: a mask [B,Q] int64 first, then the keys and values [B,K,Q,D].
    Raise ValueError for missing or unneeded ones, other rows, shapes or dtypes, and rows without
    tokens.
    """
    encoder, count = prompt.encoder, len(prompt.tokens.counts)
    if not manifest.encoder:
        if encoder is not None:
            raise expected("no encoder for a model that reads none", "one", "leave it out")
        return {}
    if encoder is None:
        rule = "encoder=, the outputs of the encoder for each row"
        raise expected(rule, "none", "run the encoder's artefact on the source first")
    mask, *key_values = manifest.encoder
    sizes = [(int(value.axes[1]), int(value.axes[3])) for value in key_values]  # K and D of each
    numbers = sum(heads * size for heads, size in sizes)
    axes = ("batch_size", "encoder_sequence_length", numbers)
    value = Value("encoder", manifest.passed_dtype, axes)
    tokens, lengths = padded_rows(encoder, value)
    if len(tokens) != count or not lengths.all():
        rule = f"encoder with {counted(count, 'row')} of at least one token"
        got = f"rows of {lengths.tolist()} tokens"
        raise expected(rule, got, "give one row per sequence")
    inside = np.arange(tokens.shape[1])[None] < lengths[:, None]
    arrays, begin = {mask.name: inside.astype(np.int64)}, 0
    for value, (heads, size) in zip(key_values, sizes, strict=True):
        part = tokens[:, :, begin : begin + heads * size].reshape(count, -1, heads, size)
        arrays[value.name] = np.ascontiguousarray(part.transpose(0, 2, 1, 3))
        begin += heads * size
    return arrays


def append_encoder_outputs(
    outputs: dict[str, np.ndarray], new: dict[str, np.ndarray]
) -> dict[str, np.ndarray]:
    """Return encoder outputs followed by those of new rows. Shorter sequences are padded."""
    joint = {}
    for name, array in outputs.items():  # [B,Q] or [B,K,Q,D]
        axis, widths, padded = array.ndim // 2, [(0, 0)] * array.ndim, []
        longest = max(array.shape[axis], new[name].shape[axis])
        for part in (array, new[name]):
            widths[axis] = (0, longest - part.shape[axis])
            padded.append(np.pad(part, widths))
        joint[name] = np.concatenate(padded)
    return joint


def at_least(name: str, value: Any, least: int) -> int:
    """Return a whole number of at least `least`, or raise ValueError."""
    if isinstance(value, bool) or not isinstance(value, (int, np.integer)) or value < least:
        raise expected(f"{name} to be a whole number of at least {least}", short_repr(value))
    return int(value)


def array_of(name: str, value: Any) -> np.ndarray:
    """Convert an argument to an array. Raise ValueError if its rows differ in length."""
    try:
        return np.asarray(value)
    except ValueError:
        got = f"rows of different shapes: {short_repr(value)}"
        raise expected(f"{name} to be one array", got) from None


def unknown_id(vocabulary: int, x: np.ndarray) -> ValueError:
    """Return the error for the first of the ids x that is not one of 0 .. vocabulary - 1."""
    got = int(x[(x < 0) | (x >= vocabulary)][0])
    return expected(f"token ids 0 .. {vocabulary - 1}", got, "use the model's own tokenizer")


def per_row(name: str, numbers: Numbers, rows: int) -> np.ndarray:
    """Convert one whole number of at least 0, or one per row, to [B] int64; None is 0."""
    array = array_of(name, 0 if numbers is None else numbers)
    whole = array.dtype.kind in "iu" and array.shape in ((), (rows,))
    if not whole or (array.size and not 0 <= int(array.min()) <= int(array.max()) < 1 << 63):
        each = f"one for each of {counted(rows, 'row')}"
        rule = f"{name} to be a whole number 0 .. 2^63 - 1, or {each}"
        raise expected(rule, short_repr(numbers))
    return np.full((rows,), array, np.int64)


def align(
    padded: np.ndarray, counts: np.ndarray, attention_mask: Any
) -> tuple[np.ndarray, np.ndarray, np.ndarray | None]:
    """Move the tokens that a mask keeps of rows [B,S] or [B,S,E] to the first columns, with zeros
    behind. Return the rows, the number of tokens of each [B], and the column where each began [B],
    None if all tokens are kept. Raise ValueError for a wrong mask.
    """
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
    first, counts, begins = np.zeros_like(padded), inside.sum(axis=1), inside.argmax(axis=1)
    for row, (begin, count) in enumerate(zip(begins, counts, strict=True)):
        if not inside[row, begin : begin + count].all():
            rule = "attention_mask without zeros between the ones of a row"
            found = short_repr(np.flatnonzero(inside[row]).tolist())
            got = f"row {row} with tokens in columns {found}"
            raise expected(rule, got, "leave these columns out, and pass rows as lists")
        first[row, :count] = padded[row, begin : begin + count]
    return first, counts, begins


def padded_rows(inputs: Inputs, value: Value) -> tuple[np.ndarray, np.ndarray]:
    """Return rows as [B,S,*], padded on the right, and their lengths. An array of value's dtype is
    returned as it is if it is contiguous. Raise ValueError for another dtype or shape.
    """
    if isinstance(inputs, np.ndarray):
        array = _converted(np.asarray(inputs), value, 0)
        # Graphs read contiguous memory, and torch warns of memory that it must not write.
        plain = array if array.flags.carray else np.array(array, order="C")
        return plain, np.full(len(plain), plain.shape[1])
    if not hasattr(inputs, "__iter__"):
        rule = f"{value.name} as an array or a list of rows"
        raise expected(rule, short_repr(inputs), "give [[1, 2, 3]] for one row of ids")
    rows = [array_of(f"a row of {value.name}", row) for row in inputs]
    rows = [_converted(row, value, 1) if row.size or not row.ndim else row[:0] for row in rows]
    lengths = np.array([len(row) for row in rows], np.int64)
    padded = np.zeros((len(rows), int(lengths.max(initial=0)), *value.token_shape), value.dtype)
    for index, row in enumerate(rows):
        if row.size:
            padded[index, : len(row)] = row
    return padded, lengths


def _converted(array: np.ndarray, value: Value, first: int) -> np.ndarray:
    """Return an array in the dtype of an input. It must have the axes of the input from `first` on,
    which is 1 for a row of a list. Ids may have any integer dtype, and rows of lists any dtype of
    numbers. Raise ValueError for others.
    """
    dtype, axes = np.dtype(value.dtype), value.axes[first:]
    ids, of_rows = dtype.kind == "i", "a row of " * first
    kinds = "iu" if ids else ("fiu" if array.ndim == len(axes) else "f") * first
    if array.dtype != dtype and array.dtype.kind not in kinds:
        remedy = "pass token ids" if ids else "convert it with astype"
        if array.dtype.kind in "iu":
            remedy = f"this model reads {value.name}, not token ids"
        rule, got = f"{value.name} of dtype {value.dtype}", f"{of_rows}{array.dtype}"
        raise expected(rule, got, remedy)
    if array.ndim != len(axes) or array.shape[2 - first :] != value.axes[2:]:
        remedy = f"pass an array with {len(axes)} axes and the sizes of the model"
        if array.ndim == len(axes) - 1:
            remedy = "pass a list of rows" if first else "add an axis of rows, as in inputs[None]"
        rule = f"{of_rows}{value.name} of shape {list(axes)}"
        raise expected(rule, list(array.shape) or f"the number {array}", remedy)
    return array.astype(dtype, copy=False)
