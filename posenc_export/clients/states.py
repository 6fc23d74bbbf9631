"""What the programs of all languages have in common: states by groups of layers, and what can be written at all."""

import re
from dataclasses import dataclass
from typing import Dict, Iterable, List, Tuple

from posenc_export.runtime.manifest import Axis, Manifest, State
from posenc_export.runtime.rules import B, M, P, graph_file
from posenc_export.runtime.summary import summary

CAPACITY = 1024  # slots of in-place caches, where the range of positions has as many
LAYERED = re.compile(r"past_key_values\.(\d+)\.(\w+)\Z")
Likeness = Tuple[str, Tuple[Axis, ...], int]  # dtype, axes and first value of a state


@dataclass(frozen=True)
class Group:
    """States of one dtype, shape and first value.

    Args:
        layers: numbers of the layers; empty for a state that no layer has.
        parts: what stands behind the number, as key and value; of a state without a layer, past and present name.
        example: one of the states.
    """

    layers: Tuple[int, ...]
    parts: Tuple[str, ...]
    example: State

    @property
    def shape(self) -> List[str]:
        """Sizes for one row that has read nothing; CAPACITY stands for that of an in-place cache."""
        sizes = {B: "1", P: "0", M: "CAPACITY"}
        return [sizes.get(axis, axis) if isinstance(axis, str) else str(axis) for axis in self.example.axes]


def groups(manifest: Manifest) -> List[Group]:
    """The states of a manifest in as few groups as say the same."""
    alone: List[Group] = []
    parts: Dict[Tuple[str, Likeness], List[Tuple[int, State]]] = {}
    for state in manifest.states:
        found = LAYERED.match(state.past)
        if found is None:
            alone.append(Group((), (state.past, state.present), state))
        else:
            parts.setdefault((found[2], (state.dtype, state.axes, state.fill)), []).append((int(found[1]), state))
    together: Dict[Tuple[Tuple[int, ...], Likeness], List[Tuple[str, State]]] = {}
    for (part, likeness), states in parts.items():
        layers = tuple(layer for layer, _ in states)
        together.setdefault((layers, likeness), []).append((part, states[0][1]))
    return alone + [Group(layers, tuple(part for part, _ in named), named[0][1]) for (layers, _), named in together.items()]


def capacity(manifest: Manifest) -> int:
    """Slots of in-place caches; 0 where there are none."""
    return min(CAPACITY, manifest.max_positions) if any(state.update == "in_place" for state in manifest.states) else 0


def gives(manifest: Manifest) -> str:
    """What a call gives."""
    return "the logits of the last" if manifest.input("logits_index") else "the output of each"


def heading(manifest: Manifest) -> List[str]:
    """What the artefact is, in lines."""
    return [f"{title}: {text}" for title, text in summary(manifest).items()]


def check(manifest: Manifest, known: Iterable[str]) -> None:
    """Refuse what no program is written for.

    Args:
        known: names of the inputs that a program can fill.

    Raises:
        ValueError: a file that ONNX Runtime does not read, an input that is not among `known`.
    """
    if graph_file(manifest) != "model.onnx":
        raise ValueError(f"inspect: expected an artefact with model.onnx for --runtime, got target {manifest.target}; export target onnx or ort")
    if manifest.encoder:
        raise ValueError("inspect: expected a model that reads no encoder for --runtime, got a decoder that reads one; drive it through posenc_export.load")
    unknown = [value.name for value in manifest.inputs if value.name not in known]
    if unknown:
        raise ValueError(f"inspect: expected inputs among {', '.join(known)} for --runtime, got {unknown[0]}; drive it through posenc_export.load")
