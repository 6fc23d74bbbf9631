"""Parts shared by the programs of all languages: groups of states, and the checks of an artefact."""

import re
from dataclasses import dataclass
from typing import Dict, Iterable, List, Tuple

from posenc_export.runtime.artefact.manifest import Axis, Manifest, State
from posenc_export.runtime.artefact.rules import B, M, P, graph_file
from posenc_export.runtime.artefact.summary import summary

CAPACITY = 1024  # slots of in-place caches, unless the range of positions is shorter
LAYERED = re.compile(r"past_key_values\.(\d+)\.(\w+)\Z")
Layout = Tuple[str, Tuple[Axis, ...], int]  # dtype, axes and initial value of a state


@dataclass(frozen=True)
class Group:
    """States with the same dtype, shape and initial value.

    Args:
        layers: indices of the layers; empty for a state that belongs to no layer.
        parts: last parts of the names, such as key and value; for a state without a layer, its names `past` and `present`.
        example: one of the states.
    """

    layers: Tuple[int, ...]
    parts: Tuple[str, ...]
    example: State

    @property
    def shape(self) -> List[str]:
        """Sizes for one row without tokens, as text; "CAPACITY" for the capacity of an in-place cache."""
        sizes = {B: "1", P: "0", M: "CAPACITY"}
        return [sizes.get(axis, axis) if isinstance(axis, str) else str(axis) for axis in self.example.axes]


def groups(manifest: Manifest) -> List[Group]:
    """Return the states of a manifest in as few groups as possible."""
    alone: List[Group] = []
    parts: Dict[Tuple[str, Layout], List[Tuple[int, State]]] = {}
    for state in manifest.states:
        found = LAYERED.match(state.past)
        if found is None:
            alone.append(Group((), (state.past, state.present), state))
        else:
            parts.setdefault((found[2], (state.dtype, state.axes, state.fill)), []).append((int(found[1]), state))
    together: Dict[Tuple[Tuple[int, ...], Layout], List[Tuple[str, State]]] = {}
    for (part, layout), states in parts.items():
        layers = tuple(layer for layer, _ in states)
        together.setdefault((layers, layout), []).append((part, states[0][1]))
    return alone + [Group(layers, tuple(part for part, _ in named), named[0][1]) for (layers, _), named in together.items()]


def capacity(manifest: Manifest) -> int:
    """Return the number of slots of in-place caches; 0 for a model without such caches."""
    return min(CAPACITY, manifest.max_positions) if any(state.update == "in_place" for state in manifest.states) else 0


def gives(manifest: Manifest) -> str:
    """Return a phrase for the output of a call."""
    return "the logits of the last token" if manifest.input("logits_index") else "the outputs of all tokens"


def heading(manifest: Manifest) -> List[str]:
    """Return a description of the artefact, as lines."""
    return [f"{title}: {text}" for title, text in summary(manifest).items()]


def check(manifest: Manifest, known: Iterable[str], file: str) -> None:
    """Check that a program can be written for an artefact.

    Args:
        known: names of the inputs that the program can fill.
        file: name of the graph file that the program opens.

    Raises:
        ValueError: the artefact has another graph file or bfloat16, reads an encoder, or has an input that is not in `known`.
    """
    if graph_file(manifest) != file:
        remedy = "export target torchscript" if file == "model.pt" else "export target onnx or ort, or print it for libtorch"
        raise ValueError(f"inspect: expected an artefact with {file} for --runtime, got target {manifest.target}; {remedy}")
    if manifest.encoder:
        raise ValueError("inspect: expected a model that reads no encoder for --runtime, got a decoder that reads one; run it with posenc_export.load")
    if manifest.passed_dtype != manifest.dtype:
        raise ValueError(f"inspect: expected an artefact in float32 or float16 for --runtime, got {manifest.dtype}; run it with posenc_export.load")
    unknown = [value.name for value in manifest.inputs if value.name not in known]
    if unknown:
        raise ValueError(f"inspect: expected inputs among {', '.join(known)} for --runtime, got {unknown[0]}; run it with posenc_export.load")
