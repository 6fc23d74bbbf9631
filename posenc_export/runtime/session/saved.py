"""Sessions on disk: a file with the caches of all rows, which only the artefact that filled them
reads.

Layout: one line of JSON, the header, and the arrays in its order, without padding. The header has
their names, dtypes and shapes, the digest of the artefact and the sha256 of all that follows the
line and of the header itself without this entry.
"""

import dataclasses
import hashlib
import itertools
import json
import math
import mmap
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any, Dict, Iterator, List, Literal, Optional, Tuple, Union

import msgspec
import numpy as np
from msgspec import Meta, Struct

from posenc_export.runtime.artefact.files import replacing
from posenc_export.runtime.artefact.records import MOST, Size
from posenc_export.runtime.artefact.schema import Manifest
from posenc_export.runtime.session import saved_rules
from posenc_export.runtime.session.caches import Caches
from posenc_export.runtime.session.encoder_outputs import EncoderOutputs
from posenc_export.runtime.session.errors import expected
from posenc_export.runtime.session.graph import shape_of
from posenc_export.runtime.session.inputs import Rows, check_tokens
from posenc_export.runtime.session.saved_rules import ENCODER, STATE
from posenc_export.runtime.session.state import SessionState

LINE = 1 << 20  # longest header in bytes
REMEDY = "delete the file and read the tokens again"
Arrays = Dict[str, np.ndarray]


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


def write(state: SessionState, file: Union[str, Path], tokens: Optional[Rows]) -> None:
    """Implement Session.save, which documents the arguments, for a state without a stepper."""
    manifest = state.caches.graph.manifest
    arrays: Arrays = {"length": state.settled_length, "start": state.start, "slots": state.slots}
    if tokens is not None:
        rows, length = [np.asarray(row) for row in tokens], state.settled_length.tolist()
        counts = [len(row) for row in rows]
        if counts != length or any(row.dtype.kind not in "iu" for row in rows if row.size):
            raise expected(f"tokens to be {length} ids", counts, "give those in the cache")
        check_tokens(manifest.vocabulary, rows)
        arrays["tokens"] = np.concatenate([np.zeros(0, np.int64), *rows]).astype(np.int64)
    if state.encoder_outputs is not None and state.rows:
        arrays |= {ENCODER + name: array for name, array in state.encoder_outputs.arrays.items()}
    if state.rows:
        parts = _parts(state.caches, state.rows, state.used)
        for stored, buffer, part in zip(manifest.states, state.caches.past, parts, strict=True):
            arrays[STATE + stored.past] = buffer.read()[part]
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
def opened(file: Path, manifest: Manifest) -> Iterator[Arrays]:
    """Give the arrays of a file by name, as views of the file, after a check of their forms.

    The digest is computed within the context and compared when it ends, also after an error.

    Args:
        manifest: of the artefact that the file must belong to.

    Raises:
        ValueError: the file is no saved session, was truncated or changed, belongs to another
            artefact, or has arrays that no session of this one has.
        OSError: the file cannot be read.
    """
    where = f"restore {file}"
    with file.open("rb") as stream:
        header = _header(where, stream.readline(LINE))
        if header.artefact != manifest.digest:
            rule, got = f"a session of the artefact {manifest.digest}", f"one of {header.artefact}"
            raise expected(rule, got, "restore it with that artefact", where)
        content = memoryview(mmap.mmap(stream.fileno(), 0, access=mmap.ACCESS_READ))
        content = content[stream.tell() :]  # the rest is read where it is used
    sizes = [stored.bytes for stored in header.arrays]
    if sum(sizes) != len(content):
        got = f"{len(content)}, so the file is not whole"
        raise expected(f"{sum(sizes)} bytes after the header", got, REMEDY, where)
    ends = itertools.accumulate(sizes)
    with ThreadPoolExecutor(1) as pool:
        digest = pool.submit(_sha256, header, [content])
        try:
            arrays = {}
            for stored, size, end in zip(header.arrays, sizes, ends, strict=True):
                array = np.frombuffer(content[end - size : end], stored.dtype)
                arrays[stored.name] = array.reshape(stored.shape)
            _check(where, header, manifest, arrays)
            yield arrays
        finally:
            if digest.result() != header.sha256:
                rule, got = "the content that was saved", "a file that was changed"
                raise expected(rule, got, REMEDY, where)


def restored(empty: SessionState, arrays: Arrays) -> SessionState:
    """Return the state of a file of the same artefact, from the state of a session without rows."""
    length, start = np.array(arrays["length"]), np.array(arrays["start"])
    if not len(length):
        return empty
    most = empty.caches.most
    if empty.caches.rules.in_place and int(length.max()) > most:
        rule, remedy = f"rows of at most {most} tokens", "open the session with a larger capacity"
        raise expected(rule, length.tolist(), remedy, "restore")
    encoder = {
        name.removeprefix(ENCODER): np.array(array)
        for name, array in arrays.items()
        if name.startswith(ENCODER)
    }
    slots = np.array(arrays["slots"])
    used = slots.shape[1] or int(length.max())
    state = empty.opened(start, used)
    caches = dataclasses.replace(state.caches, columns=used)
    parts = _parts(caches, state.rows, used)
    for stored, buffer, part in zip(caches.states, caches.past, parts, strict=True):
        content = buffer.read()
        content[part] = arrays[STATE + stored.past]
        buffer.write(content)
    caches.memory.written = used
    outputs = EncoderOutputs(encoder) if encoder else None
    return state.replace(caches=caches, settled_length=length, slots=slots, encoder_outputs=outputs)


def _parts(caches: Caches, rows: int, slots: int) -> List[Tuple[slice, ...]]:
    """Return the part of each buffer that holds the first slots of the first rows."""
    parts: List[Tuple[slice, ...]] = []
    for state in caches.states:
        if state.grows:
            parts.append((slice(math.prod(shape_of(state, caches.rows, slots))),))
        else:
            within = (*[slice(None)] * (state.axis - 1), slice(slots)) if state.in_place else ()
            parts.append((slice(rows), *within))
    return parts


def tokens(file: Union[str, Path], manifest: Manifest) -> Optional[List[np.ndarray]]:
    """Return the ids that Session.save was given, of each row; None if it was given none.

    Raises:
        ValueError, OSError: as `opened`.
    """
    with opened(Path(file), manifest) as arrays:
        if "tokens" not in arrays:
            return None
        return np.split(arrays["tokens"], np.cumsum(arrays["length"])[:-1])


def _header(where: str, line: bytes) -> Header:
    try:
        return msgspec.json.decode(line, type=Header)
    except ValueError:
        rule = "a file of Session.save of version 1"
        raise expected(rule, "another one", REMEDY, where) from None


def _check(where: str, header: Header, manifest: Manifest, arrays: Arrays) -> None:
    try:
        if len(arrays) != len(header.arrays):
            raise ValueError("expected unique names of arrays, got a name twice")
        saved_rules.check(manifest, arrays)
    except ValueError as error:
        raise ValueError(f"{where}: {error}; {REMEDY}") from None


def _sha256(header: Header, parts: Any) -> str:
    """Return the digest of a header without its own, and of the bytes of arrays."""
    values = msgspec.to_builtins(header)
    del values["sha256"]
    digest = hashlib.sha256(json.dumps(values, sort_keys=True).encode())
    for part in parts:
        digest.update(part)
    return digest.hexdigest()
