"""Reference computation of a model in float64 numpy, which checks the eager module."""

from typing import Any, Optional

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
        model: block, stack or own module.
        inputs: token ids [S] int64, or hidden states [S,E].
        start: position of the first token.
        grid: coordinates [axes,S]; None uses positions.
        token_types: segments [S]; None for all 0.
        encoder: keys and values of an encoder [Q,N], for a decoder that reads one.
    """
    positions = range(start, start + len(inputs))
    places = positions if grid is None else [tuple(int(p) for p in place) for place in grid.T]
    optional = (token_types,) if encoder is None else (token_types, encoder)
    return np.asarray(model.exact(inputs, positions, places, *optional))
