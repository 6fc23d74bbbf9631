"""Compile pt2 artefacts to native code with AOTInductor, and verify them on this machine.

Source: torch 2.13, torch/_inductor/__init__.py (aoti_compile_and_package).
"""

import os
import shutil
import sys
from pathlib import Path
from typing import Any, Callable, Dict, List, Optional, Union

import torch
from msgspec.structs import replace
from torch._dynamo.source import ConstantSource
from torch.fx.experimental.symbolic_shapes import DimDynamic

from posenc_export.export import trained_numbers
from posenc_export.export.example_inputs import trace_inputs
from posenc_export.export.verify import VerificationError
from posenc_export.runtime import verify
from posenc_export.runtime.artefact import files, machine
from posenc_export.runtime.artefact import manifest as manifests
from posenc_export.runtime.artefact.graph_inputs import M
from posenc_export.runtime.artefact.manifest import Manifest
from posenc_export.runtime.artefact.places import check_folder
from posenc_export.runtime.artefact.publish import StagingFolder
from posenc_export.runtime.artefact.rules import graph_file
from posenc_export.runtime.artefact.schema import GRAPHS
from posenc_export.runtime.graphs.providers import AOTINDUCTOR
from posenc_export.runtime.graphs.quiet import quiet
from posenc_export.runtime.graphs.torch_files import read_program
from posenc_export.shared.refusal import refusal

ATEN = torch.ops.aten
# Example of the slots of a cache in memory; any number but those of example_inputs.SIZES.
SLOTS = 11
# Otherwise the code always uses as many threads as this process.
OPTIONS = {"cpp.dynamic_threads": True}


def compile_artefact(
    folder: Union[str, Path],
    output: Union[str, Path],
    progress: Optional[Callable[[str], None]] = None,
    digest: Optional[str] = None,
) -> Manifest:
    """Compile a verified artefact of target pt2 for this machine, verify the native code on the
    whole grid, and publish it as `output`.

    The result has target aotinductor. It loads only on a machine like this one, with the same
    version of torch, and only with provider="aotinductor".

    Args:
        folder: artefact of target pt2.
        output: created, or replaced if it already holds an artefact.
        progress: called with one line of text at each stage.
        digest: expected digest of the pt2 artefact, as for runtime.load.

    Raises:
        ValueError: no C++ compiler, an artefact of another target or without a passed certificate,
            a folder that holds other files, a program that AOTInductor cannot compile.
        VerificationError: the native code does not agree with the reference of the artefact;
            nothing is written.
        OSError: the folder cannot be written, or the disk is full; an existing artefact is
            unchanged.
    """
    folder, output = files.locate(folder), Path(output)
    check_compile(folder, output)
    manifest, say = manifests.read(folder, digest), progress or (lambda _: None)
    staging = StagingFolder([output])
    with staging as path:
        staged = path / "made"
        staged.mkdir()
        others = (graph_file(manifest), trained_numbers.FILE_NAME)
        kept = {name: entry for name, entry in manifest.files.items() if name not in others}
        for name in kept:
            shutil.copyfile(folder / name, staged / name)
        say(f"{AOTINDUCTOR}: compiling")
        graph = staged / GRAPHS[AOTINDUCTOR].file
        _compile(read_program(folder / graph_file(manifest), manifest), manifest, graph)
        reference = manifest.reference and replace(manifest.reference, float32=0.0)
        native = manifest.replace(
            target=AOTINDUCTOR,
            reference=reference,  # native code has no float32 form
            compiled=machine.on_this_machine(manifest.digest),
            files={**kept, graph.name: files.entry(graph)},
        )
        manifests.write(native.replace(certificate=None, proofs=[], encodings={}), staged)
        proof = verify(staged, AOTINDUCTOR, progress=say)
        if not proof["passed"]:
            raise VerificationError({**proof})
        staging.publish([staged])
    return manifests.read_alone(output)


def check_compile(folder: Path, output: Path) -> None:
    """Check compiler, artefact and destination first. ValueError: as for `compile_artefact`."""
    # As Inductor chooses it.
    compiler = os.environ.get("CXX", "clang++" if sys.platform == "darwin" else "g++")
    if shutil.which(compiler) is None:
        remedy = "install it, or name another in the environment variable CXX"
        raise refusal("compile", f"the C++ compiler {compiler}", "none of this name", remedy)
    manifest = manifests.read_alone(folder)
    if manifest.target != "pt2":
        rule = "an artefact of target pt2"
        raise refusal("compile", rule, f"target {manifest.target}", "export with --target pt2")
    certificate = manifest.certificate
    if manifest.reference is None or certificate is None or not certificate["passed"]:
        got = f"{folder} without a passed certificate"
        raise refusal("compile", "a verified artefact", got, "export it without --no-verify")
    if output.resolve() == folder.resolve():
        rule = "a folder other than that of the pt2 artefact"
        raise refusal("compile", rule, output, "give another with --output")
    check_folder(output)


def _compile(program: Any, manifest: Manifest, path: Path) -> None:
    """Write native code of a program. ValueError: Inductor or the compiler refuses the program."""
    # Imported here, because it takes as long as the rest of this package.
    from torch._inductor.utils import fresh_cache

    _prepare(program, manifest)
    try:
        with (
            quiet(Warning),
            fresh_cache(),
        ):  # fresh, because the usual cache is in a folder of all users and holds code
            torch._inductor.aoti_compile_and_package(
                program, package_path=str(path), inductor_configs=OPTIONS
            )
    except RuntimeError as error:
        lines = [line.strip() for line in str(error).splitlines() if line.strip()]
        reason = (lines or [type(error).__name__])[0]
        rule = "a program that AOTInductor compiles"
        raise refusal("compile", rule, reason[:200], "run the pt2 artefact itself") from error


def _prepare(program: Any, manifest: Manifest) -> None:
    """Complete a program for Inductor: inputs, caches with gaps, writes without copies."""
    program.example_inputs = (trace_inputs(manifest, M)[0], {})
    graph, names = program.graph, program.graph_signature.user_inputs[len(manifest.inputs) :]
    placeholders = {node.name: node for node in graph.nodes if node.op == "placeholder"}
    _set_strides([placeholders[name] for name in names[: len(manifest.states)]], manifest)
    for node in graph.nodes:
        if node.target is ATEN.index_put_.default and node.args[0].target is ATEN.transpose.int:
            # Inductor copies a cache that it writes through a view. Swapped axes 1 and 2 equal an
            # index without axis 1 (posenc_export.ops.append).
            cache, (rows, slots) = node.args[0].args[0], node.args[1]
            node.args = (cache, [rows, None, slots], *node.args[2:])
    program.graph_module.recompile()


def _set_strides(nodes: List[torch.fx.Node], manifest: Manifest) -> None:
    """Let caches be the first slots of larger memory. Inductor's code checks no strides."""
    strides_of_step: Dict[int, torch.SymInt] = {}
    for node, state in zip(nodes, manifest.states, strict=True):
        if not state.in_place:
            continue
        example = node.meta["val"]
        strides: List[Any] = [1] * example.dim()
        for axis in reversed(range(example.dim() - 1)):
            step = strides[axis + 1]
            # Caches of one size share the stride, since a session gives them the same slots.
            if axis + 1 == state.axis and step not in strides_of_step:
                symbols = example.fake_mode.shape_env
                strides_of_step[step] = symbols.create_unspecified_symint_and_symbol(
                    SLOTS * step, ConstantSource(f"slots of {step}"), DimDynamic.DYNAMIC
                )
            strides[axis] = (
                strides_of_step[step] if axis + 1 == state.axis else step * example.shape[axis + 1]
            )
        with example.fake_mode:
            node.meta["val"] = torch.empty_strided(example.shape, strides, dtype=example.dtype)
