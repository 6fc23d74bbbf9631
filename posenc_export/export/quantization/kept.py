"""Weights that stay in the blocks in which a GGUF file has them."""

import copy
from typing import List, Optional, Tuple

import numpy as np
import torch

from posenc_export.export.quantization.formats import KEPT, Codes, Grid, OnGrid, Rounded, linear_layers, tables
from posenc_export.export.signatures import Model
from posenc_export.models.gguf.blocks import BLOCK, TYPES, UNQUANTIZED, Stored, blocks_of
from posenc_export.models.parts.experts import Experts


def kept(model: Model) -> Rounded:
    """Return a copy of a model that was read from a GGUF file, and the codes of its quantized linear layers and tables.

    Blocks of 32 weights keep their codes, their scales and their minima. Types with other blocks (Q2_K, Q3_K, Q6_K and so on) are rounded to 8 bits in blocks
    of 32. Weights that are not quantized in the file stay in float32.

    Raises:
        ValueError: a model without quantized weights of a file, or with experts.
    """
    stored = getattr(model, "stored", {})
    if any(isinstance(part, Experts) for part in model.modules()):
        raise ValueError("export: expected a model without experts for weights keep, got one with experts; choose weights int8, or omit weights")
    made = copy.deepcopy(model)
    names = {id(parameter): name for name, parameter in made.named_parameters()}
    matrices = [part.weight for part in (*linear_layers(made).values(), *tables(made))]
    wanted = dict.fromkeys(names[id(weight)] for weight in matrices if names[id(weight)] in stored)  # a tied weight once
    on_grid = {name: one for name in wanted if (one := _on_grid(stored[name])) is not None}
    if not on_grid:
        raise ValueError("export: expected a model from a GGUF file with quantized weights for weights keep, got another; choose another format or omit weights")
    with torch.no_grad():
        for name, (_, codes) in on_grid.items():
            made.get_parameter(name).copy_(torch.from_numpy(codes.weight))
    return Rounded(made, on_grid)


def _on_grid(stored: Stored) -> Optional[OnGrid]:
    """Return the grid and the codes of a weight; None if a part of it is not quantized."""
    if not set(stored.types).isdisjoint(UNQUANTIZED):
        return None
    parts = [_codes(stored, index) for index in range(len(stored.tensors))]
    grid = Grid(max(bits for bits, _ in parts), BLOCK)
    codes = Codes.joined(_with_offsets([one for _, one in parts]))
    offsets = None if codes.offsets is None else codes.offsets[stored.rows]
    return grid, Codes(codes.codes[stored.rows], codes.scales[stored.rows], codes.inputs, offsets)


def _codes(stored: Stored, index: int) -> Tuple[int, Codes]:
    """Return the bits and the codes of one tensor."""
    if stored.types[index] not in TYPES:
        return KEPT.projections.bits, KEPT.projections.rounded(stored.weight(index))
    blocks = blocks_of(stored.tensors[index])
    return blocks.bits, Codes(blocks.codes, blocks.scales, blocks.codes.shape[1] * BLOCK, blocks.offsets)


def _with_offsets(parts: List[Codes]) -> List[Codes]:
    """Return codes that all have offsets, 0 for those without, if one has them."""
    if all(part.offsets is None for part in parts):
        return parts
    return [Codes(part.codes, part.scales, part.inputs, np.zeros_like(part.scales) if part.offsets is None else part.offsets) for part in parts]
