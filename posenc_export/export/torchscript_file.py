"""From a module to model.pt: script, freeze, and rewrite the archive without paths or anything that varies from run to run."""

import re
import warnings
from pathlib import Path
from typing import Dict

import torch

from posenc_export.export.signatures import wrap
from posenc_export.export.source import Source
from posenc_export.runtime import files
from posenc_export.runtime.archive import packed, read_entries
from posenc_export.runtime.manifest import Manifest

FILE_NAME = "model.pt"
DROPPED = re.compile(r"\.debug_pkl$|/\.data/serialization_id$")  # source paths of the exporting machine, and a hash over them
COUNTED_NAME = re.compile(rb"___torch_mangle_\d+")  # numbered through the process: the second export would differ from the first


def write_torchscript(source: Source, manifest: Manifest, folder: Path) -> Manifest:
    """Write folder/model.pt; the manifest comes back as it was."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # torch.jit announces its retirement at every call
        warnings.simplefilter("ignore", FutureWarning)
        # Into memory: where the disk is full, libtorch ends the process instead of raising.
        content = torch.jit.freeze(torch.jit.script(wrap(source.model, manifest.signature))).save_to_buffer()
    files.write(folder / FILE_NAME, _normalised(content))
    return manifest


def _normalised(archive: bytes) -> bytes:
    entries = {name: content for name, content in read_entries(archive).items() if not DROPPED.search(name)}
    numbers: Dict[bytes, bytes] = {}

    def renumber(match: "re.Match[bytes]") -> bytes:
        return numbers.setdefault(match.group(), b"___torch_mangle_%d" % len(numbers))

    renamed = {}
    for name, content in entries.items():
        here = COUNTED_NAME.sub(renumber, name.encode()).decode()
        renamed[here] = COUNTED_NAME.sub(renumber, content) if name.endswith((".py", ".pkl")) else content
    return packed(renamed)
