"""Write the artefacts in packages/presets again from their own weights, after a change of the
graphs or of the manifest: python -m bench.presets [NAME ...]

`bench.train` calls `write` with new weights. Equal weights give equal files of model.onnx.data.
"""

import argparse
from pathlib import Path

from safetensors.torch import load_file, save_file

from posenc_export.export import export
from posenc_export.models.presets import FOLDED, PRESETS, graph_weights, load_preset, named
from posenc_export.models.stack import Stack
from posenc_export.shared.preset_folders import SOURCE_TREE

TARGET = "ort"  # the fastest one, and one that every command takes


def write(name: str, model: Stack, place: Path) -> None:
    """Export a trained decoder to place/NAME, and store the parameters that its graph does not hold
    in place/FOLDED. VerificationError: the artefact does not agree with the model.
    """
    model.source = {"preset": name}
    export(model, TARGET, place / name)
    stored, others = graph_weights(place / name / "model.onnx"), {}
    if (place / FOLDED).exists():
        stored_before = load_file(place / FOLDED).items()
        others = {key: value for key, value in stored_before if not key.startswith(f"{name}/")}
    folded = {
        f"{name}/{names[0]}": parameter.detach().clone()
        for names, parameter in named(model)
        if not stored.keys() & set(names)
    }
    save_file({**others, **folded}, place / FOLDED)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*", metavar="NAME", help="presets (default: all)")
    for name in parser.parse_args().names or PRESETS:
        write(name, load_preset(name), SOURCE_TREE)
        print(name, flush=True)
