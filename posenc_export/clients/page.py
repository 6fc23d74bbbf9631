"""Generate the committed files of docs/runtimes: tables of inputs and states, and programs.

python -m posenc_export.clients.page [--docs docs/runtimes]
"""

import argparse
import sys
import tempfile
from pathlib import Path
from typing import Sequence

from posenc_export.clients.programs import program, template
from posenc_export.runtime.artefact import graph_inputs

PRESET = "tiny-rope"
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
    of_module = (
        f"Of a module of your own: {graph_inputs.OF_MODULE[0].lower()}{graph_inputs.OF_MODULE[1:]}"
    )
    return template("inputs.md").render(
        inputs={**graph_inputs.INPUTS, **graph_inputs.OF_ENCODER},
        outputs={**graph_inputs.OUTPUTS, "output": f"{graph_inputs.OUTPUTS['output']} {of_module}"},
        updates=graph_inputs.UPDATES,
        positions=graph_inputs.POSITIONS,
    )


def programs() -> Sequence[str]:
    """Return the texts of PROGRAMS for the preset."""
    from posenc_export.export import Sources, export
    from posenc_export.models.presets import load_preset

    sources = Sources(load_preset(PRESET))
    with tempfile.TemporaryDirectory() as folder:
        targets = dict.fromkeys(target for _, target in PROGRAMS.values())
        places = {target: Path(folder) / target for target in targets}
        manifests = {name: export(sources, name, at, verify=False) for name, at in places.items()}
    return [program(manifests[target], language) for language, target in PROGRAMS.values()]


def main(arguments: Sequence[str]) -> int:
    """Write the page and the programs. Returns the exit status 0."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--docs", type=Path, default=Path("docs/runtimes"))
    folder = parser.parse_args(arguments).docs
    for name, text in zip(("inputs.md", *PROGRAMS), (inputs_page(), *programs()), strict=True):
        (folder / name).write_text(text, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
