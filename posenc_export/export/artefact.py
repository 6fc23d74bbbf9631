"""Write an artefact folder: graph and manifest in a temporary folder, renamed when complete and proved."""

import dataclasses
import difflib
import os
import shutil
import tempfile
from importlib import metadata
from pathlib import Path
from typing import Callable, Optional, Union

from posenc_export.export.describe import Model, describe
from posenc_export.export.signatures import NAMES
from posenc_export.export.source import Sources
from posenc_export.export.targets import TARGETS
from posenc_export.export.verify import check
from posenc_export.runtime import manifest as manifests
from posenc_export.runtime.manifest import Manifest

Progress = Callable[[str], None]
MAKERS = ("torch", "onnx", "onnxscript")


def silent(_: str) -> None:
    """The progress of one who does not ask."""


def export(
    model: Union[Model, Sources], target: str, folder: Union[str, Path], signature: str = "positions", dtype: Optional[str] = None, verify: bool = True, progress: Optional[Progress] = None
) -> Manifest:
    """Write `model` to `folder` for `target`, and prove it (export/verify.py) before it gets its name.

    Args:
        model: a Decoder, Encoder or AttentionBlock, float32; its weights are left as they are. For several targets, Sources(model): traced once for all.
        target: a name in TARGETS.
        folder: made or, where it holds an artefact, replaced.
        signature: "positions" (position_ids) or "mask" (attention_mask).
        dtype: "float32" or "float16", of weights, activations and caches; the target's usual one where None.
        verify: run the parity grid and write its certificate.
        progress: called with a line at each stage.

    Raises:
        ValueError: unknown target, signature or dtype, a folder that holds something else, a module the target cannot represent.
        VerificationError: the artefact does not agree with the module; nothing is written.
    """
    say, folder = progress or silent, Path(folder)
    _check_names(target, signature, dtype)
    kind = TARGETS[target]
    dtype = dtype or kind.dtypes[0]
    if dtype not in kind.dtypes:
        raise ValueError(f"export: target {target} takes dtype {', '.join(kind.dtypes)}, got {dtype}; give --dtype {kind.dtypes[0]} or choose another target")
    if signature not in kind.layout:
        raise ValueError(f"export: target {target} takes signature {', '.join(kind.layout)}, got {signature}; choose target ort or onnx")
    if folder.exists() and not (folder / manifests.FILE_NAME).is_file() and (not folder.is_dir() or any(folder.iterdir())):
        raise ValueError(f"export: the folder is new, empty or an artefact, got {folder}; choose another")
    source = (model if isinstance(model, Sources) else Sources(model)).of(dtype)
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder.parent, prefix=".posenc-") as temporary:
        made = Path(temporary) / "artefact"
        made.mkdir()
        say(f"{target}: tracing and lowering")
        manifest = kind.write(source, describe(source.model, target, signature, kind.layout[signature], kind.update, **kind.geometry), made)
        files = {path.name: manifests.file_entry(path) for path in sorted(made.iterdir())}
        manifest = dataclasses.replace(manifest, files=files, versions={name: metadata.version(name) for name in MAKERS})
        manifests.write(manifest, made)
        if verify:
            manifest = check(made, source.model, say)
        _replace(made, folder)
    return manifest


def _check_names(target: str, signature: str, dtype: Optional[str]) -> None:
    for what, name, names in (("target", target, list(TARGETS)), ("signature", signature, list(NAMES)), ("dtype", dtype, ["float32", "float16"])):
        if name is not None and name not in names:
            near = difflib.get_close_matches(name, names, 1)
            raise ValueError(f"export: {what} is one of {', '.join(names)}, got {name!r}" + (f"; did you mean {near[0]}?" if near else ""))


def _replace(made: Path, folder: Path) -> None:
    if folder.exists():
        shutil.rmtree(folder)
    os.replace(made, folder)
