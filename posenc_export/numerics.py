"""Tolerances of all parity checks: bounds on rounding errors, from dtype, depth and reduction length."""

import math

import numpy as np

UNIT_ROUNDOFF = {"float32": 2.0**-24, "float16": 2.0**-11}
BUFFER = 1 << 16  # numbers compared at a time
SAFETY = 8.0  # normalisation and exponentials amplify a rounding error by a small constant factor


def tolerance(dtype: str, depth: int, reduction: int) -> float:
    """Largest error that rounding alone explains, relative to the largest magnitude of the reference.

    All kernels in use store values in dtype and sum them in float32. The error of a sum of n rounded terms grows like sqrt(n)
    (Higham, Accuracy and Stability of Numerical Algorithms, 2.8), and the errors of `depth` layers add up.

    Args:
        dtype: "float32" or "float16".
        depth: number of blocks that a value passes through, at least 1.
        reduction: number of terms of the longest sum.

    Raises:
        ValueError: another dtype.
    """
    if dtype not in UNIT_ROUNDOFF:
        raise ValueError(f"numerics: expected dtype to be one of {', '.join(UNIT_ROUNDOFF)}, got {dtype!r}")
    return SAFETY * max(depth, 1) * (UNIT_ROUNDOFF[dtype] + UNIT_ROUNDOFF["float32"] * math.sqrt(max(reduction, 1)))


def rounding_noise(bits: int, shared: int) -> float:
    """Root mean square error of normally distributed numbers that are quantised with one scale, relative to their root mean square.

    The largest of n such numbers is about sqrt(2 ln n) standard deviations and gets the largest code. Errors are uniform within a step, which gives
    1 / sqrt(12) of a step.

    Args:
        bits: bits of a code, including its sign.
        shared: number n of numbers that share a scale.
    """
    return math.sqrt(2 * math.log(max(shared, 2)) / 12) / 2 ** (bits - 1)


def products_passed(depth: int) -> int:
    """Number of rounded products that a value passes through: the token table, four in each of depth blocks, and the head."""
    return 4 * max(depth, 1) + 2


def activation_tolerance(depth: int, shared: int) -> float:
    """Largest error of activations that are rounded to 8 bits before each product, relative to the largest magnitude of the reference.

    Rounding errors of different numbers are independent: a sum has the relative error of its terms, and errors of successive products add in quadrature.

    Args:
        depth: number of blocks that a value passes through, at least 1.
        shared: number of activations that share a scale.
    """
    return SAFETY * rounding_noise(8, shared) * math.sqrt(products_passed(depth))


def deviation_bound(depth: int, bits: int, shared: int) -> float:
    """Largest root mean square error of outputs that rounded weights explain, relative to the root mean square of the outputs.

    Each product that a value passes through adds the noise of its weights and of its activations in quadrature. The bound is twice the sum, because trained
    weights have longer tails than a normal distribution, and at most 0.5 at any depth.

    Args:
        depth: number of blocks that a value passes through, at least 1.
        bits: bits of a weight.
        shared: number of weights, and of activations, that share a scale.
    """
    noise = math.hypot(rounding_noise(bits, shared), rounding_noise(8, shared))
    return min(0.5, 2 * noise * math.sqrt(products_passed(depth)))


def worst_error(actual: np.ndarray, expected: np.ndarray) -> float:
    """Largest |actual - expected| divided by the largest |expected|; infinite if actual is not finite.

    Raises:
        ValueError: different shapes.
    """
    if actual.shape != expected.shape:
        raise ValueError(f"numerics: expected two arrays of the same shape, got {actual.shape} and {expected.shape}")
    if not actual.size:
        return 0.0
    if not np.isfinite(actual).all():
        return math.inf
    scale = float(np.maximum(expected.max(), -expected.min())) or 1.0
    worst, both = np.float64(0), np.nditer([actual, expected], ["external_loop", "buffered"], op_dtypes=[np.float64, np.float64], casting="safe", buffersize=BUFFER)
    for one, other in both:  # in parts, because a float64 copy of the outputs of a decoder would be large
        worst = np.maximum(worst, np.abs(one - other).max())
    return float(worst) / scale
