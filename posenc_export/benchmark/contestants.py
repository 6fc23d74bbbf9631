"""The contestants of a benchmark: artefacts on each provider, and other runtimes."""

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Dict, List, Optional, Sequence, Tuple, Union

from posenc_export.benchmark.labels import folder_labels, model_label, numbered
from posenc_export.benchmark.runtimes import ARTEFACT, RUNTIMES
from posenc_export.runtime.artefact import manifest as manifests
from posenc_export.runtime.artefact.files import locate
from posenc_export.runtime.artefact.manifest import Manifest
from posenc_export.runtime.graphs.providers import (
    AOTINDUCTOR,
    OPENVINO,
    check_name,
    not_for_openvino,
)
from posenc_export.shared.suggestion import check_name as check_known
from posenc_export.shared.suggestion import suggestion

ON_CPU = ("cpu", AOTINDUCTOR)  # every artefact has one of them, so that its name needs no provider


@dataclass(frozen=True)
class Contestant:
    """One model on one runtime, measured by one worker.

    Args:
        label, model, artefact: names of contestant, model and folder in the report.
        runtime: "artefact" or a name in RUNTIMES.
        folder, manifest: what is run, or from whose config the runtime builds the model.
        provider: as `load` takes it, never "auto".
    """

    label: str
    model: str
    runtime: str
    folder: Path
    artefact: str
    manifest: Manifest
    provider: str = "cpu"

    @property
    def reads_known_bytes(self) -> bool:
        """Whether a step reads weights and caches on the CPU in the formats of the manifest.
        Runtimes that build the model use float32 or a format of their own.
        """
        if self.provider not in (*ON_CPU, OPENVINO[0]):
            return False
        return not self._built or not (
            RUNTIMES[self.runtime].quantizes or self.manifest.weights or self.manifest.cache
        )

    @property
    def perplexity(self) -> Optional[float]:
        """Perplexity over that of the float32 module, as the manifest has it; None if it was not
        measured, and for models that the runtime builds.
        """
        quality = None if self._built else self.manifest.quality
        return quality.ratio or None if quality else None

    @property
    def _built(self) -> bool:
        return self.runtime != ARTEFACT and RUNTIMES[self.runtime].builds


def gather(
    folders: Sequence[Union[str, Path]],
    runtimes: Sequence[str],
    different_models: bool = False,
    providers: Sequence[str] = (),
) -> List[Contestant]:
    """Return the contestants: other runtimes (RUNTIMES) first, then the folders in their order.

    Args:
        different_models: allow folders of different models.
        providers: providers to measure in addition to the CPU and CUDA: those of OpenVINO, and
            "aotinductor", without which native code is not run.

    Raises:
        ValueError: no folder, folders of different models, an unknown runtime or provider, one that
            is not installed or supports none of the folders, an invalid artefact.
    """
    if not folders:
        raise ValueError(
            "benchmark: expected at least one artefact folder, got none; give folders that "
            "`posenc export` wrote"
        )
    for name in runtimes:
        check_known("benchmark: expected runtime", name, RUNTIMES)
    artefacts = _of_folders([locate(folder) for folder in folders], different_models, providers)
    peers = [peer for name in dict.fromkeys(runtimes) for peer in _of_runtime(name, artefacts)]
    labels = numbered([contestant.label for contestant in peers + artefacts])
    return [
        replace(contestant, label=label)
        for contestant, label in zip(peers + artefacts, labels, strict=True)
    ]


def _of_folders(
    folders: Sequence[Path], different_models: bool, providers: Sequence[str]
) -> List[Contestant]:
    """Return the contestants that run artefacts: one per folder and provider."""
    read, paths = [manifests.read(path) for path in folders], [path.resolve() for path in folders]
    models: List[Manifest] = []  # the first folder of each model
    for manifest in read:
        if all(manifest.config != other.config for other in models):
            models.append(manifest)
    names = numbered([model_label(manifest) for manifest in models])
    if len(models) > 1 and not different_models:
        raise ValueError(
            f"benchmark: expected folders of one model, got {', '.join(names)}; give folders "
            "of one model or pass --different-models"
        )
    configs, contestants = [manifest.config for manifest in models], []
    for path, label, manifest in zip(paths, folder_labels(paths), read, strict=True):
        name = names[configs.index(manifest.config)]
        chosen = (*_providers(manifest), *_added(providers, manifest)) or ("cpu",)
        check_name(chosen[0], manifest)
        contestants += [
            Contestant(_on(label, provider), name, ARTEFACT, path, label, manifest, provider)
            for provider in chosen
        ]
    for provider in providers:
        if all(contestant.provider != provider for contestant in contestants):
            native = provider == AOTINDUCTOR
            remedy = "that `posenc compile` wrote" if native else "of target onnx or ort"
            raise ValueError(
                f"benchmark: expected a folder that provider {provider} runs, got "
                f"{', '.join(folder_labels(paths))}; add one {remedy}"
            )
    return contestants


def usable(numbers: Sequence[int], contestants: Sequence[Contestant]) -> List[int]:
    """Return the numbers of tokens that every contestant supports, ascending, without duplicates.
    Raise ValueError for a number below 2, or if all exceed max_positions of a contestant.
    """
    if any(number < 2 for number in numbers):
        raise ValueError(
            "benchmark: expected contexts and prompts of at least 2 tokens, got "
            f"{min(numbers)}; give larger ones"
        )
    limit = min(contestant.manifest.max_positions for contestant in contestants)
    inside = sorted({number for number in numbers if number <= limit})
    if numbers and not inside:
        raise ValueError(
            f"benchmark: expected a number of at most max_positions, {limit} tokens, got "
            f"{', '.join(map(str, numbers))}; give smaller ones"
        )
    return inside


def _of_runtime(name: str, artefacts: Sequence[Contestant]) -> List[Contestant]:
    """Return a runtime's contestants: one per folder that it loads, or per model that it builds."""
    runtime = RUNTIMES[name]
    missing = runtime.missing()
    if missing:
        raise ValueError(
            f"benchmark {name}: expected {' and '.join(missing)} to be installed, got none; "
            f"pip install '{runtime.install}' or omit {name}"
        )
    supported = [artefact for artefact in artefacts if artefact.provider in ON_CPU]
    supported = [own for own in supported if runtime.supports(own.folder, own.manifest)]
    if not supported:
        raise ValueError(_unsupported(name, artefacts))
    if not runtime.builds:
        return [replace(own, label=f"{name} on {own.artefact}", runtime=name) for own in supported]
    models: Dict[str, Contestant] = {}
    for own in supported:
        models.setdefault(own.model, own)
    several = len({artefact.model for artefact in artefacts}) > 1
    return [
        replace(own, label=f"{name} {model.split()[0]}" if several else name, runtime=name)
        for model, own in models.items()
    ]


def _unsupported(name: str, artefacts: Sequence[Contestant]) -> str:
    """Return the message for a runtime that supports none of the artefacts."""
    described = dict.fromkeys(
        f"{own.artefact} ({own.model}, target {own.manifest.target}, signature "
        f"{own.manifest.signature})"
        for own in artefacts
    )
    provider = f", or give --provider {name}, which runs folders of target onnx and ort"
    return (
        f"benchmark {name}: expected {RUNTIMES[name].rule}, got {', '.join(described)}; add such "
        f"a folder or omit {name}{provider if name in OPENVINO else ''}"
    )


def _providers(manifest: Manifest) -> Tuple[str, ...]:
    """Return the providers that can run an artefact. GroupQueryAttention has no float32 kernel
    on CUDA; artefacts of target ort-cuda run only on CUDA.
    """
    if manifest.target == AOTINDUCTOR:
        return ()
    if manifest.target.endswith("-cuda"):
        return ("cuda",)
    from posenc_export.runtime.graphs import cuda

    half = manifest.target == "ort" and manifest.dtype == "float16"
    capable = half or manifest.target.startswith("onnx")
    return ("cpu", "cuda") if capable and cuda.obstacle() is None else ("cpu",)


def _added(providers: Sequence[str], manifest: Manifest) -> List[str]:
    """Return those of the chosen providers that can run an artefact."""
    known = (*OPENVINO, AOTINDUCTOR)
    for name in providers:
        if name not in known:
            remedy = suggestion(name, known)
            raise ValueError(
                f"benchmark: expected provider to be one of {', '.join(known)}, got "
                f"{name!r}; {remedy} cpu and cuda are always measured"
            )
    able = dict.fromkeys(OPENVINO, not_for_openvino(manifest) is None)
    able[AOTINDUCTOR] = manifest.target == AOTINDUCTOR
    return [name for name in dict.fromkeys(providers) if able[name]]


def _on(label: str, provider: str) -> str:
    return label if provider in ON_CPU else f"{label} ({provider})"
