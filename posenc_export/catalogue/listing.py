"""Table rows of the registries: encodings with hook, state, parameters and source; families of
checkpoints; presets with their sizes.
"""

import importlib
import inspect
from typing import Dict, List

from posenc_export import encodings as registry
from posenc_export.encodings.shared.base import Geometry, PositionEncoding
from posenc_export.models.families import FILES
from posenc_export.models.families import __name__ as PLACE
from posenc_export.models.presets import PRESETS

HOOKS = {
    "embed": "embed",
    "embed_next": "embed",
    "rotate": "rotate",
    "bias": "bias",
    "observe": "observe",
    "rescore": "rescore",
}
SMALL = Geometry(width=32, heads=2, head_size=16, max_positions=16)


def hooks_of(name: str) -> str:
    """Names of the hooks that an encoding overrides, or "none"."""
    cls = registry.KNOWN[name]
    places = [
        place
        for hook, place in HOOKS.items()
        if getattr(cls, hook) is not getattr(PositionEncoding, hook)
    ]
    return ", ".join(dict.fromkeys(places)) or "none"


def needs_parameters(name: str) -> bool:
    """Whether an encoding has a parameter without a default."""
    return any(
        parameter.default is inspect.Parameter.empty
        for parameter in registry.parameters(name).values()
    )


def states_of(name: str) -> str:
    """Names of the states besides keys and values that calls carry, or "none"; "by parameters"
    if a parameter has no default.
    """
    if needs_parameters(name):
        return "by parameters"
    encoding = registry.build({"name": name}, SMALL)
    replaced = [f"{state.name}, replaced by every call" for state in encoding.embed_states()]
    appended = [
        f"{state.name} per key" if state.grows else state.name for state in encoding.layer_states()
    ]
    return "; ".join(replaced + appended) or "none"


def source_of(name: str) -> str:
    """First line of the module's docstring: title and source."""
    module = inspect.getmodule(registry.KNOWN[name])
    return next(iter((inspect.getdoc(module) or "").splitlines()), "-")


def encodings() -> List[Dict[str, str]]:
    """One row per encoding: name, hook, state, parameters with defaults, package, source. If an
    encoding cannot be used, its source is the reason.
    """
    return [_row(name) for name in registry.KNOWN]


def _row(name: str) -> Dict[str, str]:
    row = {"name": name, "hook": "-", "state": "-", "parameters": "-", "package": "-"}
    try:
        registry.KNOWN.check_one(name)
        parameters = ", ".join(map(_parameter, registry.parameters(name).values()))
        cells = {"hook": hooks_of(name), "state": states_of(name), "parameters": parameters or "-"}
    except ValueError as error:
        return {**row, "source": f"refused: {error}"}
    return {**row, **cells, "package": str(registry.origin(name) or "-"), "source": source_of(name)}


def _parameter(parameter: inspect.Parameter) -> str:
    return (
        parameter.name
        if parameter.default is inspect.Parameter.empty
        else f"{parameter.name}={parameter.default}"
    )


def families() -> List[Dict[str, str]]:
    """One row per model_type that from_pretrained accepts: name and description."""
    descriptions = {
        name: str(importlib.import_module(f"{PLACE}.{file}").__doc__)
        for name, file in FILES.items()
    }
    return [{"name": name, "what": text.partition("\n")[0]} for name, text in descriptions.items()]


def presets() -> List[Dict[str, str]]:
    """One row per trained model."""
    rows = []
    for name, config in PRESETS.items():
        names = dict.fromkeys(
            spec["name"]
            for kind in config.layers.values()
            for spec in (*config.tokens.encodings, *kind.attention.encodings)
        )
        sizes = {
            "layers": str(len(config.order)),
            "width": str(config.width),
            "positions": str(config.max_positions),
        }
        rows.append({"name": name, "encoding": ", ".join(names), **sizes})
    return rows
