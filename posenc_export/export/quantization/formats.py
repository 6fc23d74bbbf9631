"""Quantized weights: the grids of each format, and rounding of a model's weights to codes and
scales on a grid.
"""

import itertools
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import (
    Any,
    Callable,
    Dict,
    Iterable,
    Iterator,
    List,
    Mapping,
    NamedTuple,
    Optional,
    Sequence,
    Set,
    Tuple,
)

import numpy as np
import torch

from posenc_export.encodings.shared.base import PositionEncoding
from posenc_export.export.paging import page_out
from posenc_export.export.quantization import gptq
from posenc_export.export.weight_file import Keep, in_memory
from posenc_export.models.parameters import fill, sharing_weights, slots
from posenc_export.models.parts.experts import Experts
from posenc_export.models.parts.mlps import Gated, Plain
from posenc_export.models.user_module import Model
from posenc_export.shared.progress import Progress, Steps, silent

# Number of inputs assumed for a linear layer without blocks; error bounds grow with its logarithm.
LONGEST_ROW = 4096
RELEASED = 16  # weights whose memory is released at a time, after they were rounded
ROWS = 4096  # rows of a weight that are rounded at a time
CACHED = (
    1 << 16
)  # weights that scales are chosen for at a time, by one thread: arrays of them stay in its cache
# Candidate scales, relative to the scale with which the weights of a block just fit. Smaller scales
# clip the largest weights and round the others finer.
SEARCHED = tuple(float(factor) for factor in np.linspace(0.7, 1.05, 11))
# Times that the best scale of a block is replaced by the one with the least error for its codes.
REFITTED = 2
# Bits of the significand of scales: products with codes are exact in float32, and scales of blocks
# are stored in float16.
SIGNIFICAND = 11


@dataclass(frozen=True)
class Codes:
    """Weights as code * scale + offset.

    Args:
        codes: [...,N,blocks,block] int8; the last block is padded with 0. Weights of experts have
            their number in front.
        scales: [...,N,blocks] float32, of either sign.
        inputs: number of inputs K.
        offsets: as scales; None for 0.
    """

    codes: np.ndarray
    scales: np.ndarray
    inputs: int
    offsets: Optional[np.ndarray] = None

    @property
    def weight(self) -> np.ndarray:
        """The weights [...,N,K] float32. Scales are so short that products with codes are exact;
        sums with offsets are rounded unless zero points are whole.
        """
        numbers = self.codes * self.scales[..., None]
        if self.offsets is not None:
            numbers += self.offsets[..., None]
        return numbers.reshape(*self.scales.shape[:-1], -1)[..., : self.inputs]

    def zeros(self, bits: int) -> Optional[np.ndarray]:
        """Return whole zero points [N,blocks] int8 with which weights are (code - zero) * scale,
        each one of the codes; None if offsets are other numbers.
        """
        if self.offsets is None:
            return None
        zeros = np.rint(-self.offsets / np.where(self.scales == 0, np.float32(1), self.scales))
        half = 1 << (bits - 1)
        whole = (
            np.array_equal(-zeros * self.scales, self.offsets)
            and -half <= zeros.min()
            and zeros.max() < half
        )
        return zeros.astype(np.int8) if whole else None

    def kept(self, keep: Keep) -> "Codes":
        """Return the same codes in arrays that `keep` returns."""
        return Codes(
            keep(self.codes),
            keep(self.scales),
            self.inputs,
            None if self.offsets is None else keep(self.offsets),
        )

    @staticmethod
    def joined(
        parts: Sequence["Codes"], how: Callable[[Sequence[np.ndarray]], np.ndarray] = np.concatenate
    ) -> "Codes":
        """Return codes of several weights with the same inputs in one, joined by a function of
        arrays.
        """
        offsets = [part.offsets for part in parts if part.offsets is not None]
        return Codes(
            how([part.codes for part in parts]),
            how([part.scales for part in parts]),
            parts[0].inputs,
            how(offsets) if offsets else None,
        )


@dataclass(frozen=True)
class Grid:
    """Weights (code - zero) * scale with codes -2^(bits-1) .. 2^(bits-1) - 1. Each output has one
    scale per block of consecutive inputs.

    Without zero points, zero is 0, and the sign of a scale is chosen so that the largest weight of
    its block has the lowest code: the grid has one code more than a symmetric grid.

    Args:
        bits: bits per code, 4 or 8.
        block: number of inputs that share a scale; None for all inputs.
        zeros: each block has a zero point, which is one of the codes.
    """

    bits: int
    block: Optional[int]
    zeros: bool = False

    def rounded(self, weight: np.ndarray) -> Codes:
        """Round a weight [N,K] float32 to the grid. Each block gets the scale, and the zero
        point, with the smallest squared error of those that are tried.
        """
        return self._in_parts(weight, None)

    def compensated(self, weight: np.ndarray, moments: torch.Tensor) -> Codes:
        """Return a weight on the grid whose outputs are close to those of `weight` for inputs with
        the second moments [K,K] float64 (export/quantization/gptq.py).

        The squared errors of weights count as much as the mean squares of their inputs when scales
        and zero points are chosen.
        """
        return self._in_parts(weight, gptq.order_of(moments))

    def _in_parts(self, weight: np.ndarray, order: Optional[gptq.Order]) -> Codes:
        return Codes.joined(
            [
                self._part(weight[first : first + ROWS], order)
                for first in range(0, len(weight), ROWS)
            ]
        )

    def _part(self, weight: np.ndarray, order: Optional[gptq.Order]) -> Codes:
        blocks, inputs = self._blocks(weight), weight.shape[1]
        sizes = self._blocks(
            np.ones((1, inputs), np.float32)
            if order is None
            else order.sizes.numpy().astype(np.float32)[None]
        )
        rows = max(1, CACHED // inputs)
        with ThreadPoolExecutor() as pool:
            found = list(
                pool.map(
                    lambda first: self._in_cache(
                        blocks[first : first + rows], sizes, order is None
                    ),
                    range(0, len(blocks), rows),
                )
            )
        codes, scales, zeros = (np.concatenate(part) for part in zip(*found, strict=True))
        if order is not None:
            steps, offsets = (
                torch.from_numpy(np.repeat(part, blocks.shape[2], axis=1)[:, :inputs])
                for part in (scales, zeros)
            )
            codes = self._blocks(
                gptq.codes(
                    torch.from_numpy(weight), steps, offsets, order, -self.half, self.half - 1
                ).numpy()
            ).astype(np.int8)
        return Codes(codes, scales, inputs, -zeros * scales if self.zeros else None)

    def _in_cache(
        self, blocks: np.ndarray, sizes: np.ndarray, nearest: bool
    ) -> Tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Return codes of few blocks, none if the nearest are not wanted, and the best scales
        and zero points.
        """
        scales, zeros = self._best(blocks, sizes)
        codes = self._nearest(blocks, scales, zeros) if nearest else blocks[:0]
        return codes.astype(np.int8), scales, zeros

    @property
    def half(self) -> int:
        """Half the number of codes."""
        return 1 << (self.bits - 1)

    def _best(self, blocks: np.ndarray, sizes: np.ndarray) -> Tuple[np.ndarray, np.ndarray]:
        """Return scale and zero point of each block [N,blocks] with the smallest squared error
        of those that are tried, with mean squares of inputs [1,blocks,block].
        """
        best = self._fitting(blocks, 1.0)
        if self.bits == 8:  # clipping costs more than a finer grid gains
            return best
        error = self._error(blocks, sizes, *best)
        for factor in SEARCHED:
            best, error = self._better(blocks, sizes, best, error, self._fitting(blocks, factor))
        for _ in range(REFITTED):
            codes = self._nearest(blocks, *best) - best[1][..., None]
            squares = (sizes * np.square(codes)).sum(2)
            fitted = self._short(
                (sizes * codes * blocks).sum(2) / np.where(squares == 0, np.float32(1), squares)
            )
            best, error = self._better(blocks, sizes, best, error, (fitted, best[1]))
        return best

    def _better(
        self,
        blocks: np.ndarray,
        sizes: np.ndarray,
        best: Tuple[np.ndarray, np.ndarray],
        error: np.ndarray,
        other: Tuple[np.ndarray, np.ndarray],
    ) -> Any:
        """Return for each block the better one of two scales and zero points, and its error."""
        found = self._error(blocks, sizes, *other)
        chosen = tuple(
            np.where(found < error, new, old) for new, old in zip(other, best, strict=True)
        )
        return chosen, np.minimum(found, error)

    def _error(
        self, blocks: np.ndarray, sizes: np.ndarray, scales: np.ndarray, zeros: np.ndarray
    ) -> np.ndarray:
        """Return the squared error of each block [N,blocks]."""
        made = (self._nearest(blocks, scales, zeros) - zeros[..., None]) * scales[..., None]
        error: np.ndarray = (sizes * np.square(made - blocks)).sum(2)
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

    def _fitting(self, blocks: np.ndarray, factor: float) -> Tuple[np.ndarray, np.ndarray]:
        """Return scales and zero points [N,blocks]: with factor 1, the grid just covers each
        block.
        """
        if self.zeros:
            lowest, highest = np.minimum(blocks.min(2), 0), np.maximum(blocks.max(2), 0)
            scales = self._short((highest - lowest) * np.float32(factor / (2 * self.half - 1)))
            zeros = (
                np.rint(-np.float32(factor) * lowest / np.where(scales == 0, np.float32(1), scales))
                - self.half
            )
            return scales, np.clip(zeros, -self.half, self.half - 1)
        at = np.abs(blocks).argmax(2)[..., None]
        largest = np.take_along_axis(blocks, at, 2)[..., 0]
        scales = self._short(largest * np.float32(-factor / self.half))
        return scales, np.zeros_like(scales)

    def _nearest(self, blocks: np.ndarray, scales: np.ndarray, zeros: np.ndarray) -> np.ndarray:
        """Return the nearest codes [N,blocks,block], as float32."""
        steps = np.where(scales == 0, np.float32(1), scales)[..., None]
        return np.clip(np.rint(blocks / steps) + zeros[..., None], -self.half, self.half - 1)


OnGrid = Tuple[Grid, Codes]


@dataclass(frozen=True)
class Format:
    """The grids of a weight format.

    Args:
        projections: grid of linear layers.
        tables: grid of token tables, and of a head tied to one.
        downs: grid of linear layers that read the units of an MLP, which have larger outliers than
            outputs of norms; None for that of others.
    """

    projections: Grid
    tables: Grid
    downs: Optional[Grid] = None

    @property
    def calibrated(self) -> bool:
        """Whether calibration data is used: to round weights to 4 bits, and to smooth the inputs
        of products with one scale per token (smoothing.py).
        """
        return self.smooth or self.projections.bits < 8

    @property
    def smooth(self) -> bool:
        """Whether all inputs of a token share a scale in products, so that outliers cost
        precision.
        """
        return self.projections.block is None

    @property
    def shared(self) -> int:
        """Largest number of weights, or activations, that share a scale."""
        return self.projections.block or LONGEST_ROW


FORMATS: Dict[str, Format] = {
    "int8": Format(Grid(8, None), Grid(8, 32), downs=Grid(8, 32)),
    "int8-32": Format(Grid(8, 32), Grid(8, 32)),
    "int4": Format(Grid(4, 32, zeros=True), Grid(4, 32, zeros=True)),
    "int4-128": Format(Grid(4, 128, zeros=True), Grid(4, 128, zeros=True)),
}
KEEP, KEPT = (
    "keep",
    Format(Grid(8, 32), Grid(8, 32)),
)  # the blocks of a GGUF file (kept.py), and the grid of those that do not fit
MIXED = "mixed"  # a format of FORMATS for each weight (mixed.py)


def format_of(name: str) -> Format:
    """Return a format by name, one of FORMATS or KEEP; for MIXED the one with the largest
    rounding error of those that weights may have.
    """
    return KEPT if name == KEEP else FORMATS["int4-128" if name == MIXED else name]


def activations_of(model: Model) -> str:
    """Return "float32" or "int8", the type in which products with quantized weights read
    activations.

    In models with experts, activations must not be rounded: a router that reads a slightly
    different input may choose another expert, which changes outputs abruptly.
    """
    return "float32" if any(isinstance(part, Experts) for part in model.modules()) else "int8"


class Rounded(NamedTuple):
    """A model with rounded weights, and their grids and codes by name of the parameter. The name
    of a tied weight is that of its table.
    """

    model: Model
    weights: Dict[str, OnGrid]


def rounded(
    model: Model,
    weights: str,
    moments: Iterable[Mapping[str, torch.Tensor]] = (),
    formats: Optional[Mapping[str, str]] = None,
    keep: Keep = in_memory,
    say: Progress = silent,
) -> Rounded:
    """Return a copy of a float32 model with the weights of its linear layers, its experts and its
    token table rounded to the grids of a format.

    Encodings, norms, biases, convolutions, routers and tables of token types keep their weights,
    which are shared with `model`. In models with experts, formats of 8 bits round only experts,
    because kernels of other products with 8-bit weights round activations.

    Args:
        weights: name of the format, a key of FORMATS, or MIXED.
        moments: groups of second moments of the inputs of linear layers, by name
            (calibration.moments). Weights of these layers are rounded to 4 bits with
            Grid.compensated, group by group.
        formats: format of each weight by name of the parameter, for MIXED; the model has no experts
            then.
        keep: returns the array in which rounded weights and their codes are kept
            (weight_file.WeightFile).
        say: reports how many weights are rounded.
    """
    made, kind = sharing_weights(model), format_of(weights)
    del (
        model
    )  # a caller that passes its only reference releases each weight as soon as it is rounded
    places, names = (
        slots(made),
        {id(parameter): name for name, parameter in made.named_parameters()},
    )
    read_by = {layer: names[id(part.weight)] for layer, part in linear_layers(made).items()}
    left = {
        names[id(weight)]: (weight, grid)
        for weight, grid in (
            *_matrices(made, kind),
            *((weight, None) for weight in _of_experts(made)),
        )
    }
    found: Dict[str, Optional[OnGrid]] = dict.fromkeys(left)
    done: List[torch.Tensor] = []
    steps = Steps(say, f"rounding to {weights}", len(left), "weights")
    for group in itertools.chain(moments, [{}]):
        known = {
            read_by[layer]: moment for layer, moment in group.items()
        }  # a tied table has the moments of its head
        for name in [name for name in left if name in known or not known]:
            weight, grid = left.pop(name)
            if grid is not None and formats is not None:
                grid = FORMATS[formats[name]].projections
            grid, codes = (
                _rounded_experts(weight, kind)
                if grid is None
                else (grid, _rounded_matrix(weight, grid, known.get(name)))
            )
            found[name] = grid, codes.kept(keep)
            numbers = (
                codes.weight
                if weight.dim() == 2
                else np.ascontiguousarray(codes.weight.swapaxes(1, 2))
            )
            fill(
                places[id(weight)],
                torch.nn.Parameter(torch.from_numpy(keep(numbers)), weight.requires_grad),
            )
            done.append(weight)
            if len(done) == RELEASED:
                page_out(done)
                done.clear()
            steps.advance()
        del group, known  # before the next group is allocated
    return Rounded(made, {name: one for name, one in found.items() if one is not None})


def _rounded_matrix(weight: torch.Tensor, grid: Grid, moments: Optional[torch.Tensor]) -> Codes:
    numbers = weight.detach().numpy()
    return (
        grid.rounded(numbers)
        if moments is None or grid.bits == 8
        else grid.compensated(numbers, moments)
    )


def _rounded_experts(weights: torch.Tensor, kind: Format) -> OnGrid:
    grid = replace(kind.projections, zeros=False)  # operators of experts have none
    return grid, Codes.joined(
        [grid.rounded(one.T.contiguous().numpy()) for one in weights.detach()], np.stack
    )


def _matrices(model: Model, kind: Format) -> List[Tuple[torch.Tensor, Optional[Grid]]]:
    """Return the weights [N,K] of linear layers and token tables that are rounded, each once,
    with their grids.
    """
    if activations_of(model) == "float32" and kind.projections.bits == 8:
        return []
    downs = {
        id(part.down): kind.downs or kind.projections
        for part in model.modules()
        if isinstance(part, (Gated, Plain))
    }
    grids = {
        id(layer.weight): (layer.weight, downs.get(id(layer), kind.projections))
        for layer in linear_layers(model).values()
    }
    grids |= {
        id(table.weight): (table.weight, kind.tables) for table in tables(model)
    }  # a tied head has the grid of its table
    return list(grids.values())


def _of_experts(model: Model) -> Iterator[torch.Tensor]:
    """Yield the weights [experts,K,N] of gates, ups and downs."""
    for part in model.modules():
        if isinstance(part, Experts):
            yield from (part.gates, part.ups, part.downs)


def linear_layers(model: Model) -> Dict[str, torch.nn.Linear]:
    """Return the linear layers whose weights are rounded, by name."""
    kept = _kept(model)
    return {
        name: part
        for name, part in model.named_modules()
        if isinstance(part, torch.nn.Linear) and name not in kept
    }


def tables(model: Model) -> List[torch.nn.Embedding]:
    """Return the token tables whose weights are rounded."""
    kept = _kept(model)
    return [
        part
        for name, part in model.named_modules()
        if isinstance(part, torch.nn.Embedding) and name not in kept
    ]


def _kept(model: Model) -> Set[str]:
    """Return the names of modules that stay in float32: encodings, tables of token types, and
    routers, since another expert would change an output abruptly.
    """
    inside = {
        id(part)
        for encoding in model.modules()
        if isinstance(encoding, PositionEncoding)
        for part in encoding.modules()
    }
    inside |= {id(part.router) for part in model.modules() if isinstance(part, Experts)}
    return {
        name
        for name, part in model.named_modules(remove_duplicate=False)
        if id(part) in inside or name.rpartition(".")[2] == "segments"
    }
