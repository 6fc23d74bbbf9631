"""Arguments of session calls, checked. Shapes: B batch, S columns, E model width."""

from dataclasses import dataclass
from typing import Any, Dict, Iterator, List, NamedTuple, Optional, Sequence, Tuple

import numpy as np

from posenc_export.runtime.artefact.manifest import Manifest, Value
from posenc_export.runtime.session import argument_arrays as arrays
from posenc_export.runtime.session.argument_arrays import Numbers, Rows, per_row, short_repr
from posenc_export.runtime.session.caches import Caches
from posenc_export.runtime.session.errors import expected


class RowTokens(NamedTuple):
    """Tokens that consecutive rows read, in the first columns of each row, with zeros behind."""

    rows: slice  # indices of the rows
    x: np.ndarray  # tokens [n,S] or [n,S,E]
    counts: np.ndarray  # number of tokens of each row [n] int64
    requested: np.ndarray  # number of last tokens of each row whose outputs are requested [n]
    planes: Dict[str, np.ndarray]  # coordinates and token types by graph input [A,n,S] int64
    columns: np.ndarray  # column of the outputs [n] at which those of each row begin

    def part(self, begin: int, end: int) -> "RowTokens":
        """Return the tokens of the rows `begin` .. `end` - 1 of these."""
        some, first = slice(begin, end), self.rows.start
        planes = {name: plane[:, some] for name, plane in self.planes.items()}
        of_rows = self.x[some], self.counts[some], self.requested[some], planes
        return RowTokens(slice(first + begin, first + end), *of_rows, self.columns[some])


class Passed(NamedTuple):
    """Arguments of Session.prefill, which documents them, as they are passed."""

    inputs: Rows
    start: Numbers = None
    attention_mask: Optional[np.ndarray] = None
    chunk: Optional[int] = None
    grid: Optional[np.ndarray] = None
    token_types: Optional[np.ndarray] = None
    encoder: Optional[Rows] = None
    encoder_attention_mask: Optional[np.ndarray] = None
    logits_to_keep: Optional[int] = None


@dataclass(frozen=True)
class PrefillArguments:
    """Checked arguments of a prefill, without padding."""

    passed: Passed
    tokens: RowTokens  # of all rows
    # Columns of these tokens in the caller's input, for each row [count]; None for the first ones
    columns: Optional[List[np.ndarray]]
    chunk: int  # largest number of tokens of a row to feed at a time, at most that of any row
    # Number of last tokens of each row whose outputs are requested, at most the length of the
    # longest row; 0 for all tokens
    logits_to_keep: int

    def chunks(self, first: int, most: int) -> Iterator[RowTokens]:
        """Yield the tokens to feed at a time, at most `most` of each row if that is not 0, if the
        first row has index `first`.
        """
        tokens, keep = self.tokens, self.logits_to_keep
        counts, rows = tokens.counts, slice(first, first + len(tokens.x))
        most, longest = min(self.chunk, most or self.chunk), int(counts.max())
        for begin in range(0, longest, most):
            end = min(begin + most, longest)
            part, inside = slice(begin, end), np.clip(counts - begin, 0, end - begin)
            requested, columns = inside, np.full_like(counts, begin)
            if keep:
                requested = np.clip(keep - np.maximum(counts - end, 0), 0, inside)
                columns = np.maximum(keep - counts + begin, 0)
            planes = {name: plane[:, :, part] for name, plane in tokens.planes.items()}
            yield RowTokens(rows, tokens.x[:, part], inside, requested, planes, columns)

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
        if self.columns is None or self.logits_to_keep:
            return outputs
        result = np.zeros_like(outputs)
        for row, columns in enumerate(self.columns):
            result[row, columns] = outputs[row, : len(columns)]
        return result


def check_prefill(manifest: Manifest, passed: Passed) -> PrefillArguments:
    """Check arguments of Session.prefill but those that depend on its state. Raise ValueError."""
    x, counts, columns = arrays.align(passed.inputs, passed.attention_mask, manifest.inputs[0])
    for row, valid in enumerate(columns or ()):
        if len(valid) and valid[-1] - valid[0] >= len(valid):
            rule = "attention_mask without zeros between the ones of a row"
            got = f"row {row} with tokens in columns {short_repr(valid.tolist())}"
            raise expected(rule, got, "leave these columns out, and pass rows as lists")
    if not len(x):
        raise expected("at least one row", "none", "give [B,S] tokens or a list of rows")
    chunk, keep, longest = manifest.chunk, 0, int(counts.max())
    if passed.chunk is not None:
        chunk = arrays.at_least("chunk", passed.chunk, 1)
    if passed.logits_to_keep is not None:
        keep = min(arrays.at_least("logits_to_keep", passed.logits_to_keep, 0), longest)
    vocabulary = manifest.vocabulary
    if vocabulary and x.size and (x.min() < 0 or x.max() >= vocabulary):
        rows = zip(x, counts.tolist(), strict=True)
        arrays.check_tokens(vocabulary, [row[:count] for row, count in rows])
    planes: Dict[str, np.ndarray] = {}
    if passed.grid is not None or passed.token_types is not None:
        planes = _planes(passed, manifest, columns or [np.arange(n) for n in counts], x.shape)
    if not manifest.states or chunk > longest:  # a model without caches reads whole rows
        chunk = max(longest, 1)
    tokens = RowTokens(slice(0, len(x)), x, counts, counts, planes, np.zeros_like(counts))
    return PrefillArguments(passed, tokens, columns, chunk, keep)


def check_every_row(counts: np.ndarray, rows: str) -> None:
    """Raise ValueError unless every row has a token. rows: what they are called."""
    if not counts.all():
        got = f"rows of {counts.tolist()} tokens"
        raise expected(f"at least one token in every {rows}", got, "leave empty rows out")


def check_start(
    manifest: Manifest, first_position: np.ndarray, length: np.ndarray, prompt: PrefillArguments
) -> np.ndarray:
    """Check `start` of a prefill after `length` tokens of each row from position `first_position`
    on. Return the position of each row's first token [B] int64. Raise ValueError for other rows, or
    positions where a row with tokens does not continue.
    """
    counts, start = prompt.tokens.counts, prompt.passed.start
    count = len(counts)
    asked = np.zeros(count, np.int64) if start is None else per_row("start", start, count)
    if length.any():
        if count != len(length):
            raise expected(f"{len(length)} rows as in the cache", count, "reset first")
        following = first_position + length
        if start is not None and (asked != following)[counts > 0].any():
            cached = short_repr(length.tolist())
            where = f"where rows of {cached} cached tokens continue"
            rule = f"start {short_repr(following.tolist())}, {where}"
            raise expected(rule, short_repr(start), "leave start out, or reset first")
        return first_position
    if manifest.signature == "mask" and asked.any():
        remedy = "export with signature positions"
        raise expected("start 0 for signature mask", short_repr(start), remedy)
    return first_position if start is None and count == len(length) else asked


def check_room(
    caches: Caches, first_position: np.ndarray, length: np.ndarray, counts: np.ndarray
) -> None:
    """Raise ValueError unless `counts` [B] more tokens fit into positions and caches."""
    manifest, capacity = caches.graph.manifest, caches.capacity
    rows = zip(first_position.tolist(), length.tolist(), counts.tolist(), strict=True)
    ends = list(map(sum, rows))  # Python integers do not overflow
    for position in (max(ends) - 1, int(first_position.max()), int(first_position.min())):
        if not 0 <= position < manifest.max_positions:
            # Rewinding helps if the rows fit without the tokens in the cache.
            fits = int((first_position + counts).max()) <= manifest.max_positions
            shorter = f"give shorter rows{' or an earlier start' if first_position.any() else ''}"
            remedy = f"{'rewind' if manifest.states and fits else shorter}, or export"
            counted = manifest.axes and not manifest.coordinate_range
            grid = ", which bounds the tokens of a row and their coordinates"
            remedy += f" with larger max_positions{grid if counted else ''}"
            raise expected(f"positions 0 .. {manifest.max_positions - 1}", position, remedy)
    longest = int((length + counts).max())
    if longest > capacity and manifest.in_place:
        rule = f"at most {capacity} tokens of a row in the cache"
        raise expected(rule, longest, "open the session with a larger capacity")


def check_rewind(manifest: Manifest, length: List[int], n: Numbers) -> List[int]:
    """Return how many tokens `n` takes back from each row, at least from one row; or raise."""
    check_has_cache(manifest, "rewind")
    back = per_row("n of rewind", n, len(length) or 1).tolist()
    if min(back) < 0 or any(a > b for a, b in zip(back, length or [0], strict=True)):
        rule = f"n of rewind to be at least 0 and at most the lengths {length}"
        raise expected(rule, back)
    return back


def check_discard(manifest: Manifest, length: List[int], n: Numbers, after: Any) -> List[int]:
    """Return how many tokens `n` removes behind the first `after` of each row, or raise."""
    check_has_cache(manifest, "discard")
    arrays.at_least("after", after, 0)
    counts = per_row("n of discard", n, len(length) or 1).tolist()
    behind = [max(count - int(after), 0) for count in length]
    if min(counts) < 0 or any(a > b for a, b in zip(counts, behind or [0], strict=True)):
        rule = f"n of discard to be at least 0 and at most {behind}, the tokens behind the first"
        raise expected(f"{rule} {after}", counts)
    return counts


def check_read_out(manifest: Manifest) -> None:
    """Raise ValueError if the model has no second output."""
    if len(manifest.outputs) < 2:
        rule = "a model with a second output, such as sentence_embedding, for read_out"
        got = f"kind {manifest.kind} with {manifest.outputs[0].name}"
        raise expected(rule, got, "call prefill, or export a sentence-transformers folder")


def check_row(row: Any, rows: int) -> None:
    """Raise ValueError unless there is a row of this index."""
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


def _planes(
    passed: Passed, manifest: Manifest, columns: Sequence[np.ndarray], shape: Tuple[int, ...]
) -> Dict[str, np.ndarray]:
    """Check grid [axes,B,S] and token types [B,S]; return their values at the tokens of each row,
    which are in `columns`, in the first columns.
    """
    planes: Dict[str, np.ndarray] = {}
    if passed.grid is not None:
        axes, limit = manifest.axes, manifest.coordinate_range or manifest.max_positions
        if not axes:
            rule = "an encoding with coordinates for grid"
            raise expected(rule, "an encoding without", "leave grid out")
        planes["grid"] = _numbers("grid", passed.grid, (axes, *shape[:2]), limit, columns)
    if passed.token_types is not None:
        segments = manifest.segments
        types = arrays.array_of("token_types", passed.token_types)[None]
        if not segments:
            got = f"kind {manifest.kind} without"
            raise expected("a model with segments for token_types", got, "leave token_types out")
        numbers = _numbers("token_types", types, (1, *shape[:2]), segments, columns)
        planes["token_type_ids"] = numbers
    return planes


def _numbers(
    name: str, value: Any, shape: Tuple[int, ...], limit: int, columns: Sequence[np.ndarray]
) -> np.ndarray:
    """Check an argument [n,B,S] and return its values in some columns of each row first."""
    numbers = arrays.array_of(name, value)
    if numbers.shape != shape or numbers.dtype.kind not in "iu":
        got = f"shape {list(numbers.shape)} {numbers.dtype}"
        raise expected(f"{name} of shape {list(shape)} with whole numbers", got)
    first = np.zeros(shape, np.int64)
    for row, valid in enumerate(columns):
        part = numbers[:, row, valid]
        if part.size and not (0 <= part.min() and part.max() < limit):
            remedy = "export a larger range, or give smaller numbers"
            raise expected(f"{name} in 0 .. {limit - 1}", f"{part.min()} .. {part.max()}", remedy)
        first[:, row, : len(valid)] = part
    return first
