"""posenc.json, from which the runtime knows a model: written in one step, and read with every check that needs no graph."""

import json
from pathlib import Path
from typing import Any, Optional, Union

import msgspec

from posenc_export.runtime import files, rules
from posenc_export.runtime.schema import SCHEMA, Axis, Calibration, File, Manifest, Package, State, Value, digest_of

__all__ = ["FILE_NAME", "SCHEMA", "Axis", "Calibration", "File", "Manifest", "Package", "State", "Value", "read", "read_alone", "write"]

FILE_NAME = "posenc.json"
LONGEST = 64 << 20  # bytes; a manifest of a deep decoder has some 100 kB
REMEDY = "export again, or give the folder as `posenc export` wrote it"


def write(manifest: Manifest, folder: Path) -> None:
    """Write posenc.json into folder in one step, with sorted keys and a digest of its content."""
    content = json.loads(json.dumps(manifest.to_json()))
    content["seal"] = digest_of(content)
    files.replace(folder / FILE_NAME, (json.dumps(content, indent=1, sort_keys=True) + "\n").encode())


def read(folder: Union[str, Path], digest: Optional[str] = None) -> Manifest:
    """Read posenc.json and check every file against it.

    Args:
        folder: of the artefact; one that an export left aside when it was stopped is found (files.locate).
        digest: that the manifest must have (Manifest.digest), where it came another way than the files.

    Raises:
        ValueError: as `read_alone`; a missing or altered file.
    """
    folder = files.locate(folder)
    manifest = read_alone(folder, digest)
    files.check(folder, manifest)
    return manifest


def read_alone(folder: Path, digest: Optional[str] = None) -> Manifest:
    """Read posenc.json; the files that it lists are still to be compared (files.check).

    Raises:
        ValueError: no manifest, an altered manifest, another schema or digest, a field of another type or range, fields that contradict each other.
    """
    content = _content(folder)
    if content.get("schema") != SCHEMA:
        raise ValueError(f"artefact {folder}: expected schema {SCHEMA}, got {_short(content.get('schema'))}; export again with this version")
    seal = content.pop("seal", None)
    if seal != digest_of(content):
        raise ValueError(f"artefact {folder}: expected {FILE_NAME} as it was written, got content of another digest; {REMEDY}")
    manifest = _manifest(folder, content)
    if digest is not None and digest.lower() != manifest.digest:
        raise ValueError(f"artefact {folder}: expected digest {_short(digest)}, got {manifest.digest}; take the artefact from where the digest came from")
    return manifest


def _content(folder: Path) -> Any:
    path = folder / FILE_NAME
    if not path.is_file():
        raise ValueError(f"artefact {folder}: expected {FILE_NAME} in it, got none; give a folder that `posenc export` wrote")
    if path.stat().st_size > LONGEST:
        raise ValueError(f"artefact {folder}: expected {FILE_NAME} of at most {LONGEST} bytes, got {path.stat().st_size}; {REMEDY}")
    try:
        content = msgspec.json.decode(path.read_bytes())
        json.dumps(content)  # content that cannot be encoded again has no digest: lone surrogates, deep nesting
    except RecursionError:
        raise ValueError(f"artefact {folder}: expected flat JSON in {FILE_NAME}, got deeper nesting than can be read; {REMEDY}") from None
    except ValueError as error:
        raise ValueError(f"artefact {folder}: expected JSON in {FILE_NAME}, got {_short(error)}; {REMEDY}") from None
    if not isinstance(content, dict):
        raise ValueError(f"artefact {folder}: expected a JSON object in {FILE_NAME}, got {type(content).__name__}; {REMEDY}")
    return content


def _manifest(folder: Path, content: Any) -> Manifest:
    try:
        manifest = msgspec.convert(content, Manifest)
        rules.check(manifest)
    except msgspec.ValidationError as error:
        raise ValueError(f"artefact {folder}: expected the fields of schema {SCHEMA} in {FILE_NAME}, got another: {_short(error)}; {REMEDY}") from None
    except ValueError as error:
        raise ValueError(f"artefact {folder}: {FILE_NAME}: {_short(error)}; {REMEDY}") from None
    return manifest


def _short(value: Any) -> str:
    """One line, at most 300 characters."""
    return " ".join(str(value).split())[:300]
