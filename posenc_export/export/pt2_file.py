"""From a module to model.pt2: torch.export with every size dynamic, saved without paths or anything that varies from run to run."""

import io
import warnings
from pathlib import Path
from typing import Any, Dict

import torch

from posenc_export.export.describe import M, R, S, trace_inputs
from posenc_export.export.signatures import wrap
from posenc_export.export.source import Source, refuse_mutation
from posenc_export.runtime import files, pt2_archive
from posenc_export.runtime.archive import packed, read_entries
from posenc_export.runtime.manifest import Manifest

FILE_NAME = "model.pt2"
CHECK = torch.ops.aten._assert_tensor_metadata.default  # that a tensor has the dtype which the program gave it
KEPT = ("val", "unbacked_bindings")  # of a node; the rest tells where on the exporting machine its source stands


def write_pt2(source: Source, manifest: Manifest, folder: Path) -> Manifest:
    """Write folder/model.pt2; the manifest comes back as it was.

    Raises:
        ValueError: a module that loops over the tokens of a call, mutates buffers, or uses what a program without code cannot hold.
    """
    arguments, shapes = trace_inputs(manifest, M)
    sizes: Dict[str, Any] = {}
    try:
        with warnings.catch_warnings(), torch.no_grad():
            warnings.simplefilter("ignore")  # deprecations inside torch itself
            program = torch.export.export(wrap(source.model, manifest.signature), arguments, dynamic_shapes=_named(shapes, sizes))
    except torch._dynamo.exc.UserError as error:
        if S not in str(error):  # another size is fixed: not what is known to happen
            raise
        rule = "export: sizes of a torch.export program are free, got a module that loops over the tokens of a call"
        raise ValueError(f"{rule}; choose target torchscript or onnx") from error
    first = len(manifest.inputs)
    refuse_mutation(program, program.graph_signature.user_inputs[first : first + len(manifest.states)])
    for node in list(program.graph.nodes):
        node.meta = {key: value for key, value in node.meta.items() if key in KEPT}
        if node.target is CHECK:
            program.graph.erase_node(node)
    buffer = io.BytesIO()  # into memory: where the disk is full, libtorch ends the process instead of raising
    torch.export.save(program, buffer)
    entries = pt2_archive.stripped(read_entries(buffer.getvalue()))
    try:
        pt2_archive.check(entries)
    except ValueError as error:
        raise ValueError(f"export: a torch.export program loads without running code: {error}; choose target torchscript or onnx") from None
    files.write(folder / FILE_NAME, packed(entries))
    return manifest


def _named(shapes: Any, sizes: Dict[str, Any]) -> Any:
    """The dynamic axes of trace_inputs with one torch.export.Dim a name."""
    if isinstance(shapes, dict):
        return {axis: sizes.setdefault(name, torch.export.Dim(name, min=0 if name == R else 1)) for axis, name in shapes.items()}
    return type(shapes)(_named(part, sizes) for part in shapes)
