"""Write model.pt2 from a module: torch.export with dynamic sizes, saved without paths or other data that differs between runs."""

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
CHECK = torch.ops.aten._assert_tensor_metadata.default  # a check of a dtype that the program itself determines
KEPT = ("val", "unbacked_bindings")  # metadata of nodes; the other keys hold source paths of the exporting machine


def write_pt2(source: Source, manifest: Manifest, folder: Path) -> Manifest:
    """Write folder/model.pt2 and return the manifest unchanged.

    Raises:
        ValueError: a module that loops over the tokens of a call, mutates buffers, or whose program could not be loaded without running code.
    """
    arguments, shapes = trace_inputs(manifest, M)
    sizes: Dict[str, Any] = {}
    try:
        with warnings.catch_warnings(), torch.no_grad():
            warnings.simplefilter("ignore")  # deprecations inside torch itself
            program = torch.export.export(wrap(source.model, manifest.signature), arguments, dynamic_shapes=_named(shapes, sizes))
    except torch._dynamo.exc.UserError as error:
        if S not in str(error):  # only a fixed sequence length has a known cause
            raise
        rule = "export: expected a module with dynamic sizes for target pt2, got one that loops over the tokens of a call"
        raise ValueError(f"{rule}; choose target torchscript or onnx") from error
    first = len(manifest.inputs)
    refuse_mutation(program, program.graph_signature.user_inputs[first : first + len(manifest.states)])
    for node in list(program.graph.nodes):
        node.meta = {key: value for key, value in node.meta.items() if key in KEPT}
        if node.target is CHECK:
            program.graph.erase_node(node)
    buffer = io.BytesIO()  # in memory, because libtorch aborts the process when the disk is full
    torch.export.save(program, buffer)
    entries = pt2_archive.stripped(read_entries(buffer.getvalue()))
    try:
        pt2_archive.check(entries)
    except ValueError as error:
        rule = "export: expected a torch.export program that loads without running code"
        raise ValueError(f"{rule}, got one that does not ({error}); choose target torchscript or onnx") from None
    files.write(folder / FILE_NAME, packed(entries))
    return manifest


def _named(shapes: Any, sizes: Dict[str, Any]) -> Any:
    """Return the dynamic axes of trace_inputs with one torch.export.Dim per name."""
    if isinstance(shapes, dict):
        return {axis: sizes.setdefault(name, torch.export.Dim(name, min=0 if name == R else 1)) for axis, name in shapes.items()}
    return type(shapes)(_named(part, sizes) for part in shapes)
