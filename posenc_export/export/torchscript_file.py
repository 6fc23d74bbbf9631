"""From a module to model.pt: script, freeze, and rewrite the archive without paths or anything that varies from run to run."""

import re
import warnings
import zipfile
from pathlib import Path
from typing import Dict

import torch

from posenc_export.export.signatures import wrap
from posenc_export.export.source import Source
from posenc_export.runtime.manifest import Manifest

FILE_NAME = "model.pt"
EPOCH = (1980, 1, 1, 0, 0, 0)  # the earliest time a zip archive can carry
DROPPED = re.compile(r"\.debug_pkl$|/\.data/serialization_id$")  # source paths of the exporting machine, and a hash over them
COUNTED_NAME = re.compile(rb"___torch_mangle_\d+")  # numbered through the process: the second export would differ from the first


def write_torchscript(source: Source, manifest: Manifest, folder: Path) -> Manifest:
    """Write folder/model.pt; the manifest comes back as it was."""
    path = folder / FILE_NAME
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # torch.jit announces its retirement at every call
        warnings.simplefilter("ignore", FutureWarning)
        torch.jit.freeze(torch.jit.script(wrap(source.model, manifest.signature))).save(str(path))
    _normalise(path)
    return manifest


def _normalise(path: Path) -> None:
    with zipfile.ZipFile(path) as archive:
        entries = {name: archive.read(name) for name in archive.namelist() if not DROPPED.search(name)}
    numbers: Dict[bytes, bytes] = {}

    def renumber(match: "re.Match[bytes]") -> bytes:
        return numbers.setdefault(match.group(), b"___torch_mangle_%d" % len(numbers))

    with zipfile.ZipFile(path, "w", zipfile.ZIP_STORED) as archive:
        for name, content in entries.items():
            text = name.endswith((".py", ".pkl"))
            renamed = COUNTED_NAME.sub(renumber, name.encode()).decode()
            archive.writestr(zipfile.ZipInfo(renamed, EPOCH), COUNTED_NAME.sub(renumber, content) if text else content)
