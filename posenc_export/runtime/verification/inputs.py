"""Inputs of the parity grid, generated from names. Needs numpy and a manifest."""

import hashlib
import math
from typing import List, Optional, Tuple

import numpy as np

from posenc_export.runtime.artefact.manifest import Manifest

ENCODED = 11  # tokens of the longest encoder sequence


def encoder_rows(manifest: Manifest, rows: int) -> Optional[List[np.ndarray]]:
    """Return encoder outputs [q,N] of rows, each shorter than the last; None without encoder."""
    if not manifest.encoder:
        return None
    numbers_of_token = sum(
        int(value.axes[1]) * int(value.axes[3]) for value in manifest.encoder[1:]
    )
    longest = uniform((rows, ENCODED, numbers_of_token), "keys and values of an encoder").astype(
        manifest.passed_dtype
    )
    return [row[: ENCODED - 3 * index] for index, row in enumerate(longest)]


def inputs(manifest: Manifest, shape: Tuple[int, ...], name: str) -> np.ndarray:
    """Generate tokens, or hidden states of variance 1, from a name, the same on every machine."""
    vocabulary = manifest.vocabulary
    if vocabulary:
        return numbers(shape, name, vocabulary)
    return uniform((*shape, int(manifest.inputs[0].axes[-1])), name).astype(
        manifest.inputs[0].dtype
    )


def uniform(shape: Tuple[int, ...], name: str) -> np.ndarray:
    """Generate float64 numbers with a uniform distribution of mean 0 and variance 1 from a name."""
    return ((_bits(shape, name) + 0.5) / 2**31 - 1) * math.sqrt(3)


def numbers(shape: Tuple[int, ...], name: str, limit: int) -> np.ndarray:
    """Generate whole numbers 0 .. limit - 1, int64, from a name."""
    return (_bits(shape, name).astype(np.int64) * limit) >> 32


def _bits(shape: Tuple[int, ...], name: str) -> np.ndarray:
    count = math.prod(shape)
    return np.frombuffer(hashlib.shake_256(name.encode()).digest(4 * count), "<u4").reshape(shape)
