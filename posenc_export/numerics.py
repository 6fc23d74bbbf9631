"""One tolerance for every parity check: a bound on rounding, from dtype, depth and reduction length."""

import math

import numpy as np

UNIT_ROUNDOFF = {"float32": 2.0**-24, "float16": 2.0**-11}
HALF_STEP = 2.0**-8  # of 8 bits with a sign, relative to the largest number
BUFFER = 1 << 16  # numbers compared at a time
SAFETY = 8.0  # normalisation and exponentials amplify a rounding by a small constant factor


def tolerance(dtype: str, depth: int, reduction: int) -> float:
    """Largest error, relative to the largest magnitude of the reference, that rounding alone explains.

    Values are stored in dtype and summed in float32 by every kernel in use; errors of a sum of n rounded terms grow like sqrt(n)
    (Higham, Accuracy and Stability of Numerical Algorithms, 2.8), and those of depth layers add up.

    Args:
        dtype: "float32" or "float16".
        depth: number of blocks the value passes, at least 1.
        reduction: length of the longest sum on the way, in terms.
    """
    if dtype not in UNIT_ROUNDOFF:
        raise ValueError(f"numerics: dtype is one of {', '.join(UNIT_ROUNDOFF)}, got {dtype!r}")
    return SAFETY * max(depth, 1) * (UNIT_ROUNDOFF[dtype] + UNIT_ROUNDOFF["float32"] * math.sqrt(max(reduction, 1)))


def activation_tolerance(depth: int) -> float:
    """Largest error, relative to the largest magnitude of the reference, of activations that are rounded to 8 bits before each product.

    A step is the largest activation of a block over 127, so that one rounding errs by at most 2^-8 of it. Roundings of different tokens, inputs and layers are
    independent: their errors add in quadrature, over a sum as over the layers.

    Args:
        depth: number of blocks the value passes, at least 1.
    """
    return SAFETY * HALF_STEP * math.sqrt(max(depth, 1))


def deviation_bound(bits: int, depth: int) -> float:
    return math.inf


def worst_error(actual: np.ndarray, expected: np.ndarray) -> float:
    """Largest |actual - expected| over the largest |expected|; infinite where actual is not finite."""
    if actual.shape != expected.shape:
        raise ValueError(f"numerics: shapes agree, got {actual.shape} and {expected.shape}")
    if not actual.size:
        return 0.0
    if not np.isfinite(actual).all():
        return math.inf
    scale = float(np.maximum(expected.max(), -expected.min())) or 1.0
    worst, both = np.float64(0), np.nditer([actual, expected], ["external_loop", "buffered"], op_dtypes=[np.float64, np.float64], casting="safe", buffersize=BUFFER)
    for one, other in both:  # in parts: the outputs of a decoder are large, and in float64 twice that
        worst = np.maximum(worst, np.abs(one - other).max())
    return float(worst) / scale
