"""Write a program for an artefact: the sections of a file of templates/, filled with the values of
the manifest.

The section `inputs` of a template has the value of each graph input for a call with `new` or
`count` tokens on one row that holds `held` tokens, the first of them at position `start`.
"""

from typing import Any, Dict, List, Sequence

from posenc_export.clients.states import groups
from posenc_export.clients.templates import Template
from posenc_export.runtime.artefact.graph_inputs import B, M, P
from posenc_export.runtime.artefact.manifest import Manifest, State
from posenc_export.runtime.artefact.rules import WEIGHTS, graph_file
from posenc_export.runtime.artefact.summary import summary
from posenc_export.shared.suggestion import check_name

CAPACITY = 1024  # slots of in-place caches, unless the range of positions is shorter
# By language: the file of templates/.
LANGUAGES = {
    **dict.fromkeys(("python", "openvino", "tract", "reference"), "python"),
    "node": "node",
    "web": "node",
    "c": "c",
    "cpp": "cpp",
    "libtorch": "libtorch",
}
ONE_BY_ONE = ("c", "cpp", "libtorch")  # their programs list each state


def program(manifest: Manifest, language: str) -> str:
    """Return the text of a program for an artefact: a decode loop on one row for decoders and
    blocks with a cache, a single call for other models.

    Args:
        language: a key of LANGUAGES.

    Raises:
        ValueError: the language is unknown, it does not run the artefact's graph, or the program
            cannot fill one of its inputs.
    """
    check_name("inspect: expected runtime", language, LANGUAGES)
    template = Template(
        LANGUAGES[language], _conditions(manifest, language), _values(manifest, language)
    )
    known = template.table("inputs")
    _check(manifest, list(known), language)
    feeds = [
        template.fill("feed", name=value.name, value=known[value.name], index=index)
        for index, value in enumerate(manifest.inputs)
    ]
    states = (
        _single_states(manifest, template, language)
        if language in ONE_BY_ONE
        else _grouped_states(manifest, template, language)
    )
    return (
        template.fill(
            "program",
            feeds=(", " if language == "libtorch" else "\n").join(feeds),
            states="\n".join(states),
        )
        + "\n"
    )


def _check(manifest: Manifest, known: Sequence[str], language: str) -> None:
    """Check that a program can be written. known: names of the inputs that the program can fill.

    Raises:
        ValueError: the artefact has another graph file or bfloat16, reads an encoder, or has an
            input that is not in `known`.
    """
    file = "model.pt" if language == "libtorch" else "model.onnx"
    if graph_file(manifest) != file:
        remedy = (
            "export target torchscript"
            if file == "model.pt"
            else "export target onnx or ort, or print it for libtorch"
        )
        raise ValueError(
            f"inspect: expected an artefact with {file} for --runtime, got target "
            f"{manifest.target}; {remedy}"
        )
    if manifest.encoder:
        raise ValueError(
            "inspect: expected a model that reads no encoder for --runtime, got a decoder "
            "that reads one; run it with posenc_export.load"
        )
    if manifest.passed_dtype != manifest.dtype:
        raise ValueError(
            "inspect: expected an artefact in float32 or float16 for --runtime, got "
            f"{manifest.dtype}; run it with posenc_export.load"
        )
    unknown = [value.name for value in manifest.inputs if value.name not in known]
    if unknown:
        raise ValueError(
            f"inspect: expected inputs among {', '.join(known)} for --runtime, got "
            f"{unknown[0]}; run it with posenc_export.load"
        )


def _conditions(manifest: Manifest, language: str) -> List[str]:
    """Return the conditions of sections that hold: names of inputs and ways of updating states
    among them.
    """
    held = {
        "cached": bool(manifest.states),
        "axes": manifest.axes > 0,
        "stop_ids": bool(manifest.stop_ids),
        "external": WEIGHTS in manifest.files,
        "past_positions": manifest.stores_positions,
    }
    updates = {state.update for state in manifest.states}
    return [
        language,
        manifest.kind,
        manifest.dtype,
        *(name for name, holds in held.items() if holds),
        *updates,
        *(value.name for value in manifest.inputs),
    ]


def _values(manifest: Manifest, language: str) -> Dict[str, Any]:
    """Return the values of sections, those of all languages together."""
    first = int(
        "past_positions" in _conditions(manifest, language)
    )  # a state that the module takes by itself, before the list of the others
    comment = "" if LANGUAGES[language] == "python" else "// "
    return {
        "language": language,
        "heading": f"\n{comment}".join(
            f"{title}: {text}"
            for title, text in {**summary(manifest), "interface": str(manifest.interface)}.items()
        ),
        "returned": "the logits of the last token"
        if manifest.input("logits_index")
        else "the outputs of all tokens",
        "output": manifest.outputs[0].name,
        "dtype": manifest.dtype,
        "width": manifest.inputs[0].axes[-1],
        "vocabulary": manifest.vocabulary,
        "planes": 1 + manifest.axes,
        "capacity": min(CAPACITY, manifest.max_positions) if manifest.in_place else 0,
        "max_positions": manifest.max_positions,
        "stop_ids": list(manifest.stop_ids),
        "stop_list": "{" + ", ".join(map(str, manifest.stop_ids)) + "}",
        "stop_tests": "\n".join(f"    if (best == {stop}) break;" for stop in manifest.stop_ids),
        "feed_count": len(manifest.inputs),
        "state_count": len(manifest.states),
        "input_names": _quoted(
            [*(value.name for value in manifest.inputs), *(state.past for state in manifest.states)]
        ),
        "output_names": _quoted(
            [manifest.outputs[0].name, *(state.present for state in manifest.states)]
        ),
        "state_axes": ", ".join(
            str(state.axis) if state.in_place else "-1" for state in manifest.states
        ),
        "first": first,
        "result": 1 + first,
    }


def _quoted(names: Sequence[str]) -> str:
    return "\n".join(f'    "{name}",' for name in names)


def _single_states(manifest: Manifest, template: Template, language: str) -> List[str]:
    """Return an entry for each state."""
    dtypes, past = template.table("dtypes"), "CAPACITY" if language == "libtorch" else "0"
    values = [
        {
            "past": state.past,
            "dtype": dtypes[state.dtype],
            "shape": ", ".join(_shape(state, past)),
            "fill": state.fill,
        }
        for state in manifest.states
    ]
    filled = ["filled" if state.fill else "" for state in manifest.states]
    return [
        template.fill("state", condition, index=index, **each)
        for index, (condition, each) in enumerate(zip(filled, values, strict=True))
    ]


def _grouped_states(manifest: Manifest, template: Template, language: str) -> List[str]:
    """Return an entry for each state without a layer, and for each group of states an expression
    that gives one entry for each layer and part.
    """
    end = "," if LANGUAGES[language] == "python" else ""  # of a tuple with one entry

    def listed(items: Sequence[str]) -> str:
        return ", ".join(items) + (end if len(items) == 1 else "")

    entries = []
    for group in groups(manifest):
        values: Dict[str, Any] = {
            "dtype": group.example.dtype,
            "shape": listed(_shape(group.example)),
            "fill": group.example.fill,
        }
        if group.layers:
            ordered = group.layers == tuple(range(len(group.layers)))
            layers = template.fill(
                "layers",
                "ordered" if ordered else "",
                layer_count=len(group.layers),
                layer_indices=list(group.layers),
            )
            entries.append(
                template.fill(
                    "state",
                    "layered",
                    layers=layers,
                    parts=listed([f'"{part}"' for part in group.parts]),
                    **values,
                )
            )
        else:
            entries.append(
                template.fill("state", past=group.parts[0], present=group.parts[1], **values)
            )
    return entries


def _shape(state: State, past: str = "0") -> List[str]:
    """Return the sizes of a state for one row without tokens. past: the size P."""
    sizes = {B: "1", P: past, M: "CAPACITY"}
    return [sizes.get(axis, axis) if isinstance(axis, str) else str(axis) for axis in state.axes]
