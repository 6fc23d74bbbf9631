"""Run an artefact: numpy, msgspec and ONNX Runtime, nothing else; by name under OpenVINO."""

from pathlib import Path
from typing import Callable, Optional, Union

from posenc_export.runtime import manifest as manifests
from posenc_export.runtime import providers
from posenc_export.runtime.errors import GraphError
from posenc_export.runtime.files import check, checked, locate
from posenc_export.runtime.manifest import Manifest
from posenc_export.runtime.model import Model
from posenc_export.runtime.rules import WEIGHTS, graph_file
from posenc_export.runtime.schema import MOST_PROOFS, Proof
from posenc_export.runtime.session import Session

__all__ = ["GraphError", "Manifest", "Model", "Proof", "Session", "load", "verify"]


def load(folder: Union[str, Path], provider: str = "auto", threads: Optional[int] = None, digest: Optional[str] = None) -> Model:
    """The model of an artefact folder, after its files are checked against its manifest.

    Args:
        provider: of ONNX Runtime "auto", "cpu" or "cuda"; "openvino" in float32, "openvino-bf16" in bfloat16. "auto" never takes OpenVINO.
        threads: of one operator; all cores where None.
        digest: that the artefact must have (`posenc inspect` prints it), where it came another way than the files.

    Raises:
        ValueError: not an artefact, an altered one, another digest, a provider that is not there.
        ModuleNotFoundError: the extra the target needs is not installed.
    """
    folder = locate(folder)
    if threads is not None and threads < 1:
        raise ValueError(f"runtime: expected at least 1 thread, got {threads}; leave it out for all cores")
    manifest = manifests.read_alone(folder, digest)
    providers.check_name(provider, manifest)
    if manifest.target in ("torchscript", "pt2"):
        check(folder, manifest)  # before torch reads a program
        from posenc_export.runtime.torch_files import load_torch

        return Model(load_torch(folder, manifest, threads))
    if provider in providers.OPENVINO:
        from posenc_export.runtime.openvino_graph import OpenVinoGraph

        with checked(folder, manifest, meanwhile=WEIGHTS):
            return Model(OpenVinoGraph(folder / graph_file(manifest), manifest, provider, threads))
    from posenc_export.runtime.ort_graph import OrtGraph, choose_provider

    with checked(folder, manifest, meanwhile=WEIGHTS):
        return Model(OrtGraph(folder / graph_file(manifest), manifest, choose_provider(provider, manifest), threads))


def verify(
    folder: Union[str, Path],
    provider: str = "auto",
    threads: Optional[int] = 1,
    digest: Optional[str] = None,
    progress: Optional[Callable[[str], None]] = None,
    record: bool = True,
) -> Proof:
    """Prove an artefact where it runs: the whole grid against the reference that it carries.

    Args:
        provider, threads, digest: as `load`.
        progress: called with a line at each stage.
        record: write the proof into the manifest; False for a folder that cannot be written.

    Returns:
        {"passed", "tolerance", "provider", "machine", "cells": {name: worst error}}. In bfloat16 the tolerance is that of the artefact and the rounding of
        every product (numerics.bfloat16_tolerance).

    Raises:
        ValueError: as `load`; an artefact without a reference.
        ModuleNotFoundError: as `load`.
    """
    from posenc_export.runtime import measuring, proof, reference

    folder = locate(folder)
    model = load(folder, provider, threads, digest)
    manifest = model.manifest
    expected = reference.read(manifest, folder)
    session, *beside = measuring.sessions(model, threads)
    cells, bound = measuring.measure(session, expected, progress or (lambda _: None), beside), manifest.reference.tolerance  # type: ignore[union-attr]
    bound += providers.rounding(session.provider, manifest)
    found: Proof = {"passed": max(cells.values()) <= bound, "tolerance": bound, "provider": session.provider, "machine": proof.where(session), "cells": cells}
    if not record:
        return found
    others = [made for made in manifest.proofs if (made["provider"], made["machine"]) != (found["provider"], found["machine"])]
    manifests.write(manifest.replace(proofs=[*others, found][-MOST_PROOFS:]), folder)
    return found
