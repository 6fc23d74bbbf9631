"""Write the artefacts in packages/presets again from their own weights, after a change of the
graphs or of the manifest, or with --train train them on the source code of the Python standard
library and print their bits per byte of the held-out files: python -m bench.presets [NAME ...]

Equal weights give equal files of model.onnx.data.
"""

import argparse
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

from posenc_export.commands.terminal import Progress
from posenc_export.export import export
from posenc_export.models.presets import FOLDED, PRESETS, graph_weights, load_preset, named
from posenc_export.models.stack import Stack
from posenc_export.models.training import bits_per_byte, fit, initialise, python_source
from posenc_export.shared.preset_folders import SOURCE_TREE

TARGET = "ort"  # the fastest one, and one that every command takes
LENGTH = 256  # tokens (bytes) of a text in training
PLACES = 400  # of held-out text whose bits are averaged


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


def trained(name: str, steps: int, seed: int, rate: float, resume: bool) -> Stack:
    """Return a decoder that was trained from random weights, or with `resume` from its own."""
    torch.manual_seed(seed)
    train, held_out = python_source()
    print(f"{len(train) / 1e6:.1f} MB to train on, {len(held_out) / 1e6:.2f} MB held out")
    decoder = load_preset(name).train() if resume else Stack(PRESETS[name])
    if not resume:
        initialise(decoder)
    fit(decoder, train, steps, LENGTH, rate, Progress())
    bits = bits_per_byte(decoder.eval(), held_out, LENGTH, PLACES, LENGTH, LENGTH)
    print(f"held out {bits:.3f} bits per byte")
    return decoder


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*", metavar="NAME", help="presets (default: all)")
    parser.add_argument("--train", action="store_true")
    parser.add_argument("--steps", type=int, default=1600)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--rate", type=float, default=2e-3)
    parser.add_argument("--resume", action="store_true", help="train the preset's weights on")
    options = parser.parse_args()
    how = (options.steps, options.seed, options.rate, options.resume)
    for name in options.names or PRESETS:
        write(name, trained(name, *how) if options.train else load_preset(name), SOURCE_TREE)
        print(name, flush=True)
