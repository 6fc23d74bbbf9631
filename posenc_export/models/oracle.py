"""The model once more, in float64 numpy, one token and one head at a time: what the eager module is checked against."""

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
    """One row, no cache: inputs [S] int64 or [S,E] at positions start, start + 1, ..., coordinates grid [axes,S], segments token_types [S] (all 0 where
    None) and keys and values of an encoder [Q,N] to outputs [S,*], float64."""
    positions = range(start, start + len(inputs))
    places = positions if grid is None else [tuple(int(p) for p in place) for place in grid.T]
    beside = (token_types,) if encoder is None else (token_types, encoder)
    return np.asarray(model.exact(inputs, positions, places, *beside))
