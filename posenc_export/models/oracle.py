"""Reference computation of a model in float64 numpy, which checks the eager module."""

from typing import Any, List, Optional, Sequence

import numpy as np


def full_pass(
    model: Any,
    inputs: np.ndarray,
    start: int,
    grid: Optional[np.ndarray] = None,
    token_types: Optional[np.ndarray] = None,
    encoder: Optional[np.ndarray] = None,
) -> np.ndarray:
    """Compute one row without a cache, to outputs [S,*] float64.

    Args:
        model: block, stack or module that was read (export.read_module).
        inputs: token ids [S] int64, or hidden states [S,E].
        start: position of the first token.
        grid: coordinates [axes,S]; None as for a session.
        token_types: those [S] of a module that was read; None for all 0.
        encoder: keys and values of an encoder [Q,N], for a decoder that reads one.
    """
    positions = range(start, start + len(inputs))
    places: Sequence[Any] = positions
    if model.axes:
        default = [0] * len(positions) if model.coordinate_range else positions
        planes: List[Sequence[int]] = [positions] if model.with_position else []
        planes += [default] * model.axes if grid is None else list(grid)
        places = [tuple(int(number) for number in place) for place in zip(*planes, strict=True)]
    further = {"segments": token_types, "encoded": encoder}
    further = {name: value for name, value in further.items() if value is not None}
    return np.asarray(model.exact(inputs, positions, places, **further))
