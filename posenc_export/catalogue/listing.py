"""What is registered, as rows of a table: encodings with hook, parameters and source; presets with their sizes."""

import inspect
import sys
from typing import Dict, List

from posenc_export import encodings as registry
from posenc_export.encodings.base import PositionEncoding
from posenc_export.models.presets import PRESETS

HOOKS = ("embed", "rotate", "bias")


def encodings() -> List[Dict[str, str]]:
    """One row per encoding: name, hook, parameters with defaults, source."""
    rows = []
    for name, cls in registry.REGISTRY.items():
        hooks = [hook for hook in HOOKS if getattr(cls, hook) is not getattr(PositionEncoding, hook)]
        defaults = [f"{key}={p.default}" for key, p in registry.parameters(name).items()]
        source = (inspect.getdoc(sys.modules[cls.__module__]) or "").splitlines()[0]
        rows.append({"name": name, "hook": ", ".join(hooks) or "none", "parameters": ", ".join(defaults) or "-", "source": source})
    return rows


def presets() -> List[Dict[str, str]]:
    """One row per trained model."""
    return [
        {"name": name, "encoding": str(c.attention.encoding["name"]), "layers": str(c.layers), "width": str(c.attention.width), "positions": str(c.attention.max_positions)}
        for name, c in PRESETS.items()
    ]
