"""Sessions on disk: a file with the caches of all rows, which only their artefact reads."""

import hashlib
import itertools
import json
import math
import mmap
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any, Dict, Iterator, List, Literal, Mapping, Optional, Tuple, Union

import msgspec
import numpy as np
from msgspec import Meta, Struct

from posenc_export.runtime.artefact.files import replacing
from posenc_export.runtime.artefact.records import MOST, Size
from posenc_export.runtime.artefact.schema import Manifest
from posenc_export.runtime.session.arguments import MASK, Inputs, check_tokens
from posenc_export.runtime.session.buffers import ELEMENTS
from posenc_export.runtime.session.errors import expected
from posenc_export.runtime.session.graph import shape_of
from posenc_export.runtime.session.rows import Rows
from posenc_export.shared.refusal import refusal

ENCODER, STATE = "encoder.", "state."  # begin the names of arrays
WINDOWS = "window_start"  # token of each row in slot 0 of its caches of windows
Form = Tuple[str, Tuple[int, ...]]  # dtype and shape of an array
LINE = 1 << 20  # longest header in bytes
REMEDY = "delete the file and read the tokens again"
Arrays = Dict[str, np.ndarray]


def check_arrays(manifest: Manifest, arrays: Mapping[str, np.ndarray]) -> None:
    """Raise ValueError, with the rule and the value, unless arrays are those of a saved session."""
    rows, columns = _size(arrays, "length", 0), _size(arrays, "slots", 1)
    by_columns = manifest.by_columns or not rows
    forms: Dict[str, Form] = {
        "length": ("int64", (rows,)),
        "start": ("int64", (rows,)),
        "slots": ("bool", (rows, columns if by_columns else 0)),
    }
    _compare({name: arrays[name] for name in forms if name in arrays}, forms)
    length = arrays["length"].tolist()
    _check_rows(manifest, length, arrays["start"].tolist(), arrays["slots"])
    if "tokens" in arrays:
        forms["tokens"] = ("int64", (sum(length),))
    if rows:
        used = columns if by_columns else max(length)
        forms |= _encoder_forms(manifest, rows, _size(arrays, ENCODER + MASK, 1))
        windowed = next((state for state in manifest.states if state.window), None)
        kept = _size(arrays, STATE + windowed.past, windowed.axis) if windowed else 0
        for state in manifest.states:
            slots = kept if state.window else used
            shape = shape_of(state, rows, slots)
            dtype, _ = ELEMENTS.get(state.dtype, (state.dtype, 0))
            forms[STATE + state.past] = dtype, (math.prod(shape),) if state.grows else shape
        forms |= {WINDOWS: ("int64", (rows,))} if windowed else {}
    _compare(arrays, forms)
    if WINDOWS in forms:
        _check_windows(manifest, arrays, kept, used)
    ids = arrays.get("tokens", np.zeros(0, np.int64))
    if ids.size and not 0 <= ids.min() <= ids.max() < manifest.vocabulary:
        most = manifest.vocabulary - 1
        raise ValueError(f"expected token ids 0 .. {most}, got {ids.min()} .. {ids.max()}")


def _check_rows(manifest: Manifest, length: Any, first_position: Any, slots: np.ndarray) -> None:
    most = manifest.max_positions
    for first, count in zip(first_position, length, strict=True):
        if count < 0 or not 0 <= first < most or first + count > most:
            got = f"{count} tokens from {first}"
            raise ValueError(f"expected rows within positions 0 .. {most - 1}, got {got}")
    if slots.view(np.uint8).max(initial=0) > 1:
        raise ValueError("expected slots to be bytes of 0 and 1, got others")
    if slots.shape[1] and slots.sum(1).tolist() != length:
        raise ValueError(f"expected slots for rows of {length} tokens, got {slots.sum(1).tolist()}")


def _check_windows(
    manifest: Manifest, arrays: Mapping[str, np.ndarray], kept: int, used: int
) -> None:
    """Raise ValueError unless caches of `kept` slots hold the tokens that the next ones read."""
    length, first_kept = arrays["length"], arrays[WINDOWS]
    size = max(state.window for state in manifest.states)
    least = np.where(first_kept > 0, size - 1, 0)
    holds = (first_kept >= 0) & (length - first_kept >= least) & (length - first_kept <= kept)
    if not holds.all() or kept > used:
        rule = f"caches of windows with the last {size - 1} tokens of rows in at most {used} slots"
        got = f"{length.tolist()} tokens from {first_kept.tolist()} on in {kept}"
        raise ValueError(f"expected {rule}, got {got}")


def _encoder_forms(manifest: Manifest, rows: int, source: int) -> Dict[str, Form]:
    """Return the forms of encoder outputs of `source` columns. Their axes are rows and columns."""
    sizes = {"batch_size": rows, "encoder_sequence_length": source}
    forms: Dict[str, Form] = {}
    for value in manifest.encoder:
        shape = tuple(axis if isinstance(axis, int) else sizes[axis] for axis in value.axes)
        forms[ENCODER + value.name] = value.dtype, shape
    return forms


def _compare(arrays: Mapping[str, np.ndarray], forms: Mapping[str, Form]) -> None:
    if set(arrays) != set(forms):
        wrong = sorted(set(arrays) ^ set(forms))[0]
        got = wrong if wrong in arrays else f"no {wrong}"
        raise ValueError(f"expected the arrays {', '.join(forms)}, got {got}")
    for name, (dtype, shape) in forms.items():
        array = arrays[name]
        if (array.dtype, array.shape) != (np.dtype(dtype), shape):
            got = f"{array.dtype} {list(array.shape)}"
            raise ValueError(f"expected {name} {dtype} {list(shape)}, got {got}")


def _size(arrays: Mapping[str, np.ndarray], name: str, axis: int) -> int:
    """Return the size of an array along an axis; 0 if it has none, which `_compare` refuses."""
    shape = arrays[name].shape if name in arrays else ()
    return shape[axis] if axis < len(shape) else 0


class Stored(Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """An array in the file: name, dtype as numpy writes it, shape."""

    name: Annotated[str, Meta(max_length=256)]
    dtype: Literal["|b1", "|i1", "<u2", "<i4", "<i8", "<f2", "<f4"]
    shape: Annotated[List[Size], Meta(max_length=8)]

    @property
    def bytes(self) -> int:
        return math.prod(self.shape) * np.dtype(self.dtype).itemsize


class Header(Struct, frozen=True, forbid_unknown_fields=True):
    """The first line. sha256 is that of all that follows, and of the other fields."""

    posenc_session: Literal[1]
    artefact: Annotated[str, Meta(pattern=r"^[0-9a-f]{64}\Z")]
    arrays: Annotated[List[Stored], Meta(max_length=2 * MOST + 8)]
    sha256: Annotated[str, Meta(max_length=64)] = ""


def save(rows: Rows, file: Union[str, Path], tokens: Optional[Inputs]) -> None:
    """Implement Session.save, which documents the arguments."""
    caches = rows.caches
    manifest = caches.graph.manifest
    arrays: Arrays = {"length": rows.length, "start": rows.first_position}
    arrays |= {"slots": rows.occupied}
    if tokens is not None:
        ids, length = [np.asarray(row) for row in tokens], rows.length.tolist()
        counts = [len(row) for row in ids]
        if counts != length or any(row.dtype.kind not in "iu" for row in ids if row.size):
            raise expected(f"tokens to be {length} ids", counts, "give those in the cache")
        check_tokens(manifest.vocabulary, ids)
        arrays["tokens"] = np.concatenate([np.zeros(0, np.int64), *ids]).astype(np.int64)
    if rows.count:
        arrays |= {ENCODER + name: array for name, array in rows.encoder.items()}
    if rows.count and any(state.window for state in manifest.states):
        arrays[WINDOWS] = rows.first_kept
    for memory in caches.states if rows.count else ():
        part = memory.part(rows.count, rows.used)
        arrays[STATE + memory.state.past] = memory.buffers[rows.turn].read()[part]
    arrays = {name: np.ascontiguousarray(array) for name, array in arrays.items()}
    forms = [
        Stored(name, array.dtype.str, list(array.shape))  # type: ignore[arg-type]
        for name, array in arrays.items()
    ]
    header = Header(1, manifest.digest, forms)
    header = msgspec.structs.replace(header, sha256=_sha256(header, arrays.values()))
    with replacing(Path(file)) as stream:
        stream.write(msgspec.json.encode(header) + b"\n")
        for array in arrays.values():
            stream.write(array.reshape(-1).view(np.uint8).data)


@contextmanager
def open_arrays(file: Path, manifest: Manifest) -> Iterator[Arrays]:
    """Give the arrays of a file of this artefact by name, as views of the file, after a check of
    their forms. Raise ValueError for a file that is another one, truncated or changed, or OSError.

    The digest is computed within the context and compared when it ends, also after an error.
    """
    where = f"restore {file}"
    with file.open("rb") as stream:
        try:
            header = msgspec.json.decode(stream.readline(LINE), type=Header)
        except ValueError:
            rule = "a file of Session.save of version 1"
            raise refusal(where, rule, "another one", REMEDY) from None
        if header.artefact != manifest.digest:
            rule, got = f"a session of the artefact {manifest.digest}", f"one of {header.artefact}"
            raise refusal(where, rule, got, "restore it with that artefact")
        content = memoryview(mmap.mmap(stream.fileno(), 0, access=mmap.ACCESS_READ))
        content = content[stream.tell() :]  # the rest is read where it is used
    sizes = [stored.bytes for stored in header.arrays]
    if sum(sizes) != len(content):
        got = f"{len(content)}, so the file is not whole"
        raise refusal(where, f"{sum(sizes)} bytes after the header", got, REMEDY)
    ends = itertools.accumulate(sizes)
    with ThreadPoolExecutor(1) as pool:
        digest = pool.submit(_sha256, header, [content])
        try:
            arrays = {}
            for stored, size, end in zip(header.arrays, sizes, ends, strict=True):
                array = np.frombuffer(content[end - size : end], stored.dtype)
                arrays[stored.name] = array.reshape(stored.shape)
            _check_named(where, header, manifest, arrays)
            yield arrays
        finally:
            if digest.result() != header.sha256:
                rule, got = "the content that was saved", "a file that was changed"
                raise refusal(where, rule, got, REMEDY)


def restored(empty: Rows, arrays: Arrays) -> Rows:
    """Return the rows of a file of the same artefact, from those of a session without rows."""
    length, first_position = np.array(arrays["length"]), np.array(arrays["start"])
    if not len(length):
        return empty
    caches, slots = empty.caches, np.array(arrays["slots"])
    manifest, most = caches.graph.manifest, caches.capacity
    if manifest.in_place and int(length.max()) > most:
        rule, remedy = f"rows of at most {most} tokens", "open the session with a larger capacity"
        raise refusal("restore", rule, length.tolist(), remedy)
    if WINDOWS in arrays:
        if arrays[WINDOWS].any() and not caches.window.size:
            got = f"provider {caches.graph.provider}"
            rule = "provider cpu for a session with caches of windows, which begin at later tokens"
            raise refusal("restore", rule, got, "load the artefact with provider cpu")
        stored = next(state for state in manifest.states if state.window)
        missing = arrays[STATE + stored.past].shape[stored.axis] - caches.window.slots
        caches.window = caches.window._replace(new=caches.window.new + max(missing, 0))
    used = slots.shape[1] or int(length.max())
    rows = Rows(caches, first_position).begin(used)
    for memory in rows.caches.states:
        array = arrays[STATE + memory.state.past]
        part = tuple(slice(size) for size in array.shape)
        memory.buffers[rows.turn].write(part, array)
    rows.caches.mark_written(slice(0, rows.count), used)
    encoder = [value.name for value in manifest.encoder]
    return rows.replace(
        length=length,
        occupied=slots,
        first_kept=np.array(arrays.get(WINDOWS, rows.first_kept)),
        encoder={name: np.array(arrays[ENCODER + name]) for name in encoder},
    )


def tokens(file: Union[str, Path], manifest: Manifest) -> Optional[List[np.ndarray]]:
    """Return the ids that Session.save was given, of each row, or None. Raise as `open_arrays`."""
    with open_arrays(Path(file), manifest) as arrays:
        if "tokens" not in arrays:
            return None
        return np.split(arrays["tokens"], np.cumsum(arrays["length"])[:-1])


def _check_named(where: str, header: Header, manifest: Manifest, arrays: Arrays) -> None:
    try:
        if len(arrays) != len(header.arrays):
            raise ValueError("expected unique names of arrays, got a name twice")
        check_arrays(manifest, arrays)
    except ValueError as error:
        raise ValueError(f"{where}: {error}; {REMEDY}") from None


def _sha256(header: Header, parts: Any) -> str:
    values = msgspec.to_builtins(header)
    del values["sha256"]
    digest = hashlib.sha256(json.dumps(values, sort_keys=True).encode())
    for part in parts:
        digest.update(part)
    return digest.hexdigest()
