"""Run an artefact: numpy, msgspec and ONNX Runtime, nothing else."""

from pathlib import Path
from typing import Optional, Union

from posenc_export.runtime import manifest as manifests
from posenc_export.runtime.errors import GraphError
from posenc_export.runtime.files import locate
from posenc_export.runtime.manifest import Manifest
from posenc_export.runtime.model import Model
from posenc_export.runtime.session import Session

__all__ = ["GraphError", "Manifest", "Model", "Session", "load"]


def load(folder: Union[str, Path], provider: str = "auto", threads: Optional[int] = None) -> Model:
    """The model of an artefact folder, after its files are checked against its manifest.

    Args:
        provider: "auto", "cpu" or "cuda".
        threads: of one operator; all cores where None.

    Raises:
        ValueError: not an artefact, an altered one, a provider that is not there.
        ModuleNotFoundError: the extra the target needs is not installed.
    """
    folder = locate(folder)
    if threads is not None and threads < 1:
        raise ValueError(f"runtime: threads are at least 1, got {threads}; leave it out for all cores")
    manifest = manifests.read(folder)
    if manifest.target in ("torchscript", "pt2"):
        from posenc_export.runtime.torch_files import load_torch

        if provider not in ("auto", "cpu"):
            raise ValueError(f"runtime: target {manifest.target} runs on provider cpu, got {provider}; export target onnx or ort")
        return Model(load_torch(folder, manifest, threads))
    from posenc_export.runtime.ort_graph import OrtGraph, choose_provider

    return Model(OrtGraph(folder / "model.onnx", manifest, choose_provider(provider, manifest), threads))
