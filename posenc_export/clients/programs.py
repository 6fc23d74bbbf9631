"""Write a program for an artefact: a template filled by jinja2 with values of its manifest."""

import re
from dataclasses import dataclass
from typing import Any

from posenc_export.runtime.artefact.graph_inputs import INPUTS, new_row
from posenc_export.runtime.artefact.manifest import Axis, Manifest, State
from posenc_export.runtime.artefact.rules import WEIGHTS, graph_file
from posenc_export.runtime.artefact.summary import summary
from posenc_export.runtime.graphs.ort_options import EIGHT_BITS, FOUR_BITS
from posenc_export.shared.refusal import refusal
from posenc_export.shared.suggestion import check_name

NAME = re.compile(r"[A-Za-z_][\w.]*", re.ASCII)  # without quotes, as it stands in a string
LAYERED = re.compile(r"past_key_values\.(\d+)\.(\w+)\Z")
Layout = tuple[str, tuple[Axis, ...], int]  # dtype, axes and initial value of a state
CAPACITY = 1024  # slots of in-place caches, unless the range of positions is shorter
# By language: the file of templates/, without its suffix .jinja.
LANGUAGES = {
    **dict.fromkeys(("python", "openvino", "tract", "reference"), "python.py"),
    "node": "node.mjs",
    "web": "node.mjs",
    "c": "c.c",
    "libtorch": "libtorch.cpp",
}


@dataclass(frozen=True)
class Group:
    """States with the same dtype, shape and initial value."""

    layers: tuple[int, ...]  # indices of the layers; empty for a state that belongs to no layer
    parts: tuple[str, ...]  # last parts of the names, such as key; without a layer, both names
    example: State


def groups(manifest: Manifest) -> list[Group]:
    """Return the states of a manifest in as few groups as possible."""
    alone: list[Group] = []
    parts: dict[tuple[str, Layout], list[tuple[int, State]]] = {}
    for state in manifest.states:
        match = LAYERED.match(state.past)
        if match is None:
            alone.append(Group((), (state.past, state.present), state))
        else:
            layout = (state.dtype, state.axes, state.fill)
            parts.setdefault((match[2], layout), []).append((int(match[1]), state))
    together: dict[tuple[tuple[int, ...], Layout], list[tuple[str, State]]] = {}
    for (part, layout), states in parts.items():
        layers = tuple(layer for layer, _ in states)
        together.setdefault((layers, layout), []).append((part, states[0][1]))
    return alone + [
        Group(layers, tuple(part for part, _ in named), named[0][1])
        for (layers, _), named in together.items()
    ]


def program(manifest: Manifest, language: str) -> str:
    """Return the text of a program for an artefact in a language of LANGUAGES: a decode loop on one
    row for decoders and blocks with a cache, a single call for other models. Raise ValueError if it
    does not run the graph or cannot fill its inputs, ModuleNotFoundError without jinja2.
    """
    check_name("inspect: expected runtime", language, LANGUAGES)
    _check(manifest, language)
    text: str = template(LANGUAGES[language]).render(_values(manifest, language))
    return text


def template(name: str) -> Any:
    """Return a jinja2.Template of templates/, whose values are written @{value}."""
    import jinja2

    environment = jinja2.Environment(
        loader=jinja2.PackageLoader("posenc_export.clients"),
        variable_start_string="@{",
        variable_end_string="}",
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
        undefined=jinja2.StrictUndefined,
    )
    return environment.get_template(f"{name}.jinja")


def _check(manifest: Manifest, language: str) -> None:
    def need(holds: object, rule: str, got: object) -> None:
        if not holds:
            remedy = "run it with posenc_export.load"
            raise refusal("inspect", f"{rule} for --runtime", got, remedy)

    file = "model.pt" if language == "libtorch" else "model.onnx"
    if graph_file(manifest) != file:
        remedy = "export target onnx or ort, or print it for libtorch"
        remedy = "export target torchscript" if language == "libtorch" else remedy
        rule = f"an artefact with {file} for --runtime"
        raise refusal("inspect", rule, f"target {manifest.target}", remedy)
    need(not manifest.encoder, "a model that reads no encoder", "a decoder that reads one")
    last, rule = manifest.coordinate_range - 1, "a model whose coordinates are positions"
    need(last < 0, rule, f"coordinates 0 .. {last}")
    rule = "an artefact in float32 or float16"
    need(manifest.passed_dtype == manifest.dtype, rule, manifest.dtype)
    states = [name for state in manifest.states for name in (state.past, state.present)]
    for name in [*states, *(value.name for value in manifest.outputs)]:
        need(NAME.fullmatch(name), "names of letters, digits, _ and .", repr(name))
    for value in manifest.inputs:  # the tables of the templates
        need(value.name in INPUTS, f"inputs among {', '.join(INPUTS)}", value.name)


def _values(manifest: Manifest, language: str) -> dict[str, Any]:
    names = [value.name for value in manifest.inputs]
    lines = {**summary(manifest), "interface": str(manifest.interface)}
    return {
        "language": language,
        "heading": [f"{title}: {text}" for title, text in lines.items()],
        "decodes": manifest.decodes,
        "prompt": [token % (manifest.vocabulary or 1) for token in (100, 101, 102)],
        "dtype": manifest.dtype,
        "axes": manifest.axes,
        "width": manifest.inputs[0].axes[-1],
        "vocabulary": manifest.vocabulary,
        "max_positions": manifest.max_positions,
        "stop_ids": list(manifest.stop_ids),
        "external": WEIGHTS in manifest.files,
        "inputs": names,
        "takes_start": "position_ids" in names or "first_position" in names,
        "no_start": _no_start(names),
        "counts_slots": "position_ids" in names or "cache_position" in names,
        "options": _options(manifest),
        "output": manifest.outputs[-1].name,  # of a model with a readout, that
        "second": len(manifest.outputs) == 2,
        "pooled": len(manifest.outputs[-1].axes) == 2,
        "returned": _returned(manifest),
        "in_place": manifest.in_place,
        "capacity": min(CAPACITY, manifest.max_positions) if manifest.in_place else 0,
        **_states(manifest, language),
    }


def _returned(manifest: Manifest) -> str:
    if manifest.input("logits_index"):
        return "the logits of the last token"
    output = manifest.outputs[-1]
    return f"{output.name} of the row" if len(output.axes) == 2 else "the outputs of all tokens"


def _options(manifest: Manifest) -> dict[str, str]:
    """Return the entries of the session's configuration in ONNX Runtime, with their reasons."""
    options = {'"session.set_denormal_as_zero", "1"': "subnormal numbers are slow"}
    if manifest.operators.get("MatMulIntegerToFloat"):
        reason = "products saturate without it on x86 processors without VNNI; with VNNI it is slow"
        options['"session.x64quantprecision", "1"'] = reason
    if manifest.weights is not None and manifest.weights.activations == "float32":
        four = manifest.weights.format.startswith("int4")
        key, value = FOUR_BITS if four else EIGHT_BITS
        options[f'"{key}", "{value}"'] = "products do not round activations to 8 bits"
    return options


def _no_start(names: list[str]) -> str:
    if "attention_mask" in names:
        return "The graph counts positions from attention_mask: a row starts at 0."
    if "seqlens_k" not in names:
        return "Its outputs depend on no position: it takes no start."
    reason = "The graph counts the tokens of a row, and its outputs depend on distances only"
    return f"{reason}: it takes no start."


def _states(manifest: Manifest, language: str) -> dict[str, Any]:
    """Return the states, each alone and in groups of those that differ only in layer and part."""
    states = manifest.states
    past = "CAPACITY" if language == "libtorch" else 0
    return {
        "states": new_row(states, "CAPACITY", past),
        "groups": [
            {
                "layers": group.layers,
                "ordered": group.layers == tuple(range(len(group.layers))),
                "parts": group.parts,
                "quoted": [f'"{part}"' for part in group.parts],
                **new_row([group.example], "CAPACITY")[0],
            }
            for group in groups(manifest)
        ],
        "replaces": any(state.replaced for state in states),
        "axes_of_slots": [state.axis if state.in_place else -1 for state in states],
        # A state that a module takes by itself, before the list of the others.
        "has_past_positions": manifest.stores_positions,
    }
