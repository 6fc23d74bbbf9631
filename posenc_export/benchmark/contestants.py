"""The contestants: artefact folders with each provider they can run on, and runtimes that build the same model again."""

import importlib.metadata
from dataclasses import dataclass
from pathlib import Path
from typing import List, Sequence, Tuple, Union

from posenc_export.runtime import manifest as manifests
from posenc_export.runtime.manifest import Manifest

RUNTIMES = ("eager", "torch.compile")


@dataclass(frozen=True)
class Contestant:
    """One worker's task.

    Args:
        runtime: "artefact", "eager" or "torch.compile".
        folder: the artefact, or the one whose config the runtime builds.
        provider: "cpu" or "cuda".
    """

    label: str
    runtime: str
    folder: Path
    manifest: Manifest
    provider: str = "cpu"


def gather(folders: Sequence[Union[str, Path]], runtimes: Sequence[str]) -> List[Contestant]:
    """Runtimes first, then the folders as given.

    Raises:
        ValueError: no folder, an unknown runtime, runtimes beside folders of several models, artefacts that do not load.
    """
    if not folders:
        raise ValueError("benchmark: expected at least one artefact folder, got none; give folders that `posenc export` wrote")
    unknown = sorted(set(runtimes) - set(RUNTIMES))
    if unknown:
        raise ValueError(f"benchmark: expected runtimes among {', '.join(RUNTIMES)}, got {', '.join(unknown)}; choose among these")
    paths = [Path(folder).resolve() for folder in folders]
    read = [(path, manifests.read(path)) for path in paths]
    first_path, first = read[0]
    if runtimes and any(manifest.config != first.config for _, manifest in read):
        raise ValueError("benchmark: expected folders of one model beside runtimes, got folders of several; give runtimes=() or folders of one model")
    live = [Contestant(name, name, first_path, first) for name in dict.fromkeys(runtimes)]
    return _distinct(live + [Contestant(_name(p, provider), "artefact", p, m, provider) for p, m in read for provider in _providers(m)])


def usable(contexts: Sequence[int], contestants: Sequence[Contestant]) -> List[int]:
    """The contexts inside every contestant's range, ascending.

    Raises:
        ValueError: a context below 2, none inside the range.
    """
    if any(context < 2 for context in contexts):
        raise ValueError(f"benchmark: expected contexts of at least 2 tokens, got {min(contexts)}; give larger ones")
    limit = min(contestant.manifest.max_positions for contestant in contestants)
    inside = sorted({context for context in contexts if context <= limit})
    if not inside:
        raise ValueError(f"benchmark: expected a context of at most max_positions, {limit}, got {', '.join(map(str, contexts)) or 'none'}; give smaller contexts")
    return inside


def cuda_present() -> bool:
    """The GPU build of onnxruntime is installed and the machine has an NVIDIA device."""
    try:
        importlib.metadata.version("onnxruntime-gpu")
    except importlib.metadata.PackageNotFoundError:
        return False
    return Path("/dev/nvidiactl").exists()


def _providers(manifest: Manifest) -> Tuple[str, ...]:
    """GroupQueryAttention has no float32 kernel on CUDA; a target made for CUDA runs nowhere else."""
    if manifest.target.endswith("-cuda"):
        return ("cuda",)
    capable = manifest.target.startswith("onnx") or (manifest.target == "ort" and manifest.dtype == "float16")
    return ("cpu", "cuda") if capable and cuda_present() else ("cpu",)


def _name(path: Path, provider: str) -> str:
    return path.name if provider == "cpu" else f"{path.name} ({provider})"


def _distinct(contestants: List[Contestant]) -> List[Contestant]:
    seen: List[str] = []
    result = []
    for each in contestants:
        seen.append(each.label)
        again = seen.count(each.label)
        result.append(each if again == 1 else Contestant(f"{each.label} #{again}", each.runtime, each.folder, each.manifest, each.provider))
    return result
