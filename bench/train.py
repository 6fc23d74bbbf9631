"""Train a preset on the source code of the Python standard library and write its artefact: python
-m bench.train tiny-rope

Its bits per byte of the held-out files are printed.
"""

import argparse

import torch

from bench import presets
from posenc_export.commands.terminal import Progress
from posenc_export.models.presets import PRESETS, load_preset
from posenc_export.models.stack import Stack
from posenc_export.models.training import bits_per_byte, fit, initialise, python_source
from posenc_export.shared.preset_folders import SOURCE_TREE

LENGTH = 256  # tokens (bytes) of a text in training
PLACES = 400  # of held-out text whose bits are averaged

if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("name", choices=sorted(PRESETS))
    parser.add_argument("--steps", type=int, default=1600)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--rate", type=float, default=2e-3)
    parser.add_argument("--resume", action="store_true", help="continue from the preset's weights")
    options = parser.parse_args()
    if not SOURCE_TREE.is_dir():
        rule = "the source tree, where its artefact is written"
        parser.error(f"expected {rule}, got an installed package; run this in a checkout")
    torch.manual_seed(options.seed)
    train, held_out = python_source()
    print(f"{len(train) / 1e6:.1f} MB to train on, {len(held_out) / 1e6:.2f} MB held out")
    decoder = load_preset(options.name).train() if options.resume else Stack(PRESETS[options.name])
    if not options.resume:
        initialise(decoder)
    fit(decoder, train, options.steps, LENGTH, options.rate, Progress())
    presets.write(options.name, decoder.eval(), SOURCE_TREE)
    bits = bits_per_byte(decoder, held_out, LENGTH, PLACES, LENGTH, LENGTH)
    print(f"held out {bits:.3f} bits per byte")
