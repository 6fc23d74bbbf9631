"""Groups of states that differ only in layer and part."""

import re
from dataclasses import dataclass
from typing import Dict, List, Tuple

from posenc_export.runtime.artefact.manifest import Axis, Manifest, State

LAYERED = re.compile(r"past_key_values\.(\d+)\.(\w+)\Z")
Layout = Tuple[str, Tuple[Axis, ...], int]  # dtype, axes and initial value of a state


@dataclass(frozen=True)
class Group:
    """States with the same dtype, shape and initial value."""

    layers: Tuple[int, ...]  # indices of the layers; empty for a state that belongs to no layer
    parts: Tuple[str, ...]  # last parts of the names, such as key; without a layer, both names
    example: State


def groups(manifest: Manifest) -> List[Group]:
    """Return the states of a manifest in as few groups as possible."""
    alone: List[Group] = []
    parts: Dict[Tuple[str, Layout], List[Tuple[int, State]]] = {}
    for state in manifest.states:
        match = LAYERED.match(state.past)
        if match is None:
            alone.append(Group((), (state.past, state.present), state))
        else:
            layout = (state.dtype, state.axes, state.fill)
            parts.setdefault((match[2], layout), []).append((int(match[1]), state))
    together: Dict[Tuple[Tuple[int, ...], Layout], List[Tuple[str, State]]] = {}
    for (part, layout), states in parts.items():
        layers = tuple(layer for layer, _ in states)
        together.setdefault((layers, layout), []).append((part, states[0][1]))
    return alone + [
        Group(layers, tuple(part for part, _ in named), named[0][1])
        for (layers, _), named in together.items()
    ]
