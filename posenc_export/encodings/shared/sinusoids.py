"""Sinusoids (Vaswani et al. 2017, 3.5): rows for tables, and single rows for oracles."""

import math
from typing import Callable

import numpy as np

BASE = 10000.0


def frequencies(size: int, base: float = BASE) -> np.ndarray:
    """w_k = base^(-2k/size), float64, k = 0 .. (size - 1) / 2."""
    return base ** (-np.arange(0, size, 2) / size)


def rows(angles: np.ndarray, interleaved: bool = True) -> np.ndarray:
    """Sines and cosines [n,2 pairs] of angles [n,pairs]: sines first unless interleaved."""
    waves = (np.sin(angles), np.cos(angles))
    if interleaved:
        return np.stack(waves, axis=-1).reshape(len(angles), -1)
    return np.concatenate(waves, axis=1)


def formula(size: int, base: float = BASE) -> Callable[[np.ndarray], np.ndarray]:
    """Return the function of positions [n,1] to interleaved sinusoids [n,size]."""
    return lambda positions: rows(positions * frequencies(size, base))


def row(position: int, size: int, base: float = BASE) -> np.ndarray:
    """The interleaved sinusoid [size] of a position; for oracles."""
    angles = [position / math.pow(base, (n - n % 2) / size) for n in range(size)]
    return np.array([math.cos(a) if n % 2 else math.sin(a) for n, a in enumerate(angles)])
