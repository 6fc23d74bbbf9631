"""The model that a command runs: an artefact, or a checkpoint, which is exported once into the
user's cache folder.

An artefact there has the digest of what it was made from in its name: the contents of the files,
the version of this package, and the options of the export.
"""

import argparse
import hashlib
import json
import os
import re
import shlex
from pathlib import Path
from typing import Any, Callable

from posenc_export.commands.model_argument import checkpoint, checkpoint_name
from posenc_export.commands.options import Table, nearest_model, option
from posenc_export.commands.terminal import note, note_unverified
from posenc_export.runtime import load
from posenc_export.runtime.artefact import files, manifest
from posenc_export.runtime.artefact.manifest import Manifest
from posenc_export.runtime.graphs import providers
from posenc_export.runtime.graphs.providers import AUTO
from posenc_export.shared.preset_folders import NAMES
from posenc_export.shared.refusal import refusal
from posenc_export.shared.version import VERSION

SUFFIXES = (".json", ".safetensors", ".jinja")  # of files that are read of a folder
CONFIG, MODULES, TOKENIZER = "config.json", "modules.json", "tokenizer.json"
TARGET, TARGETS = "ort", {"cuda": "onnx-static"}  # the default, and those of other providers


def model_of(artefact: str) -> Table:
    """The folder of an artefact, or a checkpoint that is exported once."""
    meaning = (
        f"folder of {artefact}, or a preset, such as {NAMES[0]}; or a folder of transformers or a "
        "GGUF file, which is exported once into the user's cache folder"
    )
    format_ = (
        "of a checkpoint or GGUF file: int8, int4 or keep, as posenc export (default: float32)"
    )
    return {
        "folder": option(meaning, type=Path, metavar="model"),
        "--weights": option(f"format of the weights {format_}", metavar="FORMAT"),
    }


def loaded(
    options: argparse.Namespace,
    folder: Path,
    check: Callable[[Manifest], None] = lambda _: None,
    threads: int | str = AUTO,
) -> Any:
    """Load the model of a folder, or of a checkpoint, whose manifest is checked before its export.
    A line on stderr says if it was never verified.
    """
    name = str(folder)
    if name not in NAMES and not files.locate(folder).exists():
        rule = f"a folder or GGUF file that exists, or a preset: {', '.join(NAMES)}"
        raise refusal("model", rule, repr(name), nearest_model(name, NAMES))
    if is_checkpoint(folder):
        folder = exported(options, folder, check)
    elif options.weights is not None:
        rule, remedy = "--weights with a checkpoint or GGUF file", "leave it out"
        raise refusal("weights", rule, f"the artefact {folder}", remedy)
    model = load(folder, options.provider, threads)
    note_unverified(options.say, folder, model.manifest)
    return model


def is_checkpoint(path: Path) -> bool:
    """Whether a path is a GGUF file, or a folder of transformers or sentence-transformers."""
    if path.suffix == ".gguf" and path.is_file():
        return True
    names = (manifest.FILE_NAME, CONFIG, MODULES)
    artefact, *described = ((path / name).is_file() for name in names)
    return not artefact and any(described)


def exported(options: argparse.Namespace, path: Path, check: Callable[[Manifest], None]) -> Path:
    """Return the artefact of a checkpoint, which is exported with the quick check unless it is in
    the cache folder.

    Args:
        options: provider, which determines the target, weights as in ExportOptions, and say.
        check: raises ValueError for the manifest of a model that the command cannot use.

    Raises:
        ValueError: as from_pretrained, export and `check`, or the artefact does not agree.
        ModuleNotFoundError: an extra is not installed.
        OSError: the cache folder cannot be written.
    """
    target = TARGETS.get(options.provider, TARGET)
    place = place_of(path, target, options.weights)
    if (place / manifest.FILE_NAME).is_file():
        return place
    format_ = [] if options.weights is None else ["--weights", options.weights]
    command = ["posenc", "export", str(path), "--target", target, *format_, "-o", "FOLDER"]
    options.say(f"{path}: reading")
    # Before torch is imported: on a busy machine, threads that spin while they wait take the time
    # of those that compute, and an export takes nearly twice as long.
    os.environ.setdefault("OMP_WAIT_POLICY", "passive")
    from posenc_export.export import ExportOptions, Sources, VerificationError, export_all
    from posenc_export.export.describe import describe
    from posenc_export.runtime.graphs.ort_options import choose_provider

    how = ExportOptions(verify="quick", weights=options.weights, progress=options.say)
    how.check([target])
    sources = Sources(checkpoint(str(path), {}), owned=True)
    described = describe(sources.model, target, how.signature)
    providers.check_name(options.provider, described)
    choose_provider(options.provider, described)  # a provider that this machine has
    check(described)
    options.say.close()
    note(
        f"{path} is exported once, with the quick check, to {place}; "
        f"with every check: {shlex.join(command)}"
    )
    try:
        export_all(sources, [target], place, how)
    except VerificationError as error:
        raise refusal("export", "an artefact that agrees with its model", str(error)) from None
    options.say.close()
    return place


def place_of(path: Path, target: str, weights: str | None = None) -> Path:
    """Return the folder for the artefact of a checkpoint, named by all that determines it."""
    name, folder = checkpoint_name(path), path if path.is_dir() else path.parent
    read = [(str(file.relative_to(folder)), files.entry(file).sha256) for file in _files(path)]
    text = json.dumps([VERSION, manifest.SCHEMA, name, target, weights, read])
    digest = hashlib.sha256(text.encode()).hexdigest()[:16]
    return files.cache_folder() / "artefacts" / f"{Path(name).name}-{digest}"


def _files(path: Path) -> list[Path]:
    """Return the files that a checkpoint can consist of: of a GGUF file, all into which it was
    split, and tokenizer.json; of a folder, those of SUFFIXES, in its modules too.
    """
    if path.is_dir():
        inside = path.rglob("*") if (path / MODULES).is_file() else path.iterdir()
        return sorted(file for file in inside if file.suffix in SUFFIXES and file.is_file())
    parts = [file for file in path.parent.glob("*.gguf") if _whole(file) == _whole(path)]
    tokenizer = path.parent / TOKENIZER
    return [*sorted(parts), *([tokenizer] if tokenizer.is_file() else [])]


def _whole(file: Path) -> str:
    """Return the name of a file; of parts such as NAME-00001-of-00002, all have the same one."""
    return re.sub(r"-\d{5}(-of-\d{5})$", r"\1", file.stem)
