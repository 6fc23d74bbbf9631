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
from posenc_export.runtime.session.arguments import Rows, check_tokens
from posenc_export.runtime.session.caches import Caches
from posenc_export.runtime.session.encoder_outputs import EncoderOutputs
from posenc_export.runtime.session.graph import shape_of
from posenc_export.runtime.session.saved_rules import ENCODER, STATE

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


def write(session: Any, file: Union[str, Path], tokens: Optional[Rows]) -> None:
    """Implement Session.save, which documents the arguments. Called between two calls of the
    session.
    """
    state, manifest, file = session._now, session.manifest, Path(file)
    arrays: Arrays = {"length": state.settled_length, "start": state.start, "slots": state.slots}
    if tokens is not None:
        rows = [np.asarray(row) for row in tokens]
        if [len(row) for row in rows] != state.settled_length.tolist() or any(
            row.dtype.kind not in "iu" for row in rows if row.size
        ):
            raise ValueError(
                f"session: expected tokens to be {state.settled_length.tolist()} ids, got "
                f"{[len(row) for row in rows]}; give those in the cache"
            )
        check_tokens(manifest.vocabulary, rows)
        arrays["tokens"] = np.concatenate([np.zeros(0, np.int64), *rows]).astype(np.int64)
    if state.encoder_outputs is not None and state.rows:
        arrays |= {ENCODER + name: array for name, array in state.encoder_outputs.arrays.items()}
    if state.rows:
        contents = _contents(state.caches, state.rows, state.used)
        arrays |= {
            STATE + kept.past: content
            for kept, content in zip(manifest.states, contents, strict=True)
        }
    parts = {name: np.ascontiguousarray(array) for name, array in arrays.items()}
    stored = [
        Stored(name, array.dtype.str, list(array.shape))  # type: ignore[arg-type]
        for name, array in parts.items()
    ]
    header = Header(1, manifest.digest, stored)
    header = msgspec.structs.replace(header, sha256=_sha256(header, parts.values()))
    with replacing(file) as stream:
        stream.write(msgspec.json.encode(header) + b"\n")
        for array in parts.values():
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
    with file.open("rb") as stream:
        header = _header(file, stream.readline(LINE))
        if header.artefact != manifest.digest:
            raise ValueError(
                f"restore {file}: expected a session of the artefact {manifest.digest}, "
                f"got one of {header.artefact}; restore it with that artefact"
            )
        begin = stream.tell()
        content = memoryview(mmap.mmap(stream.fileno(), 0, access=mmap.ACCESS_READ))[
            begin:
        ]  # the rest is read where it is used
    sizes = [stored.bytes for stored in header.arrays]
    if sum(sizes) != len(content):
        raise ValueError(
            f"restore {file}: expected {sum(sizes)} bytes after the header, got "
            f"{len(content)}, so the file is not whole; {REMEDY}"
        )
    ends = itertools.accumulate(sizes)
    with ThreadPoolExecutor(1) as pool:
        digest = pool.submit(_sha256, header, [content])
        try:
            arrays = {
                stored.name: np.frombuffer(content[end - size : end], stored.dtype).reshape(
                    stored.shape
                )
                for stored, size, end in zip(header.arrays, sizes, ends, strict=True)
            }
            _check(file, header, manifest, arrays)
            yield arrays
        finally:
            if digest.result() != header.sha256:
                raise ValueError(
                    f"restore {file}: expected the content that was saved, got a file that "
                    f"was changed; {REMEDY}"
                )


def fill(session: Any, arrays: Arrays) -> None:
    """Give a session without rows the content of a file, whose artefact is that of the session.
    Raise ValueError if it exceeds the capacity.
    """
    now, manifest = session._now, session.manifest
    length, start = np.array(arrays["length"]), np.array(arrays["start"])
    if not len(length):
        return
    most = now.caches.most
    if "in_place" in now.caches.updates and int(length.max()) > most:
        raise ValueError(
            f"restore: expected rows of at most {most} tokens, got "
            f"{length.tolist()}; open the session with a larger capacity"
        )
    encoder = {
        name.removeprefix(ENCODER): np.array(array)
        for name, array in arrays.items()
        if name.startswith(ENCODER)
    }
    slots = np.array(arrays["slots"])
    used = slots.shape[1] or int(length.max())
    state = now.opened(start, used)
    contents = [arrays[STATE + kept.past] for kept in manifest.states]
    for buffer, part, content in zip(
        state.caches.past, _parts(state.caches, state.rows, used), contents, strict=True
    ):
        whole = buffer.read()
        whole[part] = content
        buffer.write(whole)
    state.caches.memory.written = used
    session._now = state.replace(
        caches=dataclasses.replace(state.caches, columns=used),
        settled_length=length,
        slots=slots,
        encoder_outputs=EncoderOutputs(encoder) if encoder else None,
    )


def _contents(caches: Caches, rows: int, slots: int) -> List[np.ndarray]:
    """Return the first slots of the first rows of each state, as views where they are on the host.
    A growing state has one axis.
    """
    parts = _parts(caches, rows, slots)
    return [buffer.read()[part] for buffer, part in zip(caches.past, parts, strict=True)]


def _parts(caches: Caches, rows: int, slots: int) -> List[Tuple[slice, ...]]:
    """Return the part of each buffer that holds the first slots of the first rows; of a growing
    state, of all rows.
    """
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
        return (
            np.split(arrays["tokens"], np.cumsum(arrays["length"])[:-1])
            if "tokens" in arrays
            else None
        )


def _header(file: Path, line: bytes) -> Header:
    try:
        return msgspec.json.decode(line, type=Header)
    except (ValueError, RecursionError):
        raise ValueError(
            f"restore {file}: expected a file of Session.save of version 1, got another one; "
            f"{REMEDY}"
        ) from None


def _check(file: Path, header: Header, manifest: Manifest, arrays: Arrays) -> None:
    try:
        if len(arrays) != len(header.arrays):
            raise ValueError("expected unique names of arrays, got a name twice")
        saved_rules.check(manifest, arrays)
    except ValueError as error:
        raise ValueError(f"restore {file}: {error}; {REMEDY}") from None


def _sha256(header: Header, parts: Any) -> str:
    """Return the digest of a header without its own, and of the bytes of arrays."""
    values = msgspec.to_builtins(header)
    del values["sha256"]
    found = hashlib.sha256(json.dumps(values, sort_keys=True).encode())
    for part in parts:
        found.update(part)
    return found.hexdigest()
