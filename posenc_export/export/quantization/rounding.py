"""Rounding of a model's weights to the grids of a format, and weights that stay in the codes that a
quantized checkpoint has.
"""

import itertools
from dataclasses import replace
from typing import Iterable, Iterator, Mapping, NamedTuple

import numpy as np
import torch

from posenc_export.export.quantization.calibration import weights_of
from posenc_export.export.quantization.formats import FORMATS, Format, format_of
from posenc_export.export.quantization.grid import Codes, Grid, OnGrid
from posenc_export.export.read_module import Model, ReadModule
from posenc_export.export.weight_file import Keep, in_memory
from posenc_export.models.parameters import fill, sharing_weights, slots
from posenc_export.models.weight_blocks import Matrix
from posenc_export.shared.progress import Progress, Steps, silent
from posenc_export.shared.refusal import refusal

NOT_KEPT = FORMATS["int8-32"].projections  # of weights whose codes do not fit


def activations_of(model: Model) -> str:
    """Return "float32" or "int8", the type in which products with quantized weights read
    activations.

    In models with experts, activations must not be rounded: a router that reads a slightly
    different input may choose another expert, which changes outputs abruptly.
    """
    choosing = isinstance(model, ReadModule) and model.products.routers
    return "float32" if choosing else "int8"


class Rounded(NamedTuple):
    """A model with rounded weights, and grid and codes by parameter; tied weights as the table."""

    model: Model
    weights: dict[str, OnGrid]


def rounded(
    model: Model,
    weights: str,
    moments: Iterable[Mapping[str, torch.Tensor]] = (),
    formats: Mapping[str, str] | None = None,
    keep: Keep = in_memory,
    say: Progress = silent,
) -> Rounded:
    """Return a copy of a float32 model with the weights of its linear layers, its experts and its
    token table rounded to the grids of a format.

    Encodings, norms, biases, convolutions, routers and tables of token types keep their weights,
    which are shared with `model`. In models with experts, formats of 8 bits round only experts,
    because kernels of other products with 8-bit weights round activations.

    Args:
        weights: name of the format, a key of FORMATS, or MIXED.
        moments: groups of second moments of the inputs of linear layers, by name
            (calibration.moments). Weights of these layers are rounded to 4 bits with
            Grid.compensated, group by group.
        formats: format of each weight by name of the parameter, for MIXED; the model has no experts
            then.
        keep: returns the array in which rounded weights and their codes are kept
            (weight_file.in_file).
        say: reports how many weights are rounded.
    """
    copied, kind = sharing_weights(model), format_of(weights)
    del model  # a caller with the only reference releases each weight as soon as it is rounded
    places = slots(copied)
    names = {id(parameter): name for name, parameter in copied.named_parameters()}
    read_by = {layer: names[id(weight)] for layer, weight in weights_of(copied).linear.items()}
    remaining = {names[id(weight)]: (weight, grid) for weight, grid in _grids(copied, kind)}
    order, on_grid = list(remaining), {}
    steps: Steps | None = None
    for group in itertools.chain(moments, [{}]):
        # Begun here, so that the time left does not count that of measuring the first moments.
        steps = steps or Steps(say, f"rounding to {weights}", len(order), "weights")
        # A tied table has the moments of its head.
        known = {read_by[layer]: moment for layer, moment in group.items()}
        for name in [name for name in remaining if name in known or not known]:
            weight, grid = remaining.pop(name)
            if formats is not None:
                grid = FORMATS[formats[name]].projections
            codes = _codes(weight, grid, known.get(name))
            on_grid[name] = grid, codes.kept(keep)
            fill(places[id(weight)], parameter_of(codes, keep, weight.requires_grad))
            steps.advance()
        del group, known  # before the next group is allocated
    if isinstance(copied, ReadModule):
        copied.changed |= {*order}
    return Rounded(copied, {name: on_grid[name] for name in order})


def parameter_of(codes: Codes, keep: Keep, requires_grad: bool = False) -> torch.nn.Parameter:
    """Return the float32 weight that codes have: [N,K], or [experts,K,N]."""
    numbers = codes.weight
    if numbers.ndim > 2:
        numbers = np.ascontiguousarray(numbers.swapaxes(1, 2))
    return torch.nn.Parameter(torch.from_numpy(keep(numbers)), requires_grad)


def _codes(weight: torch.Tensor, grid: Grid, moments: torch.Tensor | None) -> Codes:
    """Round a weight [N,K], or weights of experts [experts,K,N]."""
    numbers = weight.detach()
    if weight.dim() > 2:
        experts = [grid.rounded(expert.T.contiguous().numpy()) for expert in numbers]
        return Codes.joined(experts, np.stack)
    if moments is None or grid.bits == 8:
        return grid.rounded(numbers.numpy())
    return grid.compensated(numbers.numpy(), moments)


def _grids(model: Model, kind: Format) -> Iterator[tuple[torch.Tensor, Grid]]:
    """Yield each weight that is rounded (linear layers, token tables, experts) with its grid."""
    weights = weights_of(model)
    if activations_of(model) == "int8" or kind.projections.bits < 8:
        grids = {id(weight): (weight, kind.projections) for weight in weights.linear.values()}
        downs = kind.downs or kind.projections
        grids |= {id(weight): (weight, downs) for weight in weights.units if id(weight) in grids}
        # A tied head has the grid of its table.
        grids |= {id(table): (table, kind.tables) for table in weights.tables}
        yield from grids.values()
    grid = replace(kind.projections, zeros=False)  # operators of experts have no zero points
    yield from ((weight, grid) for weight in weights.experts)


def kept(model: Model, keep: Keep = in_memory) -> Rounded:
    """Return a model that was read from a quantized checkpoint with the codes of its quantized
    linear layers and tables.

    Codes with a scale and an offset for each block are kept, and their weights are shared with
    `model`. Quantized weights of other kinds are rounded to 8 bits in blocks of 32. Weights that
    are not quantized in the file stay in float32.

    Args:
        keep: returns the array in which codes and rounded weights are kept
            (weight_file.in_file).

    Raises:
        ValueError: a model without quantized weights of a file, or with experts.
    """
    stored = getattr(model, "stored", {})
    if isinstance(model, ReadModule) and model.products.routers:
        rule = "a model without experts for weights keep"
        raise refusal("export", rule, "one with experts", "choose weights int8, or omit weights")
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    # A tied weight once.
    read = dict.fromkeys(names[id(use.weight)] for use in weights_of(model).uses)
    wanted = [name for name in read if name in stored]
    on_grid = {name: _codes_of(stored[name], keep) for name in wanted}
    if not on_grid:
        rule = "a model from a checkpoint with quantized weights for weights keep"
        raise refusal("export", rule, "another", "choose another format or omit weights")
    changed = {name: codes for name, ((_, codes), exact) in on_grid.items() if not exact}
    copied = sharing_weights(model)
    places = slots(copied)
    for name, codes in changed.items():
        weight = copied.get_parameter(name)
        fill(places[id(weight)], parameter_of(codes, keep, weight.requires_grad))
    if isinstance(copied, ReadModule):
        copied.changed |= {*changed}
    return Rounded(copied, {name: codes for name, (codes, _) in on_grid.items()})


def _codes_of(matrix: Matrix, keep: Keep) -> tuple[OnGrid, bool]:
    """Return the grid and the codes of a weight, and whether they are those of the file."""
    blocks = matrix.blocks()
    if blocks is None:
        return (NOT_KEPT, NOT_KEPT.rounded(matrix.weight()).kept(keep)), False
    _, count, block = blocks.codes.shape
    codes = Codes(blocks.codes, blocks.scales, count * block, blocks.offsets).kept(keep)
    return (Grid(blocks.bits, block), codes), True
