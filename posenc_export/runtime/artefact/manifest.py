"""The manifest posenc.json: atomic writing, and reading with every check that needs no graph."""

import json
import shlex
from pathlib import Path
from typing import Any

import msgspec

from posenc_export.runtime.artefact import certificate, files, rules, schema
from posenc_export.runtime.artefact.records import Axis, Calibration, File, Package
from posenc_export.runtime.artefact.schema import SCHEMA, Manifest, State, Value
from posenc_export.shared import preset_folders
from posenc_export.shared.foreign import brief
from posenc_export.shared.refusal import refusal
from posenc_export.shared.suggestion import download, suggestion

__all__ = [
    "FILE_NAME", "SCHEMA", "Axis", "Calibration", "File", "Manifest", "Package", "State", "Value",
    "add_proof", "read", "read_alone", "write",
]  # fmt: skip

FILE_NAME = "posenc.json"
LONGEST = 64 << 20  # largest accepted size in bytes; that of a deep decoder has about 100 kB
REMEDY = "export again, or give the folder as `posenc export` wrote it"


def write(manifest: Manifest, folder: Path) -> None:
    """Write posenc.json into a folder atomically, with sorted keys and a digest of its content."""
    content = json.loads(json.dumps(manifest.to_json()))
    content["seal"] = schema.digest_of(content)
    text = json.dumps(content, indent=1, sort_keys=True) + "\n"
    files.replace(folder / FILE_NAME, text.encode())


def add_proof(folder: Path, digest: str, proof: certificate.Proof) -> None:
    """Write a proof into posenc.json of an artefact that is no preset, in place of one with the
    same provider and machine. Raise ValueError as `read_alone` if its digest has changed, or
    OSError.
    """
    manifest = read_alone(folder, digest)
    if preset_folders.is_preset(folder):
        return
    place = (proof["provider"], proof["machine"])
    others = [other for other in manifest.proofs if (other["provider"], other["machine"]) != place]
    write(manifest.replace(proofs=[*others, proof][-schema.MOST_PROOFS :]), folder)


def read(folder: str | Path, digest: str | None = None) -> Manifest:
    """Read posenc.json and check every file against it. Raise ValueError as `read_alone`, and for a
    file that is missing or altered.

    Args:
        folder: artefact folder; if it is missing, that which an interrupted export set aside.
        digest: expected Manifest.digest, from another source than the folder; None compares none.
    """
    folder = files.locate(folder)
    manifest = read_alone(folder, digest)
    files.check(folder, manifest)
    return manifest


def read_alone(folder: Path, digest: str | None = None) -> Manifest:
    """Read posenc.json without comparing the files that it lists. Raise ValueError if it is missing
    or altered, has another schema or digest or a wrong field, or contradicts itself.
    """
    content, where = _content(folder), f"artefact {folder}"
    version, interface = content.get("schema"), content.get("interface", 0)
    if version != SCHEMA:
        remedy = REMEDY if version is None else "export again with this version"
        raise refusal(where, f"schema {SCHEMA}", brief(version or "none"), remedy)
    if isinstance(interface, int) and interface > schema.INTERFACE:
        rule = f"inputs and outputs of graph interface {schema.INTERFACE} or below"
        remedy = "install the version of posenc-export that wrote it, or export again with this one"
        raise refusal(where, rule, f"interface {interface}", remedy)
    seal = content.pop("seal", None)
    if seal != schema.digest_of(content):
        raise refusal(where, f"{FILE_NAME} as it was written", "content of another digest", REMEDY)
    try:
        manifest = msgspec.convert(content, Manifest)
        rules.check(manifest)
    except msgspec.ValidationError as error:
        rule = f"the fields of schema {SCHEMA} in {FILE_NAME}"
        raise refusal(where, rule, f"another: {brief(error)}", REMEDY) from None
    except ValueError as error:
        raise ValueError(f"{where}: {FILE_NAME}: {brief(error)}; {REMEDY}") from None
    if digest is not None and str(digest).lower() != manifest.digest:
        remedy = "take the artefact from where the digest came from"
        raise refusal(where, f"digest {brief(digest)}", manifest.digest, remedy)
    return manifest


def _content(folder: Path) -> Any:
    path, where = folder / FILE_NAME, f"artefact {folder}"
    if not path.is_file():
        inside = sorted(nested.parent.name for nested in folder.glob(f"*/{FILE_NAME}"))
        remedy = f"give one of its subfolders {', '.join(inside)}" if inside else ""
        got = "none" if folder.exists() else "no folder of this name"
        got = "a file" if folder.is_file() else got
        raise refusal(where, f"{FILE_NAME} in it", got, remedy or _export_first(folder))
    size = path.stat().st_size
    if size > LONGEST:
        raise refusal(where, f"{FILE_NAME} of at most {LONGEST} bytes", size, REMEDY)
    try:
        content = msgspec.json.decode(path.read_bytes())
        # The digest encodes the content again, which lone surrogates and deep nesting prevent.
        json.dumps(content)
    except RecursionError:
        got = "deeper nesting than can be read"
        raise refusal(where, f"flat JSON in {FILE_NAME}", got, REMEDY) from None
    except ValueError as error:
        raise refusal(where, f"JSON in {FILE_NAME}", brief(error), REMEDY) from None
    if not isinstance(content, dict):
        raise refusal(where, f"a JSON object in {FILE_NAME}", type(content).__name__, REMEDY)
    return content


def _export_first(folder: Path) -> str:
    place, fetch = str(folder), download(folder)
    near = suggestion(place, preset_folders.NAMES, "")
    is_file = folder.suffix == ".gguf" and folder.is_file()
    if place in preset_folders.NAMES:
        return f"for the preset of this name, {preset_folders.INSTALL}"
    if near and not folder.exists():
        return near
    if is_file or (folder / "config.json").is_file():
        what = "file" if is_file else "checkpoint"
        quoted = shlex.quote(place)
        return f"export the {what} first: posenc export {quoted} --target ort -o ARTEFACT"
    if fetch:
        of_hub = f"{fetch} downloads the model of this name from the Hugging Face hub"
        return f"give a folder that `posenc export` wrote; if none was meant, {of_hub}"
    names = ", ".join(preset_folders.NAMES)
    return f"give a folder that `posenc export` wrote, or a preset: {names}"
