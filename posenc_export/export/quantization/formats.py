"""Quantized weights: the grids of each format, and rounding of a model's weights to codes and scales on a grid."""

import copy
from dataclasses import dataclass
from typing import Callable, Dict, Iterator, List, Mapping, NamedTuple, Optional, Sequence, Set, Tuple

import numpy as np
import torch

from posenc_export.encodings.shared.base import PositionEncoding
from posenc_export.export.quantization import gptq
from posenc_export.models.parts.experts import Experts
from posenc_export.models.user_module import Model

LONGEST_ROW = 4096  # number of inputs assumed for a linear layer without blocks; error bounds grow with its logarithm
ROWS = 4096  # rows of a weight that are rounded at a time
# Candidate scales, relative to the scale that gives the largest weight of a block the last code. Smaller scales clip that weight and round the others finer.
SEARCHED = tuple(float(factor) for factor in np.linspace(0.75, 1.05, 13))
SIGNIFICAND = 24  # bits of the significand of a float32


@dataclass(frozen=True)
class Codes:
    """Weights as code * scale + offset.

    Args:
        codes: [...,N,blocks,block] int8; the last block is padded with 0. Weights of experts have their number in front.
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
        """The weights [...,N,K] float32. Scales are so short that products with codes are exact; sums with offsets are rounded to float32."""
        numbers = self.codes * self.scales[..., None]
        if self.offsets is not None:
            numbers += self.offsets[..., None]
        return numbers.reshape(*self.scales.shape[:-1], -1)[..., : self.inputs]

    @staticmethod
    def joined(parts: Sequence["Codes"], how: Callable[[Sequence[np.ndarray]], np.ndarray] = np.concatenate) -> "Codes":
        """Return codes of several weights with the same inputs in one, joined by a function of arrays."""
        offsets = [part.offsets for part in parts if part.offsets is not None]
        return Codes(how([part.codes for part in parts]), how([part.scales for part in parts]), parts[0].inputs, how(offsets) if offsets else None)


@dataclass(frozen=True)
class Grid:
    """Weights code * scale with codes -2^(bits-1) .. 2^(bits-1) - 1. Each output has one scale per block of consecutive inputs.

    The sign of a scale is chosen so that the largest weight of its block has the lowest code. The grid thus has one code more than a symmetric grid.

    Args:
        bits: bits per code, 4 or 8.
        block: number of inputs that share a scale; None for all inputs.
    """

    bits: int
    block: Optional[int]

    def rounded(self, weight: np.ndarray) -> Codes:
        """Round a weight [N,K] float32 to the grid. Each block gets the scale with the smallest squared error among SEARCHED."""
        return Codes.joined([self._rounded(weight[first : first + ROWS]) for first in range(0, len(weight), ROWS)])

    def compensated(self, weight: np.ndarray, moments: torch.Tensor) -> Codes:
        """Return a weight on the grid whose outputs are close to those of `weight` for inputs with the second moments [K,K] float64 (export/quantization/gptq.py)."""
        order = gptq.order_of(moments)
        return Codes.joined([self._compensated(weight[first : first + ROWS], order) for first in range(0, len(weight), ROWS)])

    def _rounded(self, weight: np.ndarray) -> Codes:
        blocks = self._blocks(weight)
        best = self._best(blocks)
        return Codes(self._nearest(blocks, best).astype(np.int8), best, weight.shape[1])

    def _compensated(self, weight: np.ndarray, order: gptq.Order) -> Codes:
        best = self._best(self._blocks(weight))
        scales = np.repeat(best, self.block or weight.shape[1], axis=1)[:, : weight.shape[1]]
        half = 1 << (self.bits - 1)
        codes: np.ndarray = gptq.codes(torch.from_numpy(weight), torch.from_numpy(scales), order, -half, half - 1).numpy()
        return Codes(self._blocks(codes).astype(np.int8), best, weight.shape[1])

    def _best(self, blocks: np.ndarray) -> np.ndarray:
        """Return the scale of each block [N,blocks] with the smallest squared error among SEARCHED."""
        largest = self._scales(blocks)
        best, error = largest, np.full(largest.shape, np.inf, np.float32)
        for factor in SEARCHED if self.bits < 8 else (1.0,):  # with 8 bits clipping costs more than a finer grid gains
            scales = self._short(largest * np.float32(factor))
            found = np.square(self._nearest(blocks, scales) * scales[..., None] - blocks).sum(2)
            best, error = np.where(found < error, scales, best), np.minimum(found, error)
        return best

    def _short(self, scales: np.ndarray) -> np.ndarray:
        """Round scales to so few bits that their products with codes are exact in float32."""
        significands, exponents = np.frexp(scales)
        steps = np.float32(1 << (SIGNIFICAND - self.bits))
        return np.ldexp(np.rint(significands * steps) / steps, exponents)

    def _blocks(self, weight: np.ndarray) -> np.ndarray:
        """Split [N,K] into blocks [N,blocks,block] and pad the last block with 0."""
        block = self.block or weight.shape[1]
        count = -(-weight.shape[1] // block)
        padded = np.zeros((len(weight), count * block), np.float32)
        padded[:, : weight.shape[1]] = weight
        return padded.reshape(len(weight), count, block)

    def _scales(self, blocks: np.ndarray) -> np.ndarray:
        """Return the scales [N,blocks] with which the largest weight of each block has the lowest code."""
        at = np.abs(blocks).argmax(2)[..., None]
        return np.take_along_axis(blocks, at, 2)[..., 0] / np.float32(-(1 << (self.bits - 1)))

    def _nearest(self, blocks: np.ndarray, scales: np.ndarray) -> np.ndarray:
        """Return the nearest codes [N,blocks,block], as float32."""
        half = 1 << (self.bits - 1)
        return np.clip(np.rint(blocks / np.where(scales == 0, np.float32(1), scales)[..., None]), -half, half - 1)


OnGrid = Tuple[Grid, Codes]


@dataclass(frozen=True)
class Format:
    """The grids of a weight format.

    Args:
        projections: grid of linear layers.
        tables: grid of token tables, and of a head tied to one.
    """

    projections: Grid
    tables: Grid

    @property
    def calibrated(self) -> bool:
        """Whether calibration data is used to round weights. With 8 bits the rounding error is too small for it to matter."""
        return self.projections.bits < 8

    @property
    def shared(self) -> int:
        """Largest number of weights, or activations, that share a scale."""
        return self.projections.block or LONGEST_ROW


FORMATS: Dict[str, Format] = {
    "int8": Format(Grid(8, None), Grid(8, 32)),
    "int4": Format(Grid(4, 32), Grid(4, 32)),
    "int4-128": Format(Grid(4, 128), Grid(4, 128)),
}
KEEP, KEPT = "keep", Format(Grid(8, 32), Grid(8, 32))  # the blocks of a GGUF file (kept.py), and the grid of those that do not fit


def format_of(name: str) -> Format:
    """Return a format by name, one of FORMATS or KEEP."""
    return KEPT if name == KEEP else FORMATS[name]


def activations_of(model: Model) -> str:
    """Return "float32" or "int8", the type in which products with quantized weights read activations.

    In models with experts, activations must not be rounded: a router that reads a slightly different input may choose another expert, which changes outputs abruptly.
    """
    return "float32" if any(isinstance(part, Experts) for part in model.modules()) else "int8"


class Rounded(NamedTuple):
    """A model with rounded weights, and their grids and codes by name of the parameter. The name of a tied weight is that of its table."""

    model: Model
    weights: Dict[str, OnGrid]


def rounded(model: Model, weights: str, moments: Optional[Mapping[str, torch.Tensor]] = None) -> Rounded:
    """Return a copy of a float32 model with the weights of its linear layers, its experts and its token table rounded to the grids of a format.

    Encodings, norms, biases, convolutions, routers and tables of token types keep their weights. In models with experts, formats of 8 bits round only experts, because
    kernels of other products with 8-bit weights round activations.

    Args:
        weights: name of the format, a key of FORMATS.
        moments: second moments of the inputs of linear layers, by name (calibration.moments). Weights of these layers are rounded with Grid.compensated.
    """
    made, kind = copy.deepcopy(model), FORMATS[weights]
    layers = linear_layers(made)
    known = {id(layers[name].weight): moment for name, moment in (moments or {}).items()}  # a tied table has the moments of its head
    names = {id(parameter): name for name, parameter in made.named_parameters()}
    found: Dict[str, OnGrid] = {}
    with torch.no_grad():
        for weight, grid in _matrices(made, kind):
            numbers = weight.numpy()
            codes = grid.compensated(numbers, known[id(weight)]) if id(weight) in known else grid.rounded(numbers)
            weight.copy_(torch.from_numpy(codes.weight))
            found[names[id(weight)]] = grid, codes
        for weight in _of_experts(made):
            codes = Codes.joined([kind.projections.rounded(one.T.contiguous().numpy()) for one in weight], np.stack)
            weight.copy_(torch.from_numpy(codes.weight).transpose(1, 2))
            found[names[id(weight)]] = kind.projections, codes
    return Rounded(made, found)


def _matrices(model: Model, kind: Format) -> List[Tuple[torch.Tensor, Grid]]:
    """Return the weights [N,K] of linear layers and token tables that are rounded, each once, with their grids."""
    if activations_of(model) == "float32" and kind.projections.bits == 8:
        return []
    grids = {id(layer.weight): (layer.weight, kind.projections) for layer in linear_layers(model).values()}
    grids |= {id(table.weight): (table.weight, kind.tables) for table in tables(model)}  # a tied head has the grid of its table
    return list(grids.values())


def _of_experts(model: Model) -> Iterator[torch.Tensor]:
    """Yield the weights [experts,K,N] of gates, ups and downs."""
    for part in model.modules():
        if isinstance(part, Experts):
            yield from (part.gates, part.ups, part.downs)


def linear_layers(model: Model) -> Dict[str, torch.nn.Linear]:
    """Return the linear layers whose weights are rounded, by name."""
    kept = _kept(model)
    return {name: part for name, part in model.named_modules() if isinstance(part, torch.nn.Linear) and name not in kept}


def tables(model: Model) -> List[torch.nn.Embedding]:
    """Return the token tables whose weights are rounded."""
    kept = _kept(model)
    return [part for name, part in model.named_modules() if isinstance(part, torch.nn.Embedding) and name not in kept]


def _kept(model: Model) -> Set[str]:
    """Return the names of modules that stay in float32: encodings, tables of token types, and routers, since another expert would change an output abruptly."""
    inside = {id(part) for encoding in model.modules() if isinstance(encoding, PositionEncoding) for part in encoding.modules()}
    inside |= {id(part.router) for part in model.modules() if isinstance(part, Experts)}
    return {name for name, part in model.named_modules(remove_duplicate=False) if id(part) in inside or name.rpartition(".")[2] == "segments"}
