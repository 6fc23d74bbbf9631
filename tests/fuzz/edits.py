"""Random edits of the files of an artefact. All random choices come from the generator that an edit
is given.
"""

import hashlib
import json
from pathlib import Path
from random import Random
from typing import Any

from posenc_export.runtime.artefact.manifest import FILE_NAME

VALUES: tuple[Any, ...] = (
    None, True, False, 0, 1, -1, 2, 7, 255, 2**31 - 1, 2**31, 2**53, 2**63, 2**64, 10**40, -(2**63),
    0.5, -0.0, 1e300, 5e-324, "", "x", "batch_size", "capacity", "past_sequence_length", "float16",
    "float64", "int32", "rows", "columns", "append", "in_place", "replace", "mask", "positions",
    "decoder", "encoder", "onnx", "ort", "torchscript", "pt2", "../model.onnx", "/etc/passwd",
    "model.pt", "a\nb", "\x00", "é" * 200, "x" * 100_000, [], {}, [[]], {"a": {}}, [0] * 1000,
)  # fmt: skip


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
    ends = (0, 1, len(content) // 2, max(len(content) - 1, 0), chance.randrange(len(content) + 1))
    path.write_bytes(content[: chance.choice(ends)])


def splice(path: Path, chance: Random) -> None:
    """Move, double, clear or randomise a part of the file, or remove it."""
    content = path.read_bytes()
    a, b = sorted((chance.randrange(len(content) + 1), chance.randrange(len(content) + 1)))
    b = min(b, a + chance.choice((1, 8, 64, 4096)))
    part = chance.choice(
        (b"", content[a:b] * 2, bytes(b - a), chance.randbytes(b - a), content[b:] + content[a:b])
    )
    path.write_bytes(content[:a] + part + content[b:])


def _places(node: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
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


def edited(folder: Path, chance: Random) -> str:
    """Edit one file of an artefact. Return the name of the file."""
    path = chance.choice(sorted(folder.iterdir()))
    if path.name == FILE_NAME and chance.random() < 0.8:
        content = json.loads(path.read_bytes())
        for _ in range(chance.choice((1, 1, 2, 4))):
            edit_json(content, chance)
        path.write_text(json.dumps(content))
    elif chance.random() < 0.1:
        path.unlink()
    else:
        chance.choice((flip_bytes, truncate, splice))(path, chance)
    return path.name


def reseal(folder: Path) -> None:
    """Update the hashes and the seal of the manifest, if it is still a JSON object."""
    try:
        content = json.loads((folder / FILE_NAME).read_bytes())
    except (FileNotFoundError, ValueError, RecursionError):
        return
    if not isinstance(content, dict):
        return
    listed, there = content.get("files"), {path.name for path in folder.iterdir() if path.is_file()}
    for name, entry in listed.items() if isinstance(listed, dict) else ():
        if name in there and isinstance(entry, dict):
            file = (folder / name).read_bytes()
            entry.update(sha256=hashlib.sha256(file).hexdigest(), bytes=len(file))
    content.pop("seal", None)
    content["seal"] = hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()
    (folder / FILE_NAME).write_text(json.dumps(content))
