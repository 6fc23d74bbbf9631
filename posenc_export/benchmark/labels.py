"""Short names of models, from their descriptions, and of artefact folders, from their paths."""

import itertools
from pathlib import Path
from typing import Any, Dict, List, Sequence

from posenc_export.runtime.artefact.manifest import Manifest

SHOWN = 3  # names of encodings in a label; further ones are shown as "..."


def model_label(manifest: Manifest) -> str:
    """Return encodings, layers x width and number of parameters, as in "rope 5x128 0.97M"."""
    config = manifest.config.get("inside", manifest.config)
    order = config.get("order")
    layers = f"{len(order)}x" if order else f"{config.get('kind', 'model')} "
    count, names = parameters(manifest) / 1e6, "+".join(_encodings(config)) or "nope"
    digits = 0 if count >= 99.5 else 1 if count >= 9.95 else 2
    return f"{names} {layers}{config.get('width', '?')} {count:.{digits}f}M"


def parameters(manifest: Manifest) -> int:
    """Return the number of trained parameters, without those of encodings: the weights that a
    step reads, and for decoders the other rows of the token table.
    """
    config, weights = manifest.config, manifest.step_weights
    if manifest.kind != "decoder" or not manifest.vocabulary:
        return weights
    tied, width = bool((config.get("head") or {}).get("tied")), int(config["width"])
    return weights - width + (0 if tied else manifest.vocabulary * width)


def folder_labels(paths: Sequence[Path]) -> List[str]:
    """Return the shortest distinct endings of paths, such as "rope/ort", numbered if repeated."""
    depth, distinct = 1, len(set(paths))
    while len({path.parts[-depth:] for path in paths}) < distinct:
        depth += 1
    return numbered(["/".join(path.parts[-depth:]) for path in paths])


def numbered(names: Sequence[str]) -> List[str]:
    """Return the names with "#2", "#3" ... appended to repetitions."""
    counts = [names[: at + 1].count(name) for at, name in enumerate(names)]
    labels = zip(names, counts, strict=True)
    return [name if count == 1 else f"{name} #{count}" for name, count in labels]


def _encodings(config: Dict[str, Any]) -> List[str]:
    """Return the names of encodings without repetition, in order of application."""
    layers = [config["layers"][name] for name in config.get("order", [])] or [config]
    on_tokens = [*config.get("encodings", []), *(config.get("tokens") or {}).get("encodings", [])]
    of_layers = [layer.get("attention", {}).get("encodings", []) for layer in layers]
    specs = itertools.chain(on_tokens, *of_layers)
    names = list(dict.fromkeys(spec["name"] for spec in specs))
    return names if len(names) <= SHOWN else [*names[:SHOWN], "..."]
