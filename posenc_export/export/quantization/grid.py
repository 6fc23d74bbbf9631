"""Rounding of a weight to codes and scales on a grid. With calibration data, columns are rounded
one after the other, and the error of each is compensated in those not rounded yet (Frantar et al.
2022, GPTQ, algorithm 1).
"""

from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, Callable, NamedTuple, Sequence

import numpy as np
import torch
from torch import Tensor

from posenc_export.export.weight_file import Keep

# Added to the second moment of each input, relative to their mean, because the moments of other
# text differ.
DAMPING = 0.02
COLUMNS = 128  # columns that are rounded before the remaining columns are updated
ROWS = 4096  # rows of a weight that are rounded at a time
# Weights that scales are chosen for at a time, by one thread: arrays of them stay in its cache.
CACHED = 1 << 16
# Candidate scales, relative to the scale with which the weights of a block just fit. Smaller scales
# clip the largest weights and round the others finer.
SEARCHED = tuple(float(factor) for factor in np.linspace(0.7, 1.05, 11))
# Times that the best scale of a block is replaced by the one with the least error for its codes.
REFITTED = 2
# Bits of the significand of scales: products with codes are exact in float32, and scales of blocks
# are stored in float16.
SIGNIFICAND = 11


class Order(NamedTuple):
    """Order of the columns, and the factor that distributes the error of a column among the
    remaining ones.

    The mean squared error of an output with weights w + d is d' M d, where M are the second moments
    of the inputs. The Cholesky factor of the inverse of M gives its minimum over the remaining
    columns. Columns with large moments are rounded first, because most columns can then still
    compensate their error.
    """

    columns: Tensor  # [K] int64
    # Upper Cholesky factor of the inverse of the damped moments, in this order [K,K] float32.
    factor: Tensor
    sizes: Tensor  # damped mean squares of the inputs [K] float64


def order_of(moments: Tensor) -> Order:
    """Return the order for inputs x with mean x x' = `moments` [K,K] float64."""
    sizes = moments.diagonal()
    # If all inputs are 0, weights are rounded independently.
    damping = DAMPING * float(sizes.mean()) or 1.0
    columns = sizes.argsort(descending=True, stable=True)
    damped = moments[columns][:, columns]
    damped.diagonal().add_(damping)
    inverse = torch.cholesky_inverse(torch.linalg.cholesky(damped))
    return Order(columns, torch.linalg.cholesky(inverse, upper=True).float(), sizes + damping)


def compensated_codes(
    weight: Tensor, scales: Tensor, zeros: Tensor, order: Order, least: int, most: int
) -> Tensor:
    """Return codes [N,K] float32, whole numbers, with which (code - zero) * scale replaces a weight
    [N,K] float32. scales, zeros: scale and zero point of each weight [N,K] float32; least, most:
    smallest and largest code.
    """
    columns, factor, _ = order
    # Transposed, so that a column is contiguous in memory.
    remaining, steps, zeros = (part.T[columns] for part in (weight, scales, zeros))
    steps = torch.where(steps == 0, torch.ones_like(steps), steps)
    result = torch.empty_like(remaining)
    for first in range(0, len(remaining), COLUMNS):
        end = min(first + COLUMNS, len(remaining))
        lost = torch.empty_like(remaining[first:end])
        for column in range(first, end):
            step, zero, row = steps[column], zeros[column], factor[column]
            code = result[column]
            torch.div(remaining[column], step, out=code).round_().add_(zero).clamp_(least, most)
            error = lost[column - first]
            torch.sub(remaining[column], (code - zero).mul_(step), out=error).div_(row[column])
            # In place: -= on a part of a tensor would copy the part onto itself.
            remaining[column + 1 : end].sub_(error * row[column + 1 : end, None])
        remaining[end:].sub_((lost.T.contiguous() @ factor[first:end, end:]).T)
    return result[columns.argsort()].T


@dataclass(frozen=True)
class Codes:
    """Weights as code * scale + offset."""

    # [...,N,blocks,block] int8; the last block is padded with 0. Weights of experts have their
    # number in front.
    codes: np.ndarray
    scales: np.ndarray  # [...,N,blocks] float32, of either sign
    inputs: int  # number of inputs K
    offsets: np.ndarray | None = None  # as scales; None for 0

    @property
    def weight(self) -> np.ndarray:
        """The weights [...,N,K] float32: exact products, and rounded sums with offsets."""
        numbers = self.codes * self.scales[..., None]
        if self.offsets is not None:
            numbers += self.offsets[..., None]
        return numbers.reshape(*self.scales.shape[:-1], -1)[..., : self.inputs]

    def zeros(self, bits: int) -> np.ndarray | None:
        """Return zero points [N,blocks] int8 that are equal to the offsets, or None."""
        if self.offsets is None:
            return None
        zeros = np.rint(-self.offsets / np.where(self.scales == 0, np.float32(1), self.scales))
        half = 1 << (bits - 1)
        equal = np.array_equal(-zeros * self.scales, self.offsets)
        whole = equal and -half <= zeros.min() and zeros.max() < half
        return zeros.astype(np.int8) if whole else None

    def in_dtype(self, dtype: str, bits: int) -> "Codes":
        """Return the codes with scales and offsets in a dtype of activations, zero points whole."""
        half = getattr(torch, dtype)
        scales = torch.from_numpy(self.scales).to(half).float().numpy()
        zeros, offsets = self.zeros(bits), self.offsets
        if zeros is not None:
            offsets = -zeros * scales
        elif offsets is not None:
            offsets = torch.from_numpy(offsets).to(half).float().numpy()
        return Codes(self.codes, scales, self.inputs, offsets)

    def kept(self, keep: Keep) -> "Codes":
        """Return the same codes in arrays that `keep` returns."""
        offsets = None if self.offsets is None else keep(self.offsets)
        return Codes(keep(self.codes), keep(self.scales), self.inputs, offsets)

    @staticmethod
    def joined(
        parts: Sequence["Codes"], how: Callable[[Sequence[np.ndarray]], np.ndarray] = np.concatenate
    ) -> "Codes":
        """Return codes of weights with the same inputs in one, joined by a function of arrays."""
        codes, scales = how([part.codes for part in parts]), how([part.scales for part in parts])
        zeros, offsets = [np.zeros_like(part.scales) for part in parts], None
        if any(part.offsets is not None for part in parts):
            pairs = zip(parts, zeros, strict=True)
            offsets = how([zero if p.offsets is None else p.offsets for p, zero in pairs])
        return Codes(codes, scales, parts[0].inputs, offsets)


@dataclass(frozen=True)
class Grid:
    """Weights (code - zero) * scale with codes -2^(bits-1) .. 2^(bits-1) - 1. Each output has one
    scale per block of consecutive inputs.

    Without zero points, zero is 0, and the sign of a scale is chosen so that the largest weight of
    its block has the lowest code: the grid has one code more than a symmetric grid.
    """

    bits: int  # bits per code, 4 or 8
    block: int | None  # number of inputs that share a scale; None for all inputs
    zeros: bool = False  # each block has a zero point, which is one of the codes

    def rounded(self, weight: np.ndarray) -> Codes:
        """Round a weight [N,K] float32. Of the scales and zero points that are tried, each block
        gets those with the smallest squared error.
        """
        return self._in_parts(weight, None)

    def compensated(self, weight: np.ndarray, moments: torch.Tensor) -> Codes:
        """Return a weight on the grid whose outputs are close to those of `weight` for inputs with
        the second moments [K,K] float64.

        The squared errors of weights count as much as the mean squares of their inputs when scales
        and zero points are chosen.
        """
        return self._in_parts(weight, order_of(moments))

    def _in_parts(self, weight: np.ndarray, order: Order | None) -> Codes:
        parts = [weight[first : first + ROWS] for first in range(0, len(weight), ROWS)]
        return Codes.joined([self._part(part, order) for part in parts])

    def _part(self, weight: np.ndarray, order: Order | None) -> Codes:
        blocks, inputs = self._blocks(weight), weight.shape[1]
        squares = np.ones(inputs) if order is None else order.sizes.numpy()
        sizes = self._blocks(squares.astype(np.float32)[None])
        rows = max(1, CACHED // inputs)
        parts = [blocks[first : first + rows] for first in range(0, len(blocks), rows)]
        with ThreadPoolExecutor() as pool:
            rounded = list(pool.map(lambda part: self._in_cache(part, sizes, order is None), parts))
        codes, scales, zeros = (np.concatenate(part) for part in zip(*rounded, strict=True))
        if order is not None:
            steps, offsets = (
                torch.from_numpy(np.repeat(part, blocks.shape[2], axis=1)[:, :inputs])
                for part in (scales, zeros)
            )
            limits = -self.half, self.half - 1
            nearest = compensated_codes(torch.from_numpy(weight), steps, offsets, order, *limits)
            codes = self._blocks(nearest.numpy()).astype(np.int8)
        return Codes(codes, scales, inputs, -zeros * scales if self.zeros else None)

    def _in_cache(
        self, blocks: np.ndarray, sizes: np.ndarray, nearest: bool
    ) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Return codes of few blocks (none if not wanted), and the best scales and zeros."""
        scales, zeros = self._best(blocks, sizes)
        codes = self._nearest(blocks, scales, zeros) if nearest else blocks[:0]
        return codes.astype(np.int8), scales, zeros

    @property
    def half(self) -> int:
        """Half the number of codes."""
        return 1 << (self.bits - 1)

    def _best(self, blocks: np.ndarray, sizes: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return scale and zero point of each block [N,blocks] with the smallest squared error of
        those that are tried, with mean squares of inputs [1,blocks,block].
        """
        ends = self._ends(blocks)
        best = self._fitting(ends, 1.0)
        if self.bits == 8:  # clipping costs more than a finer grid gains
            return best
        error = self._error(blocks, sizes, *best)
        for factor in SEARCHED:
            best, error = self._better(blocks, sizes, best, error, self._fitting(ends, factor))
        for _ in range(REFITTED):
            codes = self._nearest(blocks, *best) - best[1][..., None]
            squares = (sizes * np.square(codes)).sum(2)
            squares = np.where(squares == 0, np.float32(1), squares)
            fitted = self._short((sizes * codes * blocks).sum(2) / squares)
            best, error = self._better(blocks, sizes, best, error, (fitted, best[1]))
        return best

    def _better(
        self,
        blocks: np.ndarray,
        sizes: np.ndarray,
        best: tuple[np.ndarray, np.ndarray],
        error: np.ndarray,
        other: tuple[np.ndarray, np.ndarray],
    ) -> Any:
        """Return for each block the better one of two scales and zero points, and its error."""
        errors = self._error(blocks, sizes, *other)
        pairs = zip(other, best, strict=True)
        chosen = tuple(np.where(errors < error, new, old) for new, old in pairs)
        return chosen, np.minimum(errors, error)

    def _error(
        self, blocks: np.ndarray, sizes: np.ndarray, scales: np.ndarray, zeros: np.ndarray
    ) -> np.ndarray:
        """Return the squared error of each block [N,blocks]."""
        rounded = self._nearest(blocks, scales, zeros)
        rounded -= zeros[..., None]
        rounded *= scales[..., None]
        rounded -= blocks
        np.square(rounded, out=rounded)
        rounded *= sizes
        error: np.ndarray = rounded.sum(2)
        return error

    def _short(self, scales: np.ndarray) -> np.ndarray:
        """Round scales to numbers of float16, those beyond its range to as many bits."""
        significands, exponents = np.frexp(scales)
        steps = np.float32(1 << SIGNIFICAND)
        short = np.ldexp(np.rint(significands * steps) / steps, exponents)
        with np.errstate(over="ignore"):
            half = short.astype(np.float16).astype(np.float32)
        return np.where(np.isfinite(half), half, short)

    def _blocks(self, weight: np.ndarray) -> np.ndarray:
        """Split [N,K] into blocks [N,blocks,block] and pad the last block with 0."""
        block = self.block or weight.shape[1]
        count = -(-weight.shape[1] // block)
        padded = np.zeros((len(weight), count * block), np.float32)
        padded[:, : weight.shape[1]] = weight
        return padded.reshape(len(weight), count, block)

    def _ends(self, blocks: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return the numbers [N,blocks] that the codes of each block have to reach: its smallest
        and largest with zero points, or else twice that of the largest magnitude.
        """
        if self.zeros:
            return np.minimum(blocks.min(2), 0), np.maximum(blocks.max(2), 0)
        at = np.abs(blocks).argmax(2)[..., None]
        largest = np.take_along_axis(blocks, at, 2)[..., 0]
        return largest, largest

    def _fitting(
        self, ends: tuple[np.ndarray, np.ndarray], factor: float
    ) -> tuple[np.ndarray, np.ndarray]:
        """Return scales and zero points [N,blocks] for the ends of blocks: with factor 1, the grid
        just covers each block.
        """
        lowest, highest = ends
        if not self.zeros:
            scales = self._short(highest * np.float32(-factor / self.half))
            return scales, np.zeros_like(scales)
        scales = self._short((highest - lowest) * np.float32(factor / (2 * self.half - 1)))
        steps = np.where(scales == 0, np.float32(1), scales)
        zeros = np.rint(-np.float32(factor) * lowest / steps) - self.half
        return scales, np.clip(zeros, -self.half, self.half - 1)

    def _nearest(self, blocks: np.ndarray, scales: np.ndarray, zeros: np.ndarray) -> np.ndarray:
        """Return the nearest codes [N,blocks,block], as float32."""
        codes: np.ndarray = blocks / np.where(scales == 0, np.float32(1), scales)[..., None]
        np.rint(codes, out=codes)
        codes += zeros[..., None]
        return np.clip(codes, -self.half, self.half - 1, out=codes)


OnGrid = tuple[Grid, Codes]


def packed_codes(codes: np.ndarray, grid: Grid) -> np.ndarray:
    """Return codes as uint8; two 4-bit codes in a byte, the first in its lower half."""
    unsigned = (codes.astype(np.int16) + grid.half).astype(np.uint8)
    return unsigned if grid.bits == 8 else unsigned[..., 0::2] | unsigned[..., 1::2] << 4
