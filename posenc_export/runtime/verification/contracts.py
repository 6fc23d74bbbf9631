"""The documented arithmetic of operators on weights of few bits, in float64, and bounds of its
rounding errors.

Contracts: ONNX Runtime's docs/ContribOperators.md (MatMulNBits, MatMulIntegerToFloat,
GatherBlockQuantized), and ONNX's QuantizeLinear and DequantizeLinear. Bounds: Higham, Accuracy and
Stability of Numerical Algorithms, section 3.1: a sum of products in which no product passes through
more than m roundings is off by at most m u / (1 - m u) times the sum of the magnitudes of the
products, in whatever order it is computed.

Shapes: M tokens, K inputs, N outputs.
"""

from dataclasses import dataclass
from typing import Iterator, Tuple, Union

import numpy as np

UNIT = 2.0**-24  # unit roundoff of float32
HALF_UNIT = 2.0**-11  # of float16
# Sessions read subnormal float32 as 0 and flush it. An input below 2^-126 in a block whose largest
# one is at least SMALLEST has code 0 anyway, and the scale of that block is not subnormal.
SMALLEST = 2.0**-118
# Scales of a block below 2^-126 are flushed too, and with them a sum below 2^24, of at most 2^12
# blocks.
UNDERFLOW = 2.0**-90
LARGEST = 2.0**127  # sums of such magnitudes may overflow
# Roundings that a product of a block passes through beside the sum over blocks: 2 of the scale of
# activations (amax / 127, or as the reciprocal of 127 / amax), 1 of its product with the scale of
# weights or with the sum of codes, 1 of the zero point times its scale, 1 of the product of the
# integer sum with these, 5 of sums over at most 32 partial sums of a register or of several, 1 of
# the parts with codes and with zero points, and 1 of a bias.
BESIDE = 12
AT_A_TIME = 1 << 22  # weights that are decoded at a time


@dataclass(frozen=True)
class Blocks:
    """Weights (code - zero) * scale [N,K]."""

    codes: np.ndarray  # [N,blocks,block] integers of at least 0
    scales: np.ndarray  # [N,blocks] float32
    zeros: np.ndarray  # [N,blocks] integers of at least 0
    bits: int  # 4 or 8
    inputs: int  # K; the last block is padded

    @property
    def block(self) -> int:
        """Number of inputs of a block."""
        return int(self.codes.shape[2])

    @property
    def weight(self) -> np.ndarray:
        """The weights by input [K,N] float32."""
        return self.columns(np.arange(self.inputs))[0].T.astype(np.float32)

    @property
    def largest(self) -> np.ndarray:
        """Largest magnitude that a kernel can give zero points, [N,blocks] float64, in units of the
        scale.

        Kernels sum codes and zero points apart. They may move both by a whole number up to `half`,
        for signed integers. With the codes as they are stored, |code| + `largest` is at least |code
        - o| + |zero - o| for each o of 0 .. half.
        """
        half = 1 << (self.bits - 1)
        return half + np.abs(self.zeros.astype(np.float64) - half)

    def parts(self) -> Iterator[Tuple[slice, "Blocks"]]:
        """Yield consecutive outputs and their weights."""
        for part in _slices(len(self.codes), self.codes.shape[1] * self.block):
            arrays = self.codes[part], self.scales[part], self.zeros[part]
            yield part, Blocks(*arrays, self.bits, self.inputs)

    def columns(self, at: np.ndarray) -> Tuple[np.ndarray, np.ndarray]:
        """Return weights of some inputs [N,n] float64, and |scale| (|code| + `largest`) of each."""
        block, inside = np.divmod(at, self.block)
        codes, zeros = self.codes[:, block, inside], self.zeros[:, block]
        scales = self.scales.astype(np.float64)[:, block]
        signed = codes.astype(np.float64) - zeros
        return signed * scales, (codes + self.largest[:, block]) * np.abs(scales)


@dataclass(frozen=True)
class Activations:
    """Activations [M,K] rounded to 8 bits in blocks: q = rint(x (127 / amax)), scale amax / 127.

    A kernel computes the quotient t in float32 with at most 3 roundings: 127 / amax and its product
    with x, or amax / 127, its reciprocal and the product. Its quotient is therefore within 4 u |t|
    of t, and its code is one of those of `codes_of`: two if a tie, a half-integer, is that near,
    otherwise one. An output then differs by at most half of scale * |weight| from that with the
    mean of both codes. In blocks whose largest input is below SMALLEST, quotients overflow or
    scales are subnormal: codes may be any of -128 .. 127, or the whole block 0, so an output may
    differ by 255 scales.
    """

    codes: np.ndarray  # [M,blocks,block] float32, or the mean of two codes; padded with 0
    scales: np.ndarray  # [M,blocks] float64
    either: np.ndarray  # [M,K] float64, by how much an activation may differ

    @staticmethod
    def of(x: np.ndarray, block: int) -> "Activations":
        """Round activations [M,K]."""
        blocks = np.pad(x.astype(np.float64), ((0, 0), (0, -x.shape[1] % block)))
        blocks = blocks.reshape(len(x), -1, block)
        largest = np.abs(blocks).max(axis=2)
        lowest, highest = codes_of(blocks * (127 / np.where(largest == 0, 1, largest))[..., None])
        either = (highest - lowest) / 2 + 255.0 * (largest < SMALLEST)[..., None]
        either *= largest[..., None] / 127
        flat = either.reshape(len(x), -1)[:, : x.shape[1]]
        return Activations(((lowest + highest) / 2).astype(np.float32), largest / 127, flat)


def codes_of(
    quotients: np.ndarray, error: Union[np.ndarray, float] = 0.0
) -> Tuple[np.ndarray, np.ndarray]:
    """Return least and greatest code of quotients, known within 4 u of their size plus an error."""
    away = 0.5 + 4 * UNIT * np.abs(quotients) + error
    lowest, highest = np.ceil(quotients - away), np.floor(quotients + away)
    return np.clip(lowest, -128, 127), np.clip(highest, -128, 127)


def of_rounded(x: np.ndarray, y: np.ndarray, weights: Blocks) -> np.ndarray:
    """Return errors over bounds [M] of x W^T, outputs y [M,N] of activations x [M,K] float32 that
    are rounded in blocks: accuracy_level 4 of MatMulNBits.

    Sums of a block are whole numbers below 2^24 for blocks of at most 256, so they are exact, here
    in float32 too. An output passes through at most one addition for each block and BESIDE further
    roundings, so it is off by at most (blocks + BESIDE) u / (1 - (blocks + BESIDE) u) of the sum
    over k of |x| |scale| (|code| + largest), plus what inputs near a tie may change (Activations),
    plus UNDERFLOW.
    """
    rounded, ratios = Activations.of(x, weights.block), np.zeros(len(x))
    count = weights.codes.shape[1] + BESIDE
    unsure = np.flatnonzero(rounded.either.any(axis=0))
    sums = rounded.codes.sum(axis=2), np.abs(rounded.codes).sum(axis=2)
    both = np.concatenate((rounded.codes, np.abs(rounded.codes))).transpose(1, 0, 2)
    for outputs, part in weights.parts():
        dots = both @ part.codes.astype(np.float32).transpose(1, 2, 0)
        zeros, scales = part.zeros.T.astype(np.float32), part.scales.T.astype(np.float64)
        signed = dots[:, : len(x)] - zeros[:, None] * sums[0].T[..., None]
        whole = dots[:, len(x) :] + part.largest.T[:, None] * sums[1].T[..., None]
        value = np.einsum("bmn,mb,bn->mn", signed, rounded.scales, scales)
        size = np.einsum("bmn,mb,bn->mn", whole, rounded.scales, np.abs(scales))
        bound = _bound(size, count)
        if unsure.size:
            bound += rounded.either[:, unsure] @ np.abs(part.columns(unsure)[0]).T
        ratios = np.maximum(ratios, over(y[:, outputs], value, bound))
    return ratios


def of_least(x: np.ndarray, y: np.ndarray, weights: Blocks) -> np.ndarray:
    """Return errors over bounds [M] of accuracy_level 4, the least accuracy: without a kernel that
    rounds blocks of this size on this processor, ONNX Runtime computes with activations in float32.
    """
    rounded = of_rounded(x, y, weights)
    if rounded.max() <= 1:
        return rounded
    plain = of_float(x, y, weights)
    return plain if plain.max() <= 1 else rounded


def of_float(x: np.ndarray, y: np.ndarray, weights: Blocks) -> np.ndarray:
    """Return errors over bounds [M] of x W^T in float32: other accuracy levels, and MatMul of
    dequantized weights.

    An output passes through at most one addition for each input, one for each block if zero points
    are summed apart, and BESIDE further roundings, of which the weight has at most 2.
    """
    ratios = np.zeros(len(x))
    count, at = x.shape[1] + weights.codes.shape[1] + BESIDE, np.arange(x.shape[1])
    exact = x.astype(np.float64)
    for outputs, part in weights.parts():
        weight, magnitude = part.columns(at)
        bound = _bound(np.abs(exact) @ magnitude.T, count)
        ratios = np.maximum(ratios, over(y[:, outputs], exact @ weight.T, bound))
    return ratios


def of_integers(
    codes: np.ndarray, y: np.ndarray, weight: np.ndarray, scales: np.ndarray
) -> np.ndarray:
    """Return errors over bounds [M] of MatMulIntegerToFloat: signed codes [M,K] times weight [K,N],
    times the products of both scales [N]. The sum of integers is exact; it passes through at most 4
    roundings.
    """
    ratios = np.zeros(len(codes))
    for part in _slices(weight.shape[1], len(weight)):
        exact = np.zeros((len(codes), weight[:, part].shape[1]))
        for begin in range(0, len(weight), 512):  # sums of 512 products are below 2^24
            inputs = slice(begin, begin + 512)
            exact += codes[:, inputs].astype(np.float32) @ weight[inputs, part].astype(np.float32)
        exact *= scales[part].astype(np.float64)
        ratios = np.maximum(ratios, over(y[:, part], exact, _bound(np.abs(exact), 4)))
    return ratios


def of_codes(x: np.ndarray, codes: np.ndarray, scales: np.ndarray) -> np.ndarray:
    """Return twice the distance of codes [M,K] from those that rint(x / scale) may have, [M]; 0 if
    all are right. scales: [M,1] or [M,K]. Tokens whose scale may be flushed to 0 have arbitrary
    codes.
    """
    known = np.broadcast_to(scales >= SMALLEST / 127, x.shape)
    lowest, highest = codes_of(x.astype(np.float64) / np.where(known, scales, 1))
    distance = np.maximum(lowest - codes, codes - highest)
    return np.where(known, 2 * np.maximum(distance, 0), 0).max(axis=1, initial=0)


def of_rows(y: np.ndarray, rows: np.ndarray) -> np.ndarray:
    """Return errors over bounds [M] of dequantized rows (code - zero) * scale: one rounding to
    float32, and one to float16 if that is the dtype of y.
    """
    bound = _bound(np.abs(rows), 1)
    if y.dtype == np.float16:
        bound += np.abs(rows) * HALF_UNIT + 2.0**-25
    return over(y, rows, bound)


def of_half(x: np.ndarray, y: np.ndarray, weight: np.ndarray, unit: float) -> np.ndarray:
    """Return errors over bounds [M] of MatMul in float16, of x [M,K] and a weight [K,N] to y [M,N].

    Inputs are exact, sums of at most K products have unit roundoff `unit`, and the result is
    rounded to float16, of which the smallest number is 2^-24. A result near 65504 may overflow.
    """
    exact, ratios, count = x.astype(np.float64), np.zeros(len(x)), x.shape[1] + 2
    for part in _slices(weight.shape[1], len(weight)):
        numbers = weight[:, part].astype(np.float64)
        value = exact @ numbers
        bound = count * unit * (np.abs(exact) @ np.abs(numbers)) / (1 - min(count * unit, 0.5))
        bound += (np.abs(value) + bound) * HALF_UNIT + 2.0**-25
        bound[np.abs(value) + bound >= 65504] = np.inf
        ratios = np.maximum(ratios, over(y[:, part], value, bound))
    return ratios


def _slices(outputs: int, inputs: int) -> Iterator[slice]:
    """Yield parts of the outputs of a weight, at most about AT_A_TIME weights at a time."""
    count = max(1, AT_A_TIME // inputs)
    return (slice(first, first + count) for first in range(0, outputs, count))


def _bound(size: np.ndarray, count: int) -> np.ndarray:
    """Return the bound of `count` roundings of sums of size `size`; infinity on overflow."""
    bound: np.ndarray = size * (count * UNIT / (1 - count * UNIT)) + UNDERFLOW
    bound[size >= LARGEST] = np.inf
    return bound


def over(y: np.ndarray, value: np.ndarray, bound: np.ndarray) -> np.ndarray:
    """Return the largest error over its bound of each row [M]; infinity for NaN."""
    with np.errstate(invalid="ignore"):
        ratio = np.abs(y - value) / bound
    ratio = np.where(np.isinf(bound), 0, np.nan_to_num(ratio, nan=np.inf, posinf=np.inf))
    return ratio.max(axis=1, initial=0)
