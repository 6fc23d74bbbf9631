"""Weights that stay in the codes that a quantized checkpoint has."""

from typing import Tuple

import torch

from posenc_export.export.quantization.formats import FORMATS
from posenc_export.export.quantization.grid import Codes, Grid, OnGrid
from posenc_export.export.quantization.rounding import Rounded, activations_of
from posenc_export.export.quantization.uses import uses
from posenc_export.export.read_module import Model, ReadModule
from posenc_export.export.weight_file import Keep, in_memory
from posenc_export.models.parameters import fill, sharing_weights, slots
from posenc_export.models.weight_blocks import Blocks, Matrix
from posenc_export.shared.refusal import refusal

OTHERS = FORMATS["int8-32"].projections  # of weights whose codes do not fit


def kept(model: Model, keep: Keep = in_memory) -> Rounded:
    """Return a model that was read from a quantized checkpoint with the codes of its quantized
    linear layers and tables.

    Codes with a scale and an offset for each block are kept, and their weights are shared with
    `model`. Quantized weights of other kinds are rounded to 8 bits in blocks of 32. Weights that
    are not quantized in the file stay in float32.

    Args:
        keep: returns the array in which codes and rounded weights are kept
            (weight_file.WeightFile).

    Raises:
        ValueError: a model without quantized weights of a file, or with experts.
    """
    stored = getattr(model, "stored", {})
    if activations_of(model) != "int8":
        rule = "a model without experts for weights keep"
        raise refusal("export", rule, "one with experts", "choose weights int8, or omit weights")
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    # A tied weight once.
    read = dict.fromkeys(names[id(use.weight)] for use in uses(model))
    wanted = [name for name in read if name in stored]
    on_grid = {name: _on_grid(stored[name], keep) for name in wanted}
    if not on_grid:
        rule = "a model from a checkpoint with quantized weights for weights keep"
        raise refusal("export", rule, "another", "choose another format or omit weights")
    changed = {name: codes for name, ((_, codes), exact) in on_grid.items() if not exact}
    copied = sharing_weights(model)
    places = slots(copied)
    for name, codes in changed.items():
        weight = copied.get_parameter(name)
        numbers = torch.from_numpy(keep(codes.weight))
        fill(places[id(weight)], torch.nn.Parameter(numbers, weight.requires_grad))
    if isinstance(copied, ReadModule):
        copied.changed |= {*changed}
    return Rounded(copied, {name: codes for name, (codes, _) in on_grid.items()})


def _on_grid(matrix: Matrix, keep: Keep) -> Tuple[OnGrid, bool]:
    """Return the grid and the codes of a weight, and whether they are those of the file."""
    held = matrix.blocks()
    blocks = held or _rounded(matrix)
    _, count, block = blocks.codes.shape
    codes = Codes(blocks.codes, blocks.scales, count * block, blocks.offsets).kept(keep)
    return (Grid(blocks.bits, block), codes), held is not None


def _rounded(part: Matrix) -> Blocks:
    codes = OTHERS.rounded(part.weight())
    return Blocks(codes.codes, codes.scales, None, OTHERS.bits)
