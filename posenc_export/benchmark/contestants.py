"""The contestants: artefact folders with each provider they can run on, and other runtimes of the same models."""

import importlib.metadata
from dataclasses import dataclass, replace
from pathlib import Path
from typing import List, Sequence, Tuple, Union

from posenc_export.benchmark.labels import folder_labels, model_label, numbered
from posenc_export.benchmark.runtimes import ARTEFACT, RUNTIMES
from posenc_export.runtime import manifest as manifests
from posenc_export.runtime.manifest import Manifest
from posenc_export.runtime.providers import OPENVINO, not_for_openvino


@dataclass(frozen=True)
class Contestant:
    """One worker's task.

    Args:
        label: its name in the report.
        model: short name of what it runs.
        runtime: "artefact" or a name of RUNTIMES.
        folder: the artefact, or the one whose config the runtime builds.
        artefact: name of the folder in the report.
        provider: as `load` takes it.
    """

    label: str
    model: str
    runtime: str
    folder: Path
    artefact: str
    manifest: Manifest
    provider: str = "cpu"


def gather(
    folders: Sequence[Union[str, Path]], runtimes: Sequence[str], different_models: bool = False, providers: Sequence[str] = ()
) -> List[Contestant]:
    """Other runtimes first, then the folders as given.

    Args:
        different_models: folders may hold models of different descriptions.
        providers: that run the folders too, beside the CPU and CUDA.

    Raises:
        ValueError: no folder, folders of different models, an unknown runtime or provider, one that takes none of the folders, a runtime that is not installed,
            artefacts that do not load.
    """
    if not folders:
        raise ValueError("benchmark: expected at least one artefact folder, got none; give folders that `posenc export` wrote")
    unknown = sorted(set(runtimes) - set(RUNTIMES))
    if unknown:
        raise ValueError(f"benchmark: expected runtimes among {', '.join(RUNTIMES)}, got {', '.join(unknown)}; choose among these")
    paths = [Path(folder).resolve() for folder in folders]
    read = [manifests.read(path) for path in paths]
    models: List[Manifest] = []  # the first folder of each model
    for manifest in read:
        if all(manifest.config != other.config for other in models):
            models.append(manifest)
    names = numbered([model_label(manifest) for manifest in models])
    if len(models) > 1 and not different_models:
        raise ValueError(f"benchmark: expected folders of one model, got {', '.join(names)}; give folders of one, or allow --different-models")
    own = []
    for path, label, manifest in zip(paths, folder_labels(paths), read, strict=True):
        name = next(name for name, other in zip(names, models, strict=True) if other.config == manifest.config)
        own += [Contestant(_on(label, provider), name, ARTEFACT, path, label, manifest, provider) for provider in (*_providers(manifest), *_asked(providers, manifest))]
    for provider in providers:
        if all(each.provider != provider for each in own):
            raise ValueError(f"benchmark: expected a folder that provider {provider} runs, got {', '.join(folder_labels(paths))}; add one of target onnx or ort")
    others = [peer for name in dict.fromkeys(runtimes) for peer in _of_runtime(name, own)]
    labels = numbered([contestant.label for contestant in others + own])
    return [replace(contestant, label=label) for contestant, label in zip(others + own, labels, strict=True)]


def usable(numbers: Sequence[int], contestants: Sequence[Contestant]) -> List[int]:
    """Those numbers of tokens that are inside every contestant's range, ascending.

    Raises:
        ValueError: a number below 2, none inside the range.
    """
    if any(number < 2 for number in numbers):
        raise ValueError(f"benchmark: expected contexts and prompts of at least 2 tokens, got {min(numbers)}; give larger ones")
    limit = min(contestant.manifest.max_positions for contestant in contestants)
    inside = sorted({number for number in numbers if number <= limit})
    if numbers and not inside:
        raise ValueError(f"benchmark: expected one of at most max_positions, {limit} tokens, got {', '.join(map(str, numbers))}; give smaller ones")
    return inside


def cuda_present() -> bool:
    """The GPU build of onnxruntime is installed and the machine has an NVIDIA device."""
    try:
        importlib.metadata.version("onnxruntime-gpu")
    except importlib.metadata.PackageNotFoundError:
        return False
    return Path("/dev/nvidiactl").exists()


def _of_runtime(name: str, own: Sequence[Contestant]) -> List[Contestant]:
    """What a runtime makes of the folders: each that it can load, or the first of each model that it can build."""
    runtime = RUNTIMES[name]
    missing = runtime.missing()
    if missing:
        raise ValueError(f"benchmark {name}: expected {' and '.join(missing)} to be installed, got none; pip install '{runtime.install}', or leave it out")
    taken = [each for each in own if each.provider == "cpu" and runtime.takes(each.folder, each.manifest)]
    if not taken:
        got = ", ".join(dict.fromkeys(f"{each.artefact} ({each.model}, target {each.manifest.target}, signature {each.manifest.signature})" for each in own))
        raise ValueError(f"benchmark {name}: expected {runtime.rule}, got {got}; add such a folder, or leave it out")
    if not runtime.builds:
        return [replace(each, label=f"{name} on {each.artefact}", runtime=name) for each in taken]
    first = {each.model: each for each in reversed(taken)}
    several = len({each.model for each in own}) > 1
    return [replace(each, label=f"{name} {model.split()[0]}" if several else name, runtime=name) for model, each in reversed(first.items())]


def _providers(manifest: Manifest) -> Tuple[str, ...]:
    """GroupQueryAttention has no float32 kernel on CUDA; a target made for CUDA runs nowhere else."""
    if manifest.target.endswith("-cuda"):
        return ("cuda",)
    capable = manifest.target.startswith("onnx") or (manifest.target == "ort" and manifest.dtype == "float16")
    return ("cpu", "cuda") if capable and cuda_present() else ("cpu",)


def _asked(providers: Sequence[str], manifest: Manifest) -> List[str]:
    """Those of the providers asked for that take an artefact."""
    unknown = sorted(set(providers) - set(OPENVINO))
    if unknown:
        raise ValueError(f"benchmark: expected providers among {', '.join(OPENVINO)} beside cpu and cuda, got {', '.join(unknown)}; choose among these")
    return list(dict.fromkeys(providers)) if not_for_openvino(manifest) is None else []


def _on(label: str, provider: str) -> str:
    return label if provider == "cpu" else f"{label} ({provider})"
