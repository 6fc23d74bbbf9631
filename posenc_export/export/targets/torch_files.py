"""Write model.pt, a scripted and frozen module, and model.pt2, a program of torch.export with
dynamic sizes, both without data that differs between runs.
"""

import functools
import io
import re
from pathlib import Path
from typing import Any, Collection

import torch

from posenc_export.export.describe import trace_inputs
from posenc_export.export.onnx_program import CHECK, refuse_mutation, written_by
from posenc_export.export.signatures import wrap
from posenc_export.export.trace import Source
from posenc_export.reading.tracing import short_traces
from posenc_export.runtime.artefact import files, pt2_archive
from posenc_export.runtime.artefact.archive import packed, read_entries
from posenc_export.runtime.artefact.graph_inputs import M, R, S
from posenc_export.runtime.artefact.manifest import Manifest
from posenc_export.runtime.graphs.quiet import quiet

SCRIPT = "model.pt"
# Source paths of the exporting machine, and a hash over them.
DROPPED = re.compile(r"\.debug_pkl$|/\.data/serialization_id$")
# The counter is global to the process, so a second export would differ from the first.
COUNTED_NAME = re.compile(rb"___torch_mangle_\d+")
PROGRAM = "model.pt2"
SIZE, LINEAR = torch.ops.aten.sym_size.int, torch.ops.aten.linear.default
# Metadata of nodes; the other keys hold source paths of the exporting machine.
KEPT = ("val", "unbacked_bindings")


def write_torchscript(source: Source, manifest: Manifest, folder: Path) -> Manifest:
    """Write folder/model.pt."""
    # Every call of torch.jit warns that it is deprecated.
    with quiet(DeprecationWarning, FutureWarning):
        module = torch.jit.script(wrap(source.model, manifest.signature))
        # The second time folds what the first one leaves, which differs from run to run.
        module = torch.jit.freeze(torch.jit.freeze(module, ["training"]))
        _lay_out_constants(module)
        # In memory, because libtorch aborts the process when the disk is full.
        content = module.save_to_buffer()
    written = {SCRIPT: files.write(folder / SCRIPT, _normalised(content))}
    return manifest.replace(files=written)


def _lay_out_constants(module: torch.jit.ScriptModule) -> None:
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
    numbers: dict[bytes, bytes] = {}

    def renumber(match: "re.Match[bytes]") -> bytes:
        return numbers.setdefault(match.group(), b"___torch_mangle_%d" % len(numbers))

    renamed = {}
    for name, content in entries.items():
        here = COUNTED_NAME.sub(renumber, name.encode()).decode()
        named = name.endswith((".py", ".pkl"))
        renamed[here] = COUNTED_NAME.sub(renumber, content) if named else content
    return packed(renamed)


def write_pt2(source: Source, manifest: Manifest, folder: Path) -> Manifest:
    """Write folder/model.pt2. ValueError: a module that loops over the tokens of a call, mutates
    buffers, or whose program could not be loaded without running code.
    """
    program = _program(source, manifest)
    first = len(manifest.inputs)
    caches = program.graph_signature.user_inputs[first : first + len(manifest.states)]
    refuse_mutation(program, caches)
    for node in list(program.graph.nodes):
        node.meta = {key: value for key, value in node.meta.items() if key in KEPT}
        if node.target is CHECK:
            program.graph.erase_node(node)
    _merge_equal_nodes(program.graph, caches)
    _lay_out_weights(program)
    buffer = io.BytesIO()  # in memory, because libtorch aborts the process when the disk is full
    # Of weights that are not contiguous; each has a storage of its own size.
    with quiet(UserWarning, message="No complete tensor"):
        torch.export.save(program, buffer)
    try:
        entries = pt2_archive.without_places(read_entries(buffer.getvalue()))
    except ValueError as error:
        rule = "export: expected a torch.export program that loads without running code"
        got = f"one that does not ({error})"
        raise ValueError(f"{rule}, got {got}; choose target torchscript or onnx") from None
    written = {PROGRAM: files.write(folder / PROGRAM, packed(entries))}
    return manifest.replace(files=written)


def _program(source: Source, manifest: Manifest) -> torch.export.ExportedProgram:
    dim = functools.cache(lambda name: torch.export.Dim(name, min=0 if name == R else 1))
    arguments, shapes = trace_inputs(manifest, M, dim)
    try:
        # Of deprecations inside torch itself.
        with quiet(Warning), torch.no_grad(), short_traces():
            module = wrap(source.model, manifest.signature)
            return torch.export.export(module, arguments, dynamic_shapes=shapes)
    except torch._dynamo.exc.UserError as error:
        if S not in str(error):  # only a fixed sequence length has a known cause
            raise
        got = "one that loops over the tokens of a call"
        rule = f"export: expected a module with dynamic sizes for target pt2, got {got}"
        raise ValueError(f"{rule}; choose target torchscript or onnx") from error


def _merge_equal_nodes(graph: torch.fx.Graph, caches: Collection[Any]) -> None:
    """Compute once what several layers compute in the same way, such as the table rows of
    positions.

    caches: names of the inputs that the program writes; they share no memory with other inputs.
    What depends on memory that is written is not merged.
    """
    varying = {node for node in graph.nodes if node.op == "placeholder" and node.name in caches}
    varying |= {written for node in graph.nodes if (written := written_by(node)) is not None}
    first: dict[tuple[Any, str, str], torch.fx.Node] = {}
    for node in [node for node in graph.nodes if node.op == "call_function"]:
        reads = [] if node.target is SIZE else node.all_input_nodes
        if (
            torch.Tag.nondeterministic_seeded in getattr(node.target, "tags", ())
            or written_by(node)
            or not varying.isdisjoint([node, *reads])
        ):
            varying.add(node)
            continue
        equal = first.setdefault((node.target, repr(node.args), repr(node.kwargs)), node)
        if equal is not node:
            node.replace_all_uses_with(equal)
            graph.erase_node(node)


def _lay_out_weights(program: torch.export.ExportedProgram) -> None:
    """Store weights that only linear layers read in the layout a step reads fastest."""
    names, weights = program.graph_signature.inputs_to_parameters, program.state_dict
    for node in program.graph.nodes:
        if (
            node.name in names
            and node.users
            and all(use.target is LINEAR and use.args[1] is node for use in node.users)
        ):
            stored = weights[names[node.name]]
            weight = torch.nn.Parameter(laid_out(stored), requires_grad=False)
            # A module with several names.
            weights.update({name: weight for name, other in weights.items() if other is stored})
            node.meta["val"] = node.meta["val"].as_strided(weight.size(), weight.stride())
