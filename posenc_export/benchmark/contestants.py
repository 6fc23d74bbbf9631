"""The contestants of a benchmark: artefacts on each provider, and other runtimes."""

import re
import shlex
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Sequence

from posenc_export.benchmark.runtimes import ARTEFACT, RUNTIMES
from posenc_export.runtime.artefact import manifest as manifests
from posenc_export.runtime.artefact.files import locate
from posenc_export.runtime.artefact.manifest import Manifest
from posenc_export.runtime.artefact.summary import encodings, sequence
from posenc_export.runtime.graphs.providers import host_only
from posenc_export.shared.refusal import refusal
from posenc_export.shared.suggestion import check_name

SHOWN = 3  # names of encodings in a label; further ones are shown as "..."


def model_label(manifest: Manifest) -> str:
    """Return encodings, layers x width and number of weights that a step reads, as in "rope 5x128
    0.97M"; of a module its class and this number.
    """
    config, kind, count = manifest.config, manifest.kind, manifest.step_weights / 1e6
    layers = len(sequence(config.get("order")))
    built = f" {f'{layers}x' if layers else f'{kind} '}{config.get('width', '?')}"
    digits = 0 if count >= 99.5 else 1 if count >= 9.95 else 2
    return f"{_named(manifest)}{'' if kind == 'module' else built} {count:.{digits}f}M"


def _named(manifest: Manifest) -> str:
    """Return the encodings of a model, as in "rope+alibi"; of a module its class."""
    if manifest.kind == "module":
        return str(manifest.config.get("name")).rpartition(".")[2]
    names = [*dict.fromkeys(re.split("[: ]", text)[0] for text in encodings(manifest.config))]
    return "+".join(names if len(names) <= SHOWN else [*names[:SHOWN], "..."]) or "nope"


def artefact_labels(manifests: Sequence[Manifest], paths: Sequence[Path]) -> list[str]:
    """Return names of artefacts by encoding, target, weights, cache and signature, as in
    "rope-ort-int8". Artefacts that agree in these have the shortest distinct endings of their
    paths as well.
    """
    names = ["-".join(_parts(manifest)) for manifest in manifests]
    labels = []
    for name, path in zip(names, paths, strict=True):
        alike = [p for other, p in zip(names, paths, strict=True) if other == name and p != path]
        depths = range(1, len(path.parts) + 1)
        apart = (n for n in depths if all(p.parts[-n:] != path.parts[-n:] for p in alike))
        ending = "/".join(path.parts[-next(apart, 1) :])
        labels.append(f"{name} in {ending}" if alike else name)
    return labels


def _parts(manifest: Manifest) -> list[str]:
    weights = manifest.weights.format if manifest.weights else ""
    dtype = manifest.dtype if manifest.dtype != "float32" else ""
    cache = f"cache-{manifest.cache}" if manifest.cache else ""
    mask = "mask" if manifest.signature == "mask" else ""
    parts = (_named(manifest), manifest.target, dtype, weights, cache, mask)
    return [part for part in parts if part]


def numbered(names: Sequence[str]) -> list[str]:
    """Return the names with "#2", "#3" ... appended to repetitions."""
    counts = [names[: at + 1].count(name) for at, name in enumerate(names)]
    labels = zip(names, counts, strict=True)
    return [name if count == 1 else f"{name} #{count}" for name, count in labels]


@dataclass(frozen=True)
class Contestant:
    """One model on one runtime, measured by one worker."""

    label: str  # names of contestant, model and folder (`artefact`) in the report
    model: str
    runtime: str  # "artefact" or a name in RUNTIMES
    folder: Path  # what is run, or from whose config the runtime builds the model
    artefact: str
    manifest: Manifest
    provider: str = "cpu"  # as `load` takes it, never "auto"

    @property
    def reads_known_bytes(self) -> bool:
        """Whether a step reads weights and caches on the CPU in the formats of the manifest."""
        if self.provider != "cpu":
            return False
        of_few_bits = self.manifest.weights or self.manifest.cache
        return not self._built or not (RUNTIMES[self.runtime].quantizes or of_few_bits)

    @property
    def perplexity(self) -> float | None:
        """Perplexity over that of float32; None if not measured on this folder."""
        quality = None if self._built else self.manifest.quality
        return quality.ratio if quality else None

    @property
    def _built(self) -> bool:
        return self.runtime != ARTEFACT and RUNTIMES[self.runtime].builds


def gather(folders: Sequence[str | Path], runtimes: Sequence[str]) -> list[Contestant]:
    """Return the contestants: other runtimes (RUNTIMES) first, then the folders in their order.
    Raise ValueError for no folder, and for runtimes that support none or are not installed.
    """
    if not folders:
        rule = "at least one artefact folder"
        raise refusal("benchmark", rule, "none", "give folders that `posenc export` wrote")
    for name in runtimes:
        check_name("benchmark: expected runtime", name, RUNTIMES)
    artefacts = _of_folders([locate(folder) for folder in folders])
    peers = [peer for name in dict.fromkeys(runtimes) for peer in _of_runtime(name, artefacts)]
    labels = numbered([contestant.label for contestant in peers + artefacts])
    pairs = zip(peers + artefacts, labels, strict=True)
    return [replace(contestant, label=label) for contestant, label in pairs]


def _of_folders(folders: Sequence[Path]) -> list[Contestant]:
    read, paths = [manifests.read(path) for path in folders], [path.resolve() for path in folders]
    models: list[Manifest] = []  # the first folder of each model
    for manifest in read:
        if all(manifest.config != other.config for other in models):
            models.append(manifest)
    names = numbered([model_label(manifest) for manifest in models])
    configs, contestants = [manifest.config for manifest in models], []
    for path, label, manifest in zip(paths, artefact_labels(read, paths), read, strict=True):
        name, folder = names[configs.index(manifest.config)], "/".join(path.parts[-2:])
        for provider in _providers(manifest):
            on = label if provider == "cpu" else f"{label} ({provider})"
            own = Contestant(on, name, ARTEFACT, path, folder, manifest, provider)
            contestants.append(own)
    return contestants


def usable(numbers: Sequence[int], contestants: Sequence[Contestant]) -> list[int]:
    """Return the numbers of tokens that every contestant supports, ascending. Raise ValueError for
    a number below 2, or if all exceed max_positions of a contestant.
    """
    if any(number < 2 for number in numbers):
        rule = "contexts and prompts of at least 2 tokens"
        raise refusal("benchmark", rule, min(numbers), "give larger ones")
    limit = min(contestant.manifest.max_positions for contestant in contestants)
    inside = sorted({number for number in numbers if number <= limit})
    if numbers and not inside:
        rule = f"a number of at most max_positions, {limit} tokens"
        raise refusal("benchmark", rule, ", ".join(map(str, numbers)), "give smaller ones")
    return inside


def _of_runtime(name: str, artefacts: Sequence[Contestant]) -> list[Contestant]:
    """Return a runtime's contestants: one per folder that it loads, or per model that it builds."""
    runtime = RUNTIMES[name]
    missing = runtime.missing()
    if missing:
        rule = f"{' and '.join(missing)} to be installed"
        remedy = f"pip install {shlex.join(runtime.install.split())}, or omit {name}"
        raise refusal(f"benchmark {name}", rule, "none", remedy)
    supported = [artefact for artefact in artefacts if artefact.provider == "cpu"]
    supported = [own for own in supported if runtime.supports(own.folder, own.manifest)]
    if not supported:
        ends = ((own, own.manifest.target, own.manifest.signature) for own in artefacts)
        named = [f"{own.artefact} ({own.model}, target {t}, signature {s})" for own, t, s in ends]
        got, remedy = ", ".join(dict.fromkeys(named)), f"add such a folder or omit {name}"
        raise refusal(f"benchmark {name}", runtime.rule, got, remedy)
    if not runtime.builds:
        return [replace(own, label=f"{name} on {own.label}", runtime=name) for own in supported]
    models: dict[str, Contestant] = {}
    for own in supported:
        models.setdefault(own.model, own)
    several = len({artefact.model for artefact in artefacts}) > 1
    names = {model: f"{name} {model.split()[0]}" if several else name for model in models}
    return [replace(own, label=names[model], runtime=name) for model, own in models.items()]


def _providers(manifest: Manifest) -> tuple[str, ...]:
    """Providers that run an artefact on this machine."""
    if manifest.target.endswith("-cuda"):
        return ("cuda",)
    if manifest.in_torch or host_only(manifest):
        return ("cpu",)
    from posenc_export.runtime.graphs import cuda

    return ("cpu", "cuda") if cuda.obstacle() is None else ("cpu",)
