"""Compare every number that an artefact stores with its module.

Parameters, buffers, tables and rounded weights are compared bit by bit, constants that the
optimizer computed from them in float64. Constants are matched by name: lowerings name them after
parameters.
"""

from pathlib import Path
from typing import Dict, List, NamedTuple, Optional, Set, Tuple

import numpy as np

from posenc_export.export import expected_numbers
from posenc_export.export.trace import Source
from posenc_export.runtime.artefact.certificate import Check
from posenc_export.runtime.artefact.manifest import Manifest
from posenc_export.runtime.artefact.rules import graph_file
from posenc_export.runtime.graphs.onnx_nodes import read
from posenc_export.runtime.verification.constants import Constants, Digests, Place

ULPS = 8  # of a constant that the optimizer computed, beside float64
BIAS = 1e-5  # largest error of a bias by distance, relative to 1 + |bias|
FEWEST = 8  # numbers of a constant that belongs to no parameter and is no factor, fill or size
CODES = (
    "codes", "scales", "zeros", "zeros_of_blocks", "offsets", "minima",
    "codes_to_gather", "scales_to_gather", "zeros_to_gather",
)  # fmt: skip
OFFSETS = ("offsets", "minima")
# Operators that read the offsets of weights [N,blocks] or [blocks,N], by operator of the weights.
ADDING = {"MatMulNBits": ("MatMul", "FusedMatMul"), "GatherBlockQuantized": ("Gather",)}
LOWERED = "lowered."  # begins the names of constants of lowerings, such as shapes and factors


class Compared(NamedTuple):
    """Result of the comparison: the check, and the digests of the numbers for the manifest."""

    check: Check
    digests: Dict[str, str]


NOTHING = Compared(Check(0, "numbers"), {})


def compare(folder: Path, manifest: Manifest, source: Source) -> Compared:
    """Compare the numbers of a new artefact with those of its module."""
    if graph_file(manifest) != "model.onnx":
        from posenc_export.export.torch_numbers import compare as compare_tensors

        return Compared(compare_tensors(folder, manifest, source.model), {})
    constants = Constants(read(folder / graph_file(manifest)), folder)
    return _Comparison(constants, expected_numbers.ExpectedNumbers(source, manifest)).run()


class _Comparison:
    """The comparison of the constants of one graph.

    Attributes:
        failures: what is wrong, by place.
        skipped: why a constant or a parameter was not compared, by name.
        compared: count of the numbers that were compared.
        worst: largest difference in units of its bound.
    """

    def __init__(self, constants: Constants, expected: expected_numbers.ExpectedNumbers) -> None:
        self.constants, self.expected = constants, expected
        self.failures: Dict[str, str] = {}
        self.skipped: Dict[str, str] = {}
        self.compared, self.worst = 0, 0.0
        self.tensors = expected.tensors

    def run(self) -> Compared:
        digests = Digests(self.constants)
        names: Set[str] = set()
        for place in self.constants.decoded():
            digests.add(place)
            names.update(place.names)
            self._decoded(place)
        for place in self.constants.plain():
            digests.add(place)
            names.update(place.names)
        for name in self.constants.stored:
            if name not in names:
                self.failures[name] = "no node reads it"
            elif name.rpartition(".")[2] not in CODES:
                self._stored(name)
        self._held()
        check = Check(self.compared, "numbers", self.worst, self.failures, self.skipped)
        return Compared(check, digests.result())

    def _stored(self, name: str) -> None:
        """Compare a constant that is stored as it is."""
        numbers = self.constants.array(name)
        wanted = self.expected.of(name, numbers.shape)
        if wanted is None and name in self.expected.traced.tensors:
            wanted = self.expected.traced.tensors[name].numpy()  # a constant in the module's code
        if name.endswith(expected_numbers.BY_DISTANCE):
            self.compared += numbers.size
            if not self.expected.bias_by_distance(numbers, BIAS):
                self.failures[name] = "biases by distance that are those of no encoding"
        elif wanted is not None:
            self._exact(name, numbers, wanted)
        elif name in self.expected.traced:
            self._computed(name, numbers)
        elif numbers.dtype.kind in "iub" or numbers.size < FEWEST or numbers.min() == numbers.max():
            self.skipped[name] = f"{_described(numbers)}, no number of the module"
        else:
            self.failures[name] = f"{_described(numbers)} that belongs to no parameter or table"

    def _computed(self, name: str, numbers: np.ndarray) -> None:
        """Compare a constant that the optimizer computed, with at most ULPS of rounding."""
        traced = self.expected.traced
        self.expected.seen |= traced.sources(name)
        plain = traced.computed(name, precise=False)
        if _equal(plain, numbers):
            self.compared += numbers.size
            return
        wanted = traced.computed(name, precise=True)
        if wanted.shape != numbers.shape or numbers.dtype.kind != "f":
            self.failures[name] = f"expected {_described(wanted)}, got {_described(numbers)}"
            return
        self.compared += numbers.size
        with np.errstate(over="ignore", invalid="ignore"):
            unit = np.spacing(np.abs(wanted).astype(numbers.dtype)).astype(np.float64)
            error = np.abs(numbers.astype(np.float64) - wanted) / (ULPS * unit)
        error = np.where(wanted == numbers, 0.0, error)
        worst = float(np.where(np.isnan(error), np.inf, error).max())
        if not worst <= 1:
            at = np.unravel_index(np.argmax(error), error.shape)
            self.failures[name] = f"expected {wanted[at]!r} at {_index(at)}, got {numbers[at]!r}"
        else:
            self.worst = max(self.worst, worst)

    def _decoded(self, place: Place) -> None:
        """Compare weights that were decoded from codes with the rounded parameter."""
        names = [name for name in place.names if not name.startswith(LOWERED)]
        bases = sorted({name.rpartition(".")[0] for name in names})
        if len(bases) != 1 or any(name.rpartition(".")[2] not in CODES for name in names):
            self.failures[str(place)] = "codes and scales of several weights, or of none"
            return
        numbers = _by_output(place)
        wanted = self.expected.of(bases[0], numbers.shape)
        if wanted is None:
            self.failures[str(place)] = "weights that belong to no parameter"
            return
        if bases[0].rpartition(".")[2] in ("T", "transposed"):
            wanted = wanted.T
        padding = numbers[tuple(slice(0, size) for size in wanted.shape)]
        if numbers.ndim == 3 and np.count_nonzero(numbers) != np.count_nonzero(padding):
            self.failures[str(place)] = "expected zeros beyond the weights, got other numbers"
            return
        offsets = self._offsets(bases[0], place)
        if offsets is not None:
            padding = padding + np.repeat(offsets, place.block, -1)[:, : wanted.shape[1]]
        self._exact(str(place), padding, wanted)

    def _offsets(self, base: str, place: Place) -> Optional[np.ndarray]:
        """Return the offsets [N,blocks] that the graph adds at a place; None if there are none."""
        names = {f"{base}.{kind}" for kind in OFFSETS}
        if not names & self.constants.stored.keys():
            return None
        for other in self.constants.plain():
            node, turned = other.node, other.node.attributes.get("transB", 0) == 0
            if names & set(other.names) and node.operator in ADDING[place.node.operator]:
                return other.numbers.T if turned and node.operator != "Gather" else other.numbers
        return None

    def _exact(self, name: str, numbers: np.ndarray, wanted: np.ndarray) -> None:
        self.compared += numbers.size
        if not _equal(numbers, wanted):
            self.failures[name] = _difference(numbers, wanted)

    def _held(self) -> None:
        """Report parameters that the file does not hold. Equal constants are stored once."""
        seen = {id(self.expected.tensors[n]) for n in self.expected.seen & set(self.tensors)}
        missing = {n: t for n, t in self.tensors.items() if id(t) not in seen}
        by_shape: Dict[Tuple[int, ...], List[str]] = {}
        if missing:
            for name in self.expected.seen & set(self.tensors):
                by_shape.setdefault(tuple(self.tensors[name].shape), []).append(name)
        for name, tensor in missing.items():
            if name not in self.expected.traced.read:
                self.skipped[name] = "no operation of the module reads it"
                continue
            numbers = expected_numbers.numbers_of(tensor)
            equal = [
                other
                for other in by_shape.get(tuple(tensor.shape), [])
                if _equal(expected_numbers.numbers_of(self.tensors[other]), numbers)
            ]
            if equal:
                self.compared += numbers.size
            elif not tensor.is_floating_point():
                self.skipped[name] = "whole numbers, which the graph holds as rows by distance"
            elif not numbers.any():
                self.skipped[name] = "zeros, which the optimizer does not add"
            elif numbers.shape == () and numbers == 1:
                self.skipped[name] = "1, by which the optimizer does not multiply"
            else:
                self.failures[name] = "a parameter or table that the file does not hold"


def _by_output(place: Place) -> np.ndarray:
    numbers, operator = place.numbers, place.node.operator
    if operator == "GatherBlockQuantized":
        return numbers.reshape(len(numbers), -1)
    turned = numbers.ndim == 2 and place.role != "rows" and operator != "MatMulNBits"
    return numbers.T if turned else numbers


def _equal(numbers: np.ndarray, wanted: np.ndarray) -> bool:
    """Whether two arrays have the same shape, dtype and numbers; NaN equals NaN."""
    alike = numbers.shape == wanted.shape and numbers.dtype == wanted.dtype
    nan = numbers.dtype.kind == "f"
    return alike and bool(np.array_equal(numbers, wanted, equal_nan=nan))


def _difference(numbers: np.ndarray, wanted: np.ndarray) -> str:
    if numbers.shape != wanted.shape or numbers.dtype != wanted.dtype:
        return f"expected {_described(wanted)}, got {_described(numbers)}"
    places = np.argwhere(numbers != wanted)
    at = tuple(places[0])
    count = f"{len(places)} of {numbers.size} numbers differ"
    return f"expected {wanted[at]!r} at {_index(at)}, got {numbers[at]!r}; {count}"


def _described(numbers: np.ndarray) -> str:
    return f"{numbers.dtype} {list(numbers.shape)}"


def _index(at: Tuple[np.intp, ...]) -> str:
    return str([int(index) for index in at])
