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

HOOKS = ("embed", "embed_next", "rotate", "bias", "observe", "rescore")
SMALL = Geometry(width=32, heads=2, head_size=16, max_positions=16)


def hooks_of(name: str) -> str:
    """Names of the hooks that an encoding overrides, or "none"."""
    cls = registry.KNOWN[name]
    hooks = [hook for hook in HOOKS if getattr(cls, hook) is not getattr(PositionEncoding, hook)]
    return ", ".join(dict.fromkeys(hook.removesuffix("_next") for hook in hooks)) or "none"


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
    states = [f"{state.name}, replaced by every call" for state in encoding.embed_states()]
    states += [state.name + " per key" * state.grows for state in encoding.layer_states()]
    return "; ".join(states) or "none"


def source_of(name: str) -> str:
    """Title and source: the first paragraph of the module's docstring."""
    return _first_paragraph(inspect.getmodule(registry.KNOWN[name])) or "-"


def _first_paragraph(module: object) -> str:
    return " ".join((inspect.getdoc(module) or "").partition("\n\n")[0].split())


def encodings() -> List[Dict[str, str]]:
    """One row per encoding: name, hook, state, parameters with defaults, package, source. If an
    encoding cannot be used, its source is the reason.
    """
    return [_row(name) for name in registry.KNOWN]


def _row(name: str) -> Dict[str, str]:
    try:
        registry.KNOWN.check_one(name)
        parameters = ", ".join(map(_parameter, registry.parameters(name).values()))
        return {
            "name": name,
            "hook": hooks_of(name),
            "state": states_of(name),
            "parameters": parameters or "-",
            "package": str(registry.origin(name) or "-"),
            "source": source_of(name),
        }
    except ValueError as error:
        cells = dict.fromkeys(("hook", "state", "parameters", "package"), "-")
        return {"name": name, **cells, "source": f"refused: {error}"}


def _parameter(parameter: inspect.Parameter) -> str:
    return (
        parameter.name
        if parameter.default is inspect.Parameter.empty
        else f"{parameter.name}={parameter.default}"
    )


def families() -> List[Dict[str, str]]:
    """One row per model_type that from_pretrained accepts: name and description."""
    return [
        {"name": name, "what": _first_paragraph(importlib.import_module(f"{PLACE}.{file}"))}
        for name, file in FILES.items()
    ]


def presets() -> List[Dict[str, str]]:
    """One row per trained model."""
    rows = []
    for name, config in PRESETS.items():
        names = dict.fromkeys(
            spec["name"]
            for kind in config.layers.values()
            for spec in (*config.tokens.encodings, *kind.attention.encodings)
        )
        row = {"name": name, "encoding": ", ".join(names), "layers": str(len(config.order))}
        rows.append({**row, "width": str(config.width), "positions": str(config.max_positions)})
    return rows
