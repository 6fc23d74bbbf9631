"""Write model.pt: script, freeze, and drop data that differs between runs."""

import re
from pathlib import Path
from typing import Any, Dict

import torch

from posenc_export.export.signatures import wrap
from posenc_export.export.trace import Source
from posenc_export.runtime.artefact import files
from posenc_export.runtime.artefact.archive import packed, read_entries
from posenc_export.runtime.artefact.manifest import Manifest
from posenc_export.runtime.graphs.quiet import quiet

FILE_NAME = "model.pt"
# Source paths of the exporting machine, and a hash over them.
DROPPED = re.compile(r"\.debug_pkl$|/\.data/serialization_id$")
# The counter is global to the process, so a second export would differ from the first.
COUNTED_NAME = re.compile(rb"___torch_mangle_\d+")


def write_torchscript(source: Source, manifest: Manifest, folder: Path) -> Manifest:
    """Write folder/model.pt."""
    # Every call of torch.jit warns that it is deprecated.
    with quiet(DeprecationWarning, FutureWarning):
        # In memory, because libtorch aborts the process when the disk is full.
        module = torch.jit.freeze(torch.jit.script(wrap(source.model, manifest.signature)))
        _lay_out_weights(module)
        content = module.save_to_buffer()
    written = {FILE_NAME: files.write(folder / FILE_NAME, _normalised(content))}
    return manifest.replace(files=written)


def _lay_out_weights(module: torch.jit.ScriptModule) -> None:
    """Store weights that only linear layers read in the layout a step reads fastest."""
    graph: Any = module.graph  # its type stub is incomplete
    for node in graph.findAllNodes("aten::linear"):
        weight = list(node.inputs())[1]
        if weight.node().kind() == "prim::Constant" and all(
            use.user.kind() == "aten::linear" for use in weight.uses()
        ):
            weight.node().t_("value", laid_out(weight.toIValue()))


def laid_out(weight: torch.Tensor) -> torch.Tensor:
    """Return a weight [N,E] with the same values, contiguous along its longer axis.

    A step multiplies each weight by one vector. Once the weights exceed the cache of a core, MKL
    does this up to twice as fast if it reads long contiguous parts of memory (measured for N and E
    of 256 to 4096); products of many tokens take the same time in both layouts.
    """
    if weight.size(0) < weight.size(1):
        return weight
    return weight.t().contiguous().t()


def _normalised(archive: bytes) -> bytes:
    content_of = read_entries(archive).items()
    entries = {name: content for name, content in content_of if not DROPPED.search(name)}
    numbers: Dict[bytes, bytes] = {}

    def renumber(match: "re.Match[bytes]") -> bytes:
        return numbers.setdefault(match.group(), b"___torch_mangle_%d" % len(numbers))

    renamed = {}
    for name, content in entries.items():
        here = COUNTED_NAME.sub(renumber, name.encode()).decode()
        named = name.endswith((".py", ".pkl"))
        renamed[here] = COUNTED_NAME.sub(renumber, content) if named else content
    return packed(renamed)
