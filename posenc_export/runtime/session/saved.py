"""Sessions on disk: a file with the caches of all rows, which only the artefact that filled them reads.

Layout: one line of JSON, the header, and the arrays in its order, without padding. The header has their names, dtypes and shapes, the digest of the artefact and the
sha256 of all that follows the line and of the header itself without this entry.
"""

import hashlib
import json
import math
import mmap
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Dict, Iterator, List, Optional, Union

import numpy as np

from posenc_export.runtime.artefact.files import replacing
from posenc_export.runtime.session.arguments import Rows, check_tokens
from posenc_export.runtime.session.encoder_outputs import EncoderOutputs

VERSION = 1
LINE = 1 << 20  # longest header in bytes
REMEDY = "delete the file and read the tokens again"
Arrays = Dict[str, np.ndarray]


def write(session: Any, file: Union[str, Path], tokens: Optional[Rows]) -> None:
    """Implement Session.save, which documents the arguments. Called between two calls of the session."""
    state, manifest, file = session._now, session.manifest, Path(file)
    arrays: Arrays = {"length": state.settled_length, "start": state.start, "slots": state.slots}
    if tokens is not None:
        rows = [np.asarray(row) for row in tokens]
        if [len(row) for row in rows] != state.settled_length.tolist() or any(
            row.dtype.kind not in "iu" for row in rows if row.size
        ):
            raise ValueError(
                f"session: expected tokens to be {state.settled_length.tolist()} ids, got {[len(row) for row in rows]}; give those in the cache"
            )
        check_tokens(manifest.vocabulary, rows)
        arrays["tokens"] = np.concatenate([np.zeros(0, np.int64), *rows]).astype(np.int64)
    if state.encoder_outputs is not None:
        arrays |= {f"encoder.{name}": array for name, array in state.encoder_outputs.arrays.items()}
    if state.caches is not None and state.rows:
        contents = state.caches.contents(state.rows, session._cache_manager.used(state))
        arrays |= {
            f"state.{one.past}": content
            for one, content in zip(manifest.states, contents, strict=True)
        }
    parts = {name: np.ascontiguousarray(array) for name, array in arrays.items()}
    header = {
        "posenc_session": VERSION,
        "artefact": manifest.digest,
        "arrays": [[name, array.dtype.str, list(array.shape)] for name, array in parts.items()],
    }
    header["sha256"] = _sha256(header, parts.values())
    with replacing(file) as stream:
        stream.write(json.dumps(header).encode() + b"\n")
        for array in parts.values():
            stream.write(array.reshape(-1).view(np.uint8).data)


@contextmanager
def opened(file: Path, artefact: str) -> Iterator[Arrays]:
    """Give the arrays of a file by name, as views of the file. Its digest is computed within the context and compared when the context ends, also after an error.

    Raises:
        ValueError: the file is no saved session, was truncated or changed, or belongs to another artefact than the one with this digest.
        OSError: the file cannot be read.
    """
    with file.open("rb") as stream:
        header = _header(file, stream.readline(LINE))
        if header["artefact"] != artefact:
            raise ValueError(
                f"restore {file}: expected a session of the artefact {artefact}, got one of {header['artefact']}; restore it with that artefact"
            )
        begin = stream.tell()
        content = memoryview(mmap.mmap(stream.fileno(), 0, access=mmap.ACCESS_READ))[
            begin:
        ]  # the rest is read where it is used
    sizes = [math.prod(shape) * np.dtype(dtype).itemsize for _, dtype, shape in header["arrays"]]
    if sum(sizes) != len(content):
        raise ValueError(
            f"restore {file}: expected {sum(sizes)} bytes after the header, got {len(content)}, so the file is not whole; {REMEDY}"
        )
    ends = np.cumsum(sizes).tolist()
    with ThreadPoolExecutor(1) as pool:
        digest = pool.submit(
            _sha256, {name: value for name, value in header.items() if name != "sha256"}, [content]
        )
        try:
            yield {
                name: np.frombuffer(content[end - size : end], dtype).reshape(shape)
                for (name, dtype, shape), size, end in zip(
                    header["arrays"], sizes, ends, strict=True
                )
            }
        finally:
            if digest.result() != header["sha256"]:
                raise ValueError(
                    f"restore {file}: expected the content that was saved, got a file that was changed; {REMEDY}"
                )


def fill(session: Any, arrays: Arrays) -> None:
    """Give a session without rows the content of a file, whose artefact is that of the session. Raise ValueError if it exceeds the capacity."""
    manager, manifest = session._cache_manager, session.manifest
    length, start = arrays["length"].astype(np.int64), arrays["start"].astype(np.int64)
    if not len(length):
        return
    if (
        any(one.update == "in_place" for one in manifest.states)
        and int(length.max()) > manager.capacity
    ):
        raise ValueError(
            f"restore: expected rows of at most {manager.capacity} tokens, got {length.tolist()}; open the session with a larger capacity"
        )
    encoder = {
        name.removeprefix("encoder."): np.array(array)
        for name, array in arrays.items()
        if name.startswith("encoder.")
    }
    opened = manager.opened(session._now, start).replace(
        settled_length=length,
        slots=np.array(arrays["slots"]),
        encoder_outputs=EncoderOutputs(encoder) if encoder else None,
    )
    if any(name.startswith("state.") for name in arrays):
        used = manager.used(opened)
        caches = opened.caches.reserve(used, opened.rows).filled(
            [arrays[f"state.{one.past}"] for one in manifest.states], opened.rows, used
        )
        opened, manager.written = opened.replace(caches=caches), used
    session._now = opened


def tokens(file: Union[str, Path], artefact: str) -> Optional[List[np.ndarray]]:
    """Return the ids that Session.save was given, of each row; None if it was given none. artefact: Manifest.digest. Raise ValueError and OSError as `opened`."""
    with opened(Path(file), artefact) as arrays:
        return (
            np.split(arrays["tokens"], np.cumsum(arrays["length"])[:-1])
            if "tokens" in arrays
            else None
        )


def _header(file: Path, line: bytes) -> Dict[str, Any]:
    try:
        header = json.loads(line)
        sound = header["posenc_session"] == VERSION and {"artefact", "arrays", "sha256"} <= set(
            header
        )
        [
            (str(name), np.dtype(dtype), [int(size) for size in shape])
            for name, dtype, shape in header["arrays"]
        ]
    except (ValueError, KeyError, TypeError):
        sound = False
    if not sound:
        raise ValueError(
            f"restore {file}: expected a file of Session.save of version {VERSION}, got another one; {REMEDY}"
        )
    return header  # type: ignore[no-any-return]


def _sha256(header: Dict[str, Any], parts: Any) -> str:
    found = hashlib.sha256(json.dumps(header, sort_keys=True).encode())
    for part in parts:
        found.update(part)
    return found.hexdigest()
