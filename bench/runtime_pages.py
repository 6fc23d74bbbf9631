"""Write the committed files of docs/runtimes: tables of inputs and states, and programs.

python -m bench.runtime_pages
"""

import tempfile
from pathlib import Path

import jinja2

from bench import marked
from posenc_export.clients import program
from posenc_export.export import Sources, export
from posenc_export.models.presets import load_preset
from posenc_export.runtime.artefact import graph_inputs

# By file name: the language of a program, and the target of the artefact that it runs.
PROGRAMS = {
    "decode.py": ("python", "ort"),
    "decode.mjs": ("node", "ort"),
    "decode.c": ("c", "ort"),
    "decode.cpp": ("libtorch", "torchscript"),
    "decode_openvino.py": ("openvino", "ort"),
    "decode_tract.py": ("tract", "onnx"),
}


def inputs_page() -> str:
    """Return the text of docs/runtimes/inputs.md."""
    outputs, said = dict(graph_inputs.OUTPUTS), graph_inputs.OF_MODULE
    outputs["output"] += f" Of a module of your own: {said[0].lower()}{said[1:]}"
    page = jinja2.Template(marked.text("inputs"), trim_blocks=True, keep_trailing_newline=True)
    inputs = {**graph_inputs.INPUTS, **graph_inputs.OF_ENCODER}
    of_states = {"updates": graph_inputs.UPDATES, "positions": graph_inputs.POSITIONS}
    return str(page.render(inputs=inputs, outputs=outputs, **of_states))


def programs() -> list[str]:
    """Return the texts of PROGRAMS for a preset."""
    sources = Sources(load_preset("tiny-rope"))
    with tempfile.TemporaryDirectory() as folder:
        targets = dict.fromkeys(target for _, target in PROGRAMS.values())
        places = {target: Path(folder) / target for target in targets}
        manifests = {name: export(sources, name, at, verify=False) for name, at in places.items()}
    return [program(manifests[target], language) for language, target in PROGRAMS.values()]


if __name__ == "__main__":
    for name, text in zip(("inputs.md", *PROGRAMS), (inputs_page(), *programs()), strict=True):
        (Path("docs/runtimes") / name).write_text(text, encoding="utf-8")
