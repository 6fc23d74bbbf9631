"""The inputs of the parity grid: their sizes, and the tokens of each case.

Shapes: B batch, L tokens of a sequence.
"""

from typing import Any, Dict, List, Tuple

import numpy as np

from posenc_export.runtime.artefact.manifest import Manifest
from posenc_export.runtime.verification.case import AttributeCase
from posenc_export.runtime.verification.inputs import inputs, numbers
from posenc_export.runtime.verification.long_sequence import fill_chunk, fill_length

BATCHES = (1, 3)
# Tokens per row: enough for every way of splitting a sequence, few enough for the element-wise
# oracle.
LENGTH = 36
# Weights that a token reads from which on the grid has fewer cells; the full grid would take
# minutes.
LARGE = 1 << 26
SEGMENT_PADDING = 3  # columns of left padding in the first row


def is_large(manifest: Manifest) -> bool:
    """Whether the grid has shorter sequences, fewer starts and rows, and a shorter full cache."""
    return manifest.step_weights >= LARGE


def length_of(manifest: Manifest) -> int:
    """Return the number of tokens of a sequence L."""
    return min(LENGTH // 2 if is_large(manifest) else LENGTH, manifest.max_positions)


def starts(manifest: Manifest) -> List[int]:
    """Return the start positions of sequences: 0, the last, and unless large one in between."""
    if manifest.signature == "mask":
        return [0]  # the graph counts positions from the mask
    last = manifest.max_positions - length_of(manifest)
    return sorted({0, last} if is_large(manifest) else {0, min(1000, last), last})


def grid_of(manifest: Manifest) -> Tuple[Any, ...]:
    """Return what inputs and expected outputs of the grid depend on, besides the model."""
    return (
        manifest.signature,
        manifest.dtype,
        tuple(starts(manifest)),
        length_of(manifest),
        fill_length(manifest),
        fill_chunk(manifest),
    )


def case_inputs(manifest: Manifest) -> Tuple[np.ndarray, np.ndarray, int]:
    """Return tokens [B,L] of a case, the same with another ending, and where the endings begin."""
    length, rows = length_of(manifest), max(BATCHES)
    fork_at, tokens = length // 2, inputs(manifest, (rows, length), "tokens")
    other = tokens.copy()
    other[:, fork_at:] = inputs(manifest, (rows, length - fork_at), "another ending")
    return tokens, other, fork_at


def attribute_inputs(manifest: Manifest) -> Dict[str, AttributeCase]:
    """Return the inputs of the cells "coordinates" and "segments"; the latter may have both."""
    length, cells = length_of(manifest), {}
    tokens = inputs(manifest, (2, length), "tokens with numbers beside")
    mask = np.ones((2, length), np.int64)
    grid: Dict[str, np.ndarray] = {}
    if manifest.axes:
        shape = (manifest.axes, 2, length)
        grid = {"grid": numbers(shape, "coordinates", manifest.max_positions)}
        cells["coordinates"] = AttributeCase(tokens, mask.copy(), grid)
    if manifest.segments:
        mask[0, : min(SEGMENT_PADDING, length - 1)] = 0
        types = numbers((2, length), "segments", manifest.segments)
        cells["segments"] = AttributeCase(tokens, mask, {**grid, "token_types": types})
    return cells
