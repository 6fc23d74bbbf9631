"""posenc.json: all the runtime knows of a model, and the checks that refuse an artefact which is not what it says."""

import dataclasses
import hashlib
import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Dict, List, Mapping, Optional, Tuple, Union

SCHEMA = 2
FILE_NAME = "posenc.json"
UPDATES = ("append", "in_place", "replace")
Axis = Union[int, str]


@dataclass(frozen=True)
class Value:
    """One graph input or output: name, numpy dtype name, axes as sizes or symbolic names."""

    name: str
    dtype: str
    axes: Tuple[Axis, ...]


@dataclass(frozen=True)
class State:
    """A tensor that outlives a call: output `present` is the next call's input `past`.

    Args:
        update: "append" grows along axis, "in_place" has a fixed capacity along axis and shares one buffer, "replace" is new each call.
        axes: B first; the one that is a name, `axis`, counts slots.
        fill: value of slots never written.
        reads_hidden: whether the graph reads slots beyond a row's length: hidden slots must then hold `fill`.
    """

    past: str
    present: str
    dtype: str
    axes: Tuple[Axis, ...]
    update: str
    axis: int
    fill: int = 0
    reads_hidden: bool = True


@dataclass(frozen=True)
class Manifest:
    """Description of an artefact.

    Args:
        kind: "decoder" (input_ids to logits), "encoder" (input_ids and token_type_ids to last_hidden_state) or "block" (hidden_states to output).
        target: "onnx", "onnx-static", "ort", "ort-cuda", "torchscript", "pt2", or "eager" for a live module.
        signature: "positions" (position_ids, -1 padding) or "mask" (attention_mask, positions counted from it inside the graph).
        dtype: "float32" or "float16", of activations and caches.
        layout: where a row's tokens stand in the cache: "rows" (row b fills its own first slots) or "columns" (all rows advance together).
        max_positions: positions 0 .. max_positions - 1 are the range.
        capacity_bucket: in-place caches are sized in multiples of it; 0 for the whole range at once (a cost that does not follow capacity).
        continuation_rows: most rows a call of several new tokens on a filled cache may have; 0 for any.
        contiguous: positions of a row must follow each other without gaps.
        axes: coordinates of a token beside its place; where above 0, position_ids is [1+axes,B,S], the place first.
        chunk: tokens of a row fed at a time unless told; bounds a bias to [H,chunk,T].
        source: how to build the same weights again: {"preset": name} or {"seed": number}; empty for a model of the user's own.
        files: file name to {"sha256", "bytes"}.
        certificate: what `verify` found, or None.
    """

    kind: str
    target: str
    signature: str
    dtype: str
    layout: str
    config: Dict[str, Any]
    inputs: List[Value]
    outputs: List[Value]
    states: List[State]
    max_positions: int
    capacity_bucket: int
    continuation_rows: int
    contiguous: bool
    axes: int = 0
    chunk: int = 512
    opset: Dict[str, int] = field(default_factory=dict)
    operators: Dict[str, int] = field(default_factory=dict)
    versions: Dict[str, str] = field(default_factory=dict)
    source: Dict[str, Any] = field(default_factory=dict)
    files: Dict[str, Dict[str, Any]] = field(default_factory=dict)
    certificate: Optional[Dict[str, Any]] = None
    schema: int = SCHEMA

    def input(self, name: str) -> Optional[Value]:
        return next((value for value in self.inputs if value.name == name), None)


def write(manifest: Manifest, folder: Path) -> None:
    """Write posenc.json, keys sorted, sealed with a digest of its own content."""
    content = json.loads(json.dumps(dataclasses.asdict(manifest)))
    content["digest"] = _digest(content)
    (folder / FILE_NAME).write_text(json.dumps(content, indent=1, sort_keys=True) + "\n", encoding="utf-8")


def read(folder: Path) -> Manifest:
    """Read posenc.json and check every file against it.

    Raises:
        ValueError: no manifest, an altered manifest, another schema, unknown or missing keys, a missing or altered file.
    """
    path = folder / FILE_NAME
    if not path.is_file():
        raise ValueError(f"artefact {folder}: holds {FILE_NAME}, got none; give a folder that `posenc export` wrote")
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"artefact {folder}: {FILE_NAME} is JSON, got {error}; export again") from None
    if not isinstance(content, dict) or content.get("schema") != SCHEMA:
        raise ValueError(f"artefact {folder}: schema is {SCHEMA}, got {content.get('schema') if isinstance(content, dict) else content!r}; export again")
    if content.pop("digest", None) != _digest(content):
        raise ValueError(f"artefact {folder}: {FILE_NAME} is as it was written, got another digest; export again")
    manifest = _parse(folder, content)
    for name, entry in sorted(manifest.files.items()):
        _check_file(folder, name, entry)
    return manifest


def file_entry(path: Path) -> Dict[str, Any]:
    """{"sha256": hex, "bytes": size} of a file."""
    with path.open("rb") as stream:
        return {"sha256": hashlib.file_digest(stream, "sha256").hexdigest(), "bytes": path.stat().st_size}


def _check_file(folder: Path, name: str, entry: Mapping[str, Any]) -> None:
    path = folder / name
    if Path(name).name != name:
        raise ValueError(f"artefact {folder}: files stand in the folder itself, got {name!r}; export again")
    if not path.is_file():
        raise ValueError(f"artefact {folder}: holds {name}, got none; export again")
    found = file_entry(path)
    if found != entry:
        raise ValueError(f"artefact {folder}: {name} has sha256 {entry['sha256'][:12]}..., got {found['sha256'][:12]}...; export again")


def _digest(content: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


def _parse(folder: Path, content: Dict[str, Any]) -> Manifest:
    names = {f.name for f in dataclasses.fields(Manifest)}
    if set(content) != names:
        raise ValueError(f"artefact {folder}: manifest keys are those of schema {SCHEMA}, got a difference in {', '.join(sorted(set(content) ^ names))}; export again")
    for key in ("inputs", "outputs"):
        content[key] = [Value(v["name"], v["dtype"], tuple(v["axes"])) for v in content[key]]
    content["states"] = [State(**{**state, "axes": tuple(state["axes"])}) for state in content["states"]]
    return Manifest(**content)
