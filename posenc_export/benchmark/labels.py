"""Short names of models, from their descriptions, and of artefact folders, from their paths."""

from pathlib import Path
from typing import Any, Dict, List, Sequence

from posenc_export.runtime.artefact.manifest import Manifest

SHOWN = 3  # names of encodings in a label; further ones are shown as "..."


def model_label(manifest: Manifest) -> str:
    """Return encodings, layers x width and number of parameters, as in "rope 5x128 0.97M"; a
    model without encodings is labelled "nope".
    """
    config = manifest.config.get("inside", manifest.config)
    layers = (
        f"{len(config['order'])}x" if config.get("order") else f"{config.get('kind', 'model')} "
    )
    return (
        f"{'+'.join(_encodings(config)) or 'nope'} {layers}{config.get('width', '?')} "
        f"{_count(parameters(manifest))}"
    )


def parameters(manifest: Manifest) -> int:
    """Return the number of trained parameters, without those of encodings: the weights that a
    step reads, and for decoders the other rows of the token table.
    """
    config, weights = manifest.config, manifest.step_weights
    if manifest.kind != "decoder" or not manifest.vocabulary:
        return weights
    tied = bool((config.get("head") or {}).get("tied"))
    return (
        weights - int(config["width"]) + (0 if tied else manifest.vocabulary * int(config["width"]))
    )


def folder_labels(paths: Sequence[Path]) -> List[str]:
    """Return the shortest path endings that are distinct, such as "rope/ort" and "alibi/ort";
    repeated folders are numbered.
    """
    depth = next(
        (
            n
            for n in range(1, max(len(path.parts) for path in paths))
            if len({path.parts[-n:] for path in paths}) == len(set(paths))
        ),
        1,
    )
    return numbered(["/".join(path.parts[-depth:]) for path in paths])


def numbered(names: Sequence[str]) -> List[str]:
    """Return the names with "#2", "#3" ... appended to repetitions."""
    seen: Dict[str, int] = {}
    result = []
    for name in names:
        seen[name] = seen.get(name, 0) + 1
        result.append(name if seen[name] == 1 else f"{name} #{seen[name]}")
    return result


def _encodings(config: Dict[str, Any]) -> List[str]:
    """Return the names of encodings without repetition, in order of application."""
    layers = [config["layers"][name] for name in config.get("order", [])] or [config]
    on_tokens = [*config.get("encodings", []), *(config.get("tokens") or {}).get("encodings", [])]
    specs = on_tokens + [
        spec for layer in layers for spec in layer.get("attention", {}).get("encodings", [])
    ]
    names = list(dict.fromkeys(spec["name"] for spec in specs))
    return names if len(names) <= SHOWN else [*names[:SHOWN], "..."]


def _count(number: int) -> str:
    value = number / 1e6
    return (
        f"{value:.0f}M" if value >= 99.5 else f"{value:.1f}M" if value >= 9.95 else f"{value:.2f}M"
    )
