"""The registries as rows of tables: encodings with hook, state, parameters and source; families of checkpoints; presets with their sizes."""

import importlib
import inspect
import sys
from typing import Dict, List

from posenc_export import encodings as registry
from posenc_export.encodings.base import Geometry, PositionEncoding
from posenc_export.models.families import FILES
from posenc_export.models.families import __name__ as PLACE
from posenc_export.models.presets import PRESETS

HOOKS = {"embed": "embed", "embed_next": "embed", "rotate": "rotate", "bias": "bias", "observe": "observe", "rescore": "rescore"}
SMALL = Geometry(width=32, heads=2, head_size=16, max_positions=16)


def hooks_of(name: str) -> str:
    """Where the encoding acts: its overridden hooks."""
    cls = registry.REGISTRY[name]
    found = [place for hook, place in HOOKS.items() if getattr(cls, hook) is not getattr(PositionEncoding, hook)]
    return ", ".join(dict.fromkeys(found)) or "none"


def states_of(name: str) -> str:
    """States of the encoding beside keys and values, by name."""
    encoding = registry.build({"name": name}, SMALL)
    replaced = [f"{state.name}, replaced by every call" for state in encoding.embed_states()]
    appended = [f"{state.name} per key" if state.grows else state.name for state in encoding.layer_states()]
    return "; ".join(replaced + appended) or "none"


def source_of(name: str) -> str:
    """First line of the module: title and source."""
    cls = registry.REGISTRY[name]
    return (inspect.getdoc(sys.modules[cls.__module__]) or "").splitlines()[0]


def encodings() -> List[Dict[str, str]]:
    """One row per encoding: name, hook, state, parameters with defaults, source."""
    rows = []
    for name in registry.REGISTRY:
        defaults = [f"{key}={p.default}" for key, p in registry.parameters(name).items()]
        rows.append({"name": name, "hook": hooks_of(name), "state": states_of(name), "parameters": ", ".join(defaults) or "-", "source": source_of(name)})
    return rows


def families() -> List[Dict[str, str]]:
    """One row per model_type that from_pretrained reads: name, and what it is."""
    said = {name: str(importlib.import_module(f"{PLACE}.{file}").__doc__) for name, file in FILES.items()}
    return [{"name": name, "what": text.partition("\n")[0]} for name, text in said.items()]


def presets() -> List[Dict[str, str]]:
    """One row per trained model."""
    rows = []
    for name, config in PRESETS.items():
        names = dict.fromkeys(spec["name"] for kind in config.layers.values() for spec in (*config.tokens.encodings, *kind.attention.encodings))
        sizes = {"layers": str(len(config.order)), "width": str(config.width), "positions": str(config.max_positions)}
        rows.append({"name": name, "encoding": ", ".join(names), **sizes})
    return rows
