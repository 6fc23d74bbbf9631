"""Table rows of what is registered: encodings, presets."""

import inspect
import itertools
from typing import Sequence

from posenc_export import encodings as registry
from posenc_export.encodings.shared.base import Geometry, own_hooks
from posenc_export.models.presets import PRESETS

HOOKS = ("embed", "embed_next", "rotate", "bias", "observe", "rescore")
COLUMNS = ("name", "hook", "state", "parameters", "package", "source")
SMALL = Geometry(width=32, heads=2, head_size=16, max_positions=16)


def hooks_of(name: str) -> str:
    """Names of the hooks that an encoding overrides, or "none"."""
    hooks = own_hooks(registry.KNOWN[name], *HOOKS)
    return ", ".join(dict.fromkeys(hook.removesuffix("_next") for hook in hooks)) or "none"


def states_of(name: str) -> str:
    """Names of states besides keys and values, or "none"; "by parameters" without a default."""
    if inspect.Parameter.empty in [p.default for p in registry.parameters(name).values()]:
        return "by parameters"
    encoding = registry.build({"name": name}, SMALL)
    states = [f"{state.name}, replaced by every call" for state in encoding.embed_states()]
    states += [state.name + " per key" * state.grows for state in encoding.layer_states()]
    return "; ".join(states) or "none"


def place_of(name: str) -> str:
    """Sentences about kinds of attention, hooks and states."""
    kinds = " or ".join(registry.KNOWN[name].works_in)
    return f"Attention: {kinds}. Hook: {hooks_of(name)}. State: {states_of(name)}."


def source_of(name: str) -> str:
    """Title and source: the first paragraph of the module's docstring."""
    described = inspect.getdoc(inspect.getmodule(registry.KNOWN[name])) or ""
    return " ".join(described.partition("\n\n")[0].split()) or "-"


def encodings() -> list[dict[str, str]]:
    """One row per encoding: name, hook, state, parameters with defaults, package, source. If an
    encoding cannot be used, its source is the reason.
    """
    return [dict(zip(COLUMNS, (name, *_cells(name)), strict=True)) for name in registry.KNOWN]


def _cells(name: str) -> Sequence[str]:
    try:
        registry.KNOWN.check_one(name)
        parameters = ", ".join(map(_parameter, registry.parameters(name).values())) or "-"
        package = str(registry.origin(name) or "-")
        return hooks_of(name), states_of(name), parameters, package, source_of(name)
    except ValueError as error:
        return "-", "-", "-", "-", f"refused: {error}"


def _parameter(parameter: inspect.Parameter) -> str:
    required = parameter.default is inspect.Parameter.empty
    return parameter.name if required else f"{parameter.name}={parameter.default}"


def presets() -> list[dict[str, str]]:
    """One row per trained model."""
    rows = []
    for name, config in PRESETS.items():
        of_layers = [kind.attention.encodings for kind in config.layers.values()]
        specs = itertools.chain(config.tokens.encodings, *of_layers)
        names = dict.fromkeys(spec["name"] for spec in specs)
        row = {"name": name, "encoding": ", ".join(names), "layers": str(len(config.order))}
        rows.append({**row, "width": str(config.width), "positions": str(config.max_positions)})
    return rows
