"""Random edits of an artefact folder. All random choices come from the generator that an edit is
given.
"""

import io
import json
import zipfile
from pathlib import Path
from random import Random
from typing import Any, Callable, Dict, List, Tuple

from posenc_export.runtime.artefact.archive import packed, read_entries
from posenc_export.runtime.artefact.manifest import FILE_NAME

Edit = Callable[[Path, Random], None]
VALUES: Tuple[Any, ...] = (
    None, True, False, 0, 1, -1, 2, 7, 255, 2**31 - 1, 2**31, 2**53, 2**63, 2**64, 10**40, -(2**63),
    0.5, -0.0, 1e300, 5e-324, "", "x", "batch_size", "capacity", "past_sequence_length", "float16",
    "float64", "int32", "rows", "columns", "append", "in_place", "replace", "mask", "positions",
    "decoder", "encoder", "onnx", "ort", "torchscript", "pt2", "../model.onnx", "/etc/passwd",
    "model.pt", "a\nb", "\x00", "é" * 200, "x" * 100_000, [], {}, [[]], {"a": {}}, [0] * 1000,
)  # fmt: skip
EXTRA = (
    "extra/a data/weights/model.pt data/constants/custom_obj_0 models/b.json "
    "data/aotinductor/a/b.so ../../a data.pkl constants.pkl"
).split()


def _graph(folder: Path) -> Path:
    return next(path for path in sorted(folder.iterdir()) if path.name.startswith("model."))


def _weights(folder: Path) -> Path:
    """Return the file with the weights, which may be the graph's own file."""
    return next(
        path for path in sorted(folder.iterdir(), reverse=True) if path.name.startswith("model.")
    )


def flip_bytes(path: Path, chance: Random) -> None:
    """Change up to 8 bytes, half of the time near each other."""
    content = bytearray(path.read_bytes())
    if not content:
        return
    start = chance.randrange(len(content))
    for _ in range(chance.choice((1, 1, 2, 4, 8))):
        at = (
            min(start + chance.randrange(16), len(content) - 1)
            if chance.random() < 0.5
            else chance.randrange(len(content))
        )
        content[at] ^= (
            1 << chance.randrange(8) if chance.random() < 0.5 else chance.randrange(1, 256)
        )
    path.write_bytes(bytes(content))


def truncate(path: Path, chance: Random) -> None:
    content = path.read_bytes()
    path.write_bytes(
        content[
            : chance.choice(
                (
                    0,
                    1,
                    len(content) // 2,
                    max(len(content) - 1, 0),
                    chance.randrange(len(content) + 1),
                )
            )
        ]
    )


def splice(path: Path, chance: Random) -> None:
    """Move, double, clear or randomise a part of the file, or remove it."""
    content = path.read_bytes()
    a, b = sorted((chance.randrange(len(content) + 1), chance.randrange(len(content) + 1)))
    b = min(b, a + chance.choice((1, 8, 64, 4096)))
    part = chance.choice(
        (b"", content[a:b] * 2, bytes(b - a), chance.randbytes(b - a), content[b:] + content[a:b])
    )
    path.write_bytes(content[:a] + part + content[b:])


def _places(node: Any, path: Tuple[Any, ...] = ()) -> List[Tuple[Any, ...]]:
    items = (
        node.items()
        if isinstance(node, dict)
        else enumerate(node)
        if isinstance(node, list)
        else ()
    )
    result = [path] if path else []
    for key, value in items:
        result += _places(value, (*path, key))
    return result


def edit_json(content: Any, chance: Random) -> None:
    """Change, remove or duplicate one value, or add one."""
    path = chance.choice(_places(content))
    parent = content
    for key in path[:-1]:
        parent = parent[key]
    key, what = path[-1], chance.randrange(8)
    if what == 0:
        del parent[key]
    elif what == 1 and isinstance(parent, list):
        parent.insert(chance.randrange(len(parent) + 1), json.loads(json.dumps(parent[key])))
    elif what == 1:
        parent[chance.choice(("extra", "name", "", "x" * 500))] = chance.choice(VALUES)
    elif what == 2:
        other = chance.choice(_places(content))
        value = content
        for part in other:
            value = value[part]
        parent[key] = json.loads(json.dumps(value))
    elif what == 3:
        parent[key] = deep(parent[key], chance)
    elif what == 4 and type(parent[key]) is int:
        parent[key] += chance.choice((-1, 1, 2, 64, -64))
    else:
        parent[key] = chance.choice(VALUES)


def deep(value: Any, chance: Random) -> Any:
    for _ in range(chance.choice((1, 3, 50, 400))):
        value = [value] if chance.random() < 0.5 else {"a": value}
    return value


def _manifest_value(folder: Path, chance: Random) -> None:
    path = folder / FILE_NAME
    content = json.loads(path.read_bytes())
    for _ in range(chance.choice((1, 1, 2, 4))):
        edit_json(content, chance)
    path.write_text(json.dumps(content, indent=1))


def _manifest_text(folder: Path, chance: Random) -> None:
    path = folder / FILE_NAME
    text = path.read_bytes()
    at = chance.randrange(len(text))
    piece = chance.choice(
        (
            b"[" * 100_000,
            b'{"a":' * 2000,
            b"NaN",
            b"1e999",
            b"9" * 5000,
            b"\xff\xfe",
            b"\x00",
            b"\\ud800",
            b"/*",
            b",",
            b"}",
        )
    )
    path.write_bytes(text[:at] + piece + text[at:])


def _swap(folder: Path, chance: Random) -> None:
    one, other = folder / FILE_NAME, _graph(folder)
    first, second = one.read_bytes(), other.read_bytes()
    one.write_bytes(second)
    other.write_bytes(first)


def _other_graph(folder: Path, chance: Random) -> None:
    _graph(folder).write_bytes(
        chance.choice((b"", b"PK\x03\x04", b"\x08\x0a", bytes(1000), chance.randbytes(5000)))
    )


def _remove(folder: Path, chance: Random) -> None:
    chance.choice(sorted(folder.iterdir())).unlink()


def _entries(folder: Path, chance: Random) -> None:
    """Remove, add, rename, exchange, truncate, edit or compress entries of an archive."""
    path = _graph(folder)
    if not zipfile.is_zipfile(path):
        return splice(path, chance)
    entries = read_entries(path.read_bytes())
    name, other = chance.choice(sorted(entries)), chance.choice(sorted(entries))
    root, what = name.split("/")[0], chance.randrange(8)
    if what == 0:
        del entries[name]
    elif what == 1:
        entries[f"{root}/{chance.choice(EXTRA)}"] = entries[other]
    elif what == 2:
        entries[name + chance.choice(("x", "/", "\u00e9"))] = entries.pop(name)
    elif what == 3:
        entries[name], entries[other] = entries[other], entries[name]
    elif what == 4:
        entries[name] = _bytes_flipped(entries[name], chance)
    elif what == 5:
        entries[name] = entries[name][: chance.randrange(len(entries[name]) + 1)]
    elif what == 6:
        _edit_program(entries, chance)
    path.write_bytes(packed(entries) if what < 7 else _compressed(entries, other))


def _compressed(entries: Dict[str, bytes], large: str) -> bytes:
    """Pack entries with compression, one of them as many zeros."""
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, content in entries.items():
            archive.writestr(name, bytes(1 << 24) if name == large else content)
    return buffer.getvalue()


def _edit_program(entries: Dict[str, bytes], chance: Random) -> None:
    """Edit a JSON value, or exchange two words of the code, in an archive."""
    texts = [name for name in sorted(entries) if name.endswith((".json", ".py"))]
    name = chance.choice(texts)
    if name.endswith(".json"):
        content = json.loads(entries[name])
        edit_json(content, chance)
        entries[name] = json.dumps(content).encode()
    else:
        words = entries[name].split(b" ")
        one, other = chance.randrange(len(words)), chance.randrange(len(words))
        words[one], words[other] = words[other], words[one]
        entries[name] = b" ".join(words)


def _bytes_flipped(content: bytes, chance: Random) -> bytes:
    changed = bytearray(content)
    if changed:
        changed[chance.randrange(len(changed))] ^= chance.randrange(1, 256)
    return bytes(changed)


def _in_graph(edit: Edit) -> Edit:
    return lambda folder, chance: edit(_graph(folder), chance)


def _in_weights(edit: Edit) -> Edit:
    return lambda folder, chance: edit(_weights(folder), chance)


def _in_manifest(edit: Edit) -> Edit:
    return lambda folder, chance: edit(folder / FILE_NAME, chance)


RESEALED_EDITS: Dict[str, Edit] = {
    "bytes of the graph": _in_graph(flip_bytes),
    "end of the graph": _in_graph(truncate),
    "part of the graph": _in_graph(splice),
    "bytes of the weights": _in_weights(flip_bytes),
    "end of the weights": _in_weights(truncate),
    "part of the weights": _in_weights(splice),
    "entries of the graph": _entries,
    "another graph": _other_graph,
    "value of the manifest": _manifest_value,
    "values of the manifest": _manifest_value,
    "text of the manifest": _manifest_text,
    "end of the manifest": _in_manifest(truncate),
    "exchanged files": _swap,
    "missing file": _remove,
}
EDITS: Dict[str, Edit] = {**RESEALED_EDITS, "bytes of the manifest": _in_manifest(flip_bytes)}
