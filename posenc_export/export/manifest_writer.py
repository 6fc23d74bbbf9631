"""The manifest of an artefact, from what each stage of an export knows."""

from dataclasses import dataclass, field
from importlib import metadata
from pathlib import Path
from typing import Any, Dict, Optional, Sequence

import msgspec

from posenc_export.runtime.artefact import manifest as manifests
from posenc_export.runtime.artefact.manifest import Manifest, State, Value
from posenc_export.runtime.artefact.records import File, Quality
from posenc_export.runtime.artefact.schema import INTERFACE
from posenc_export.runtime.verification.proof import Accuracy

MAKERS = ("torch", "onnx", "onnxscript")


@dataclass(frozen=True)
class Graph:
    """What the writer of a target knows of its graph. Other fields are as in the manifest."""

    inputs: Sequence[Value]
    states: Sequence[State]
    chunk: int
    files: Dict[str, File] = field(default_factory=dict)
    opset: Dict[str, int] = field(default_factory=dict)
    operators: Dict[str, int] = field(default_factory=dict)
    matrices: int = 0  # number of rounded weights
    continuation_rows: Optional[int] = None  # None for that of the target


@dataclass(frozen=True)
class Verified:
    """What the proof of an artefact shows."""

    certificate: Optional[Dict[str, Any]]  # None for an artefact that no provider of the CPU runs
    accuracy: Accuracy  # with the tolerance that the artefact was held to


def with_graph(described: Manifest, graph: Graph) -> Manifest:
    """Return the manifest of a model (describe.describe) whose graph is written."""
    weights, rows = described.weights, graph.continuation_rows
    windowed = any(state.window for state in graph.states)
    return described.replace(
        inputs=list(graph.inputs),
        states=list(graph.states),
        interface=INTERFACE if windowed else described.interface,
        chunk=graph.chunk,
        continuation_rows=described.continuation_rows if rows is None else rows,
        files=graph.files,
        opset=graph.opset,
        operators=graph.operators,
        weights=weights and msgspec.structs.replace(weights, matrices=graph.matrices),
    )


def write_manifest(
    folder: Path,
    manifest: Manifest,
    verified: Optional[Verified] = None,
    quality: Optional[Quality] = None,
) -> Manifest:
    """Write the manifest of a folder, in which all other files are. manifest: from `with_graph`,
    with what the other files hold.
    """
    if verified is not None:
        accuracy, reference = verified.accuracy, manifest.reference
        bounds = {"tolerance": accuracy.tolerance, "float32": accuracy.float32}
        reference = reference and msgspec.structs.replace(reference, **bounds)
        manifest = manifest.replace(reference=reference, certificate=verified.certificate)
    versions = {name: metadata.version(name) for name in MAKERS}
    manifest = manifest.replace(versions=versions, quality=quality)
    manifests.write(manifest, folder)
    return manifest
