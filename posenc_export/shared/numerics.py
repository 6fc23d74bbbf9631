"""Tolerances of parity checks: bounds on rounding, by dtype, depth and reduction length."""

import math

import numpy as np

from posenc_export.shared.refusal import refusal

UNIT_ROUNDOFF = {"float32": 2.0**-24, "float16": 2.0**-11, "bfloat16": 2.0**-8}
BOTH = math.sqrt(2 / 3)  # of two factors that are both rounded, relative to their unit roundoff
# Root mean square error, relative to the exact number: of a number that is rounded to float16, and
# of a product of two that are rounded to bfloat16. Errors of numbers are uniform within the unit
# roundoff u, with a root mean square of u / sqrt(3).
NOISE = {"float16": 2.0**-11 / math.sqrt(3), "bfloat16": 2.0**-8 * BOTH}
FINE = 256  # positions from a row of the coarse table of a rotation in two levels to the next
LEVELS = ("coarse", "fine")  # end the names of these tables, behind a point
BUFFER = 1 << 16  # numbers compared at a time
# Largest representable cached value, relative to the largest value of the channel in the
# calibration data.
HEADROOM = 1.25
# Bound of the error of a graph that rounds activations, relative to the error of one product.
ROOM = 10.0
PEAK = 5.0  # largest of 10^6 normally distributed errors, relative to their root mean square
LIMIT = 0.1  # no tolerance above it is accepted unless the user gives it
SAFETY = 8.0  # normalisation and exponentials amplify a rounding error by a small constant factor


def tolerance(dtype: str, depth: int, reduction: int) -> float:
    """Largest error that rounding alone explains, relative to the largest magnitude of the
    reference, after `depth` blocks (at least 1), whose longest sum has `reduction` terms.

    In float32, the error of a sum of n rounded terms grows like sqrt(n) (Higham, Accuracy and
    Stability of Numerical Algorithms, 2.8), and the errors of `depth` layers add up. In half
    precision, the bound is that of rounding_tolerance.
    """
    if dtype in NOISE:
        return rounding_tolerance(NOISE[dtype])
    return SAFETY * max(depth, 1) * UNIT_ROUNDOFF["float32"] * (1 + math.sqrt(max(reduction, 1)))


def rounding_noise(bits: int, shared: int) -> float:
    """Root mean square error of normal numbers in codes of `bits` bits, of which `shared` ones have
    one scale, relative to their root mean square. The largest of n such numbers is about sqrt(2 ln
    n) standard deviations and gets the largest code. Errors are uniform within a step: 1 / sqrt(12)
    of it.
    """
    return math.sqrt(2 * math.log(max(shared, 2)) / 12) / 2 ** (bits - 1)


def cache_noise(unit: float, tokens: int) -> float:
    """Root mean square error of cached keys and values, relative to their root mean square. unit:
    unit roundoff of the numbers; 0 for codes of 8 bits, of which the largest of `tokens` tokens of
    calibration data determines the scale of a channel.
    """
    return unit * BOTH if unit else HEADROOM * rounding_noise(8, tokens) * math.sqrt(2)


def rounding_tolerance(noise: float) -> float:
    """Bound of the error (cell_error) of a graph that rounds activations against a float32 graph of
    the same weights. noise: root mean square error of one product or one number, relative to it;
    several kinds add in quadrature.

    In a residual network, errors of the layers add up in the same sum as their outputs, so that the
    relative error of the sum stays near that of one layer. Measured on correct graphs: 2 to 5 times
    the noise with random weights and 2 to 48 layers, 8 times in a trained decoder of 30 layers in 4
    bits.
    """
    return min(LIMIT, ROOM * noise)


def cell_error(errors: "Errors", rounds: bool) -> float:
    """Error of a cell, which its tolerance bounds: the largest error, or, if activations are
    rounded, the larger of root mean square error and largest error / PEAK.
    """
    return max(errors.rms, errors.largest / PEAK) if rounds else errors.largest


def worst_error(actual: np.ndarray, expected: np.ndarray) -> float:
    """Largest |actual - expected| divided by the largest |expected|; infinite if a number of
    either is not finite. Raise ValueError for different shapes.
    """
    errors = Errors()
    errors.add(actual, expected)
    return errors.largest


def entry_errors(actual: np.ndarray, expected: np.ndarray, joined: bool = False) -> np.ndarray:
    """Return |actual - expected| / max(1, |expected|) of each entry; infinity for entries of which
    one is not finite. joined: whether entries of the last axis are sums of one another's products,
    as those of a rotated head are; the largest of them is then |expected|.
    """
    sizes = np.abs(expected).max(-1, keepdims=True) if joined else np.abs(expected)
    with np.errstate(invalid="ignore"):  # infinity minus infinity
        errors = np.abs(actual - expected) / np.maximum(1.0, sizes)
    return np.where(np.isnan(errors), np.inf, errors)


class Errors:
    """Errors of pairs of actual and expected outputs, accumulated over the pairs.

    Attributes:
        largest: largest |actual - expected| of a pair divided by its largest |expected|, the worst
            of all pairs; infinite if a number is not finite.
    """

    def __init__(self) -> None:
        self.largest = 0.0
        self._squares = self._expected_squares = 0.0

    @property
    def rms(self) -> float:
        """Root mean square error of all pairs, relative to that of expected."""
        if not math.isfinite(self.largest):
            return math.inf
        return math.sqrt(self._squares / (self._expected_squares or 1.0))

    def add(self, actual: np.ndarray, expected: np.ndarray) -> None:
        """Compare two arrays of the same shape, or raise ValueError."""
        if actual.shape != expected.shape:
            rule = "two arrays of the same shape"
            raise refusal("numerics", rule, f"{actual.shape} and {expected.shape}")
        if not actual.size:
            return
        if not (np.isfinite(actual).all() and np.isfinite(expected).all()):
            self.largest = math.inf
            return
        scale = float(np.maximum(expected.max(), -expected.min())) or 1.0
        largest = 0.0
        # In parts, because a float64 copy of the outputs of a decoder would be large.
        parts = np.nditer(
            [actual, expected],
            ["external_loop", "buffered"],
            op_dtypes=[np.float64, np.float64],
            casting="safe",
            buffersize=BUFFER,
        )
        for of_actual, of_expected in parts:
            difference = of_actual - of_expected
            largest = max(largest, float(np.abs(difference).max()))
            self._squares += float(np.square(difference).sum())
            self._expected_squares += float(np.square(of_expected).sum())
        self.largest = max(self.largest, largest / scale)
