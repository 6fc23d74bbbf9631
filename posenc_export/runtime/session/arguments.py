"""Arguments of session calls, checked. Shapes: B batch, S columns, E model width."""

from dataclasses import dataclass
from typing import Any, Dict, List, NamedTuple, Optional, Sequence, Tuple

import numpy as np

from posenc_export.runtime.artefact.manifest import Manifest
from posenc_export.runtime.session import argument_arrays as arrays
from posenc_export.runtime.session.argument_arrays import Numbers, Rows, per_row, short_repr
from posenc_export.runtime.session.caches import Caches
from posenc_export.runtime.session.errors import expected

# Coordinates and token types by graph input: for each row [n,count] int64.
TokenAttributes = Dict[str, List[np.ndarray]]


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
    tokens: List[np.ndarray]  # valid tokens of each row, [count] or [count,E]
    attributes: TokenAttributes  # attributes of these tokens
    counts: np.ndarray  # number of tokens of each row [B]
    columns: List[np.ndarray]  # columns of these tokens in the caller's input, for each row [count]
    shape: Tuple[int, ...]  # B and S of the caller's input
    chunk: int  # number of tokens of a row to feed at a time
    # Number of last tokens of each row whose outputs are requested, at most the length of the
    # longest row; 0 for all tokens
    logits_to_keep: int

    @property
    def longest(self) -> int:
        """Number of tokens of the longest row that are fed at a time."""
        return min(self.chunk, int(self.counts.max()))

    def requested_in(self, begin: int, end: int) -> np.ndarray:
        """Return how many of the tokens begin .. end - 1 of each row are requested [B]."""
        in_range = np.clip(self.counts - begin, 0, end - begin)
        if not self.logits_to_keep:
            return in_range
        return np.clip(self.logits_to_keep - np.maximum(self.counts - end, 0), 0, in_range)

    def padded_outputs(self, chunks: Sequence[Sequence[np.ndarray]]) -> np.ndarray:
        """Join the outputs of chunks, one array [count,*] for each row, to [B,S,*] with zeros at
        padding; with logits_to_keep = n to [B,n,*], aligned to the last column.
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


def check_prefill(manifest: Manifest, passed: Passed) -> PrefillArguments:
    """Check arguments of Session.prefill but those that depend on its state. Raise ValueError."""
    columns, padded = arrays.align(passed.inputs, passed.attention_mask, manifest.inputs[0])
    for row, valid in enumerate(columns):
        if len(valid) and valid[-1] - valid[0] >= len(valid):
            rule = "attention_mask without zeros between the ones of a row"
            got = f"row {row} with tokens in columns {short_repr(valid.tolist())}"
            raise expected(rule, got, "leave these columns out, and pass rows as lists")
    tokens = [padded[row, valid] for row, valid in enumerate(columns)]
    if not tokens:
        raise expected("at least one row", "none", "give [B,S] tokens or a list of rows")
    counts = np.array([len(row) for row in tokens], np.int64)
    chunk, keep = passed.chunk, passed.logits_to_keep
    chunk = arrays.at_least("chunk", manifest.chunk if chunk is None else chunk, 1)
    keep = arrays.at_least("logits_to_keep", 0 if keep is None else keep, 0)
    if manifest.vocabulary:
        arrays.check_tokens(manifest.vocabulary, tokens)
    form = padded.shape[:2]
    attributes = _attributes(passed, manifest, columns, form)
    longest = int(counts.max())
    if not manifest.states or chunk > longest:  # a model without caches reads whole rows
        chunk = max(longest, 1)
    keep = min(keep, longest)
    return PrefillArguments(passed, tokens, attributes, counts, columns, form, chunk, keep)


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
    counts, start, count = prompt.counts, prompt.passed.start, len(prompt.counts)
    asked = per_row("start", start, count)
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
    ends = [sum(row) for row in rows]  # Python integers do not overflow
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


def _attributes(
    passed: Passed, manifest: Manifest, valid: Sequence[np.ndarray], shape: Tuple[int, ...]
) -> TokenAttributes:
    """Check grid [axes,B,S] and token types [B,S]; return their values at valid tokens, by row."""
    attributes: TokenAttributes = {}
    if passed.grid is not None:
        axes, limit = manifest.axes, manifest.coordinate_range or manifest.max_positions
        if not axes:
            rule = "an encoding with coordinates for grid"
            raise expected(rule, "an encoding without", "leave grid out")
        attributes["grid"] = _numbers("grid", passed.grid, (axes, *shape), limit, valid)
    if passed.token_types is not None:
        segments = manifest.segments
        types = arrays.array_of("token_types", passed.token_types)[None]
        if not segments:
            got = f"kind {manifest.kind} without"
            raise expected("a model with segments for token_types", got, "leave token_types out")
        numbers = _numbers("token_types", types, (1, *shape), segments, valid)
        attributes["token_type_ids"] = numbers
    return attributes


def _numbers(
    name: str, value: Any, shape: Tuple[int, ...], limit: int, valid: Sequence[np.ndarray]
) -> List[np.ndarray]:
    """Check an argument [n,B,S] and return its values at the valid tokens of each row [n,count]."""
    numbers = arrays.array_of(name, value)
    if numbers.shape != shape or numbers.dtype.kind not in "iu":
        got = f"shape {list(numbers.shape)} {numbers.dtype}"
        raise expected(f"{name} of shape {list(shape)} with whole numbers", got)
    rows = [numbers[:, row, columns] for row, columns in enumerate(valid)]
    for row in rows:
        if row.size and not (0 <= row.min() and row.max() < limit):
            remedy = "export a larger range, or give smaller numbers"
            raise expected(f"{name} in 0 .. {limit - 1}", f"{row.min()} .. {row.max()}", remedy)
    return [row.astype(np.int64) for row in rows]
