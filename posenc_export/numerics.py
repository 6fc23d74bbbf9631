"""One tolerance for every parity check: a bound on rounding, from dtype, depth and reduction length."""

import math

import numpy as np

UNIT_ROUNDOFF = {"float32": 2.0**-24, "float16": 2.0**-11}
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


def rounding_noise(bits: int, shared: int) -> float:
    """Root of the mean squared error, relative to that of the numbers, of numbers of normal distribution that are rounded to codes of one scale.

    The largest of n such numbers is sqrt(2 ln n) times their deviation; it has the last code, and errors are uniform within a step: 1 / sqrt(12) of it.

    Args:
        bits: of a code, with its sign.
        shared: numbers n that share a scale.
    """
    return math.sqrt(2 * math.log(max(shared, 2)) / 12) / 2 ** (bits - 1)


def products_passed(depth: int) -> int:
    """Rounded products on the way of a value through depth blocks: the token table, four in each block, and the head."""
    return 4 * max(depth, 1) + 2


def activation_tolerance(depth: int, shared: int) -> float:
    """Largest error, relative to the largest magnitude of the reference, of activations that are rounded to 8 bits before each product.

    Roundings of different numbers are independent: a sum has their relative error, and errors of successive products add in quadrature.

    Args:
        depth: number of blocks the value passes, at least 1.
        shared: activations that share a scale.
    """
    return SAFETY * rounding_noise(8, shared) * math.sqrt(products_passed(depth))


def deviation_bound(depth: int, bits: int, shared: int) -> float:
    """Root of the mean squared error of outputs, relative to that of the outputs, up to which rounded weights explain it.

    Each product that a value passes adds the noise of its weights and of its activations in quadrature. The bound is twice that, since trained weights have
    longer tails than a normal distribution, and at most a half, whatever the depth.

    Args:
        depth: number of blocks the value passes, at least 1.
        bits: of a weight.
        shared: weights, and activations, that share a scale.
    """
    noise = math.hypot(rounding_noise(bits, shared), rounding_noise(8, shared))
    return min(0.5, 2 * noise * math.sqrt(products_passed(depth)))


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
