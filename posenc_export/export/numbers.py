"""Compare every number that an artefact stores with its module.

Parameters, buffers, tables, rounded weights and constants that the optimizer computed from them are
compared bit by bit. Constants of an ONNX graph are matched by name: lowerings name them after
parameters. The module's tables of positions are compared with their formulas in float64.
"""

import itertools
from pathlib import Path
from typing import Any, Callable, Iterator, Mapping

import numpy as np
import torch

from posenc_export.encodings.shared.base import PositionEncoding, Rows, Table
from posenc_export.encodings.shared.tables import levels_of
from posenc_export.export.read_module import Model, ReadModule
from posenc_export.export.signatures import wrap
from posenc_export.export.trace import Source
from posenc_export.models.whole_pass import encodings_in
from posenc_export.runtime.artefact.certificate import Check
from posenc_export.runtime.artefact.manifest import Manifest
from posenc_export.runtime.artefact.rules import graph_file
from posenc_export.runtime.graphs.onnx_nodes import read_nodes
from posenc_export.runtime.graphs.torch_graph import read_program, read_script
from posenc_export.runtime.verification.constants import Constants, Place, digests_of
from posenc_export.shared.numerics import LEVELS

OF_SCALES = ".scale"  # ends the name of the scales of a cache in 8 bits
BY_DISTANCE = ".by_distance"  # ends the name of a table of biases (targets/by_distance.py)
Shape = tuple[int, ...]
Form = Callable[[np.ndarray, Shape], np.ndarray | None]
FEWEST_OF_TORCH = 64  # least size of a constant that must be a tensor of the module
CHUNK = 1 << 14  # rows that are compared at once
OF_ANGLE = 1e-15  # relative rounding error of an angle in float64, due to its frequency
SMALLEST = 1e-300  # bound of the error of a number that is exactly 0
NEAR = 16  # neighbouring rows, whose largest number bounds the effect of an error of the angle
BIAS = 1e-5  # largest error of a bias by distance, relative to 1 + |bias|
FEWEST = 8  # least size of a constant without a parameter that is no factor, fill or size
CODES = (
    "codes", "scales", "zeros", "zeros_of_blocks", "offsets", "minima",
    "codes_to_gather", "scales_to_gather", "zeros_to_gather",
)  # fmt: skip
OFFSETS = ("offsets", "minima")
# Operators that read the offsets of weights [N,blocks] or [blocks,N], by operator of the weights.
ADDING = {"MatMulNBits": ("MatMul", "FusedMatMul"), "GatherBlockQuantized": ("Gather",)}
LOWERED = "lowered."  # begins the names of constants of lowerings, such as shapes and factors


class ExpectedNumbers:
    """Numbers of a module by the names that its graph gives to constants.

    Args:
        source: of the graph.
        manifest: of the artefact.

    Attributes:
        tensors: parameters and buffers by name in the calling convention.
        seen: names of the tensors that a constant was compared with.
    """

    def __init__(self, source: Source, manifest: Manifest) -> None:
        module = wrap(source.model, manifest.signature)
        parameters = dict(module.named_parameters(remove_duplicate=False))
        if source.exact is not source.model:  # in half precision, codes have more digits
            read = {id(source.model.get_parameter(name)): name for name in source.on_grid}
            for name, parameter in parameters.items():
                if id(parameter) in read:
                    parameters[name] = source.exact.get_parameter(read[id(parameter)])
        buffers = dict(module.named_buffers(remove_duplicate=False))
        self.tensors: dict[str, torch.Tensor] = {**buffers, **parameters}
        self._levels = levels_of(module)
        self.traced = source.traced(manifest)
        self.seen: set[str] = set()
        self._scales, self._model = source.cache_scales, source.model
        self._most = manifest.max_positions

    def of(self, name: str, shape: Shape) -> np.ndarray | None:
        """Return the numbers of a constant of a shape; None if its name is not known."""
        if name in self.tensors:
            self.seen.add(name)
            return numbers_of(self.tensors[name])
        if f"model.{name}" in self.tensors:  # rounded weights are named without this prefix
            return self.of(f"model.{name}", shape)
        if name.removesuffix(OF_SCALES) in self._scales:
            scales = self._scales[name.removesuffix(OF_SCALES)]
            missing = shape[0] // len(scales) - scales.shape[1]  # channels that pad heads
            return np.pad(scales, ((0, 0), (0, missing)), constant_values=1).reshape(-1)
        base, _, form = name.rpartition(".")
        tables = {name: part for name, (shared, part) in self._levels.items() if shared == base}
        if tables and form in LEVELS:
            self.seen |= tables.keys() & self.tensors.keys()
            level: np.ndarray = getattr(next(iter(tables.values())).levels, form)
            return level
        if not (form in FORMS or form in PAIRS or form.isdecimal()):
            return None
        numbers = self.of(base, shape)
        if numbers is None:
            return None
        if form.isdecimal():  # of one expert [K,N]
            return numbers[int(form)].T
        if form in FORMS:
            return FORMS[form](numbers, shape)
        own, others, join = PAIRS[form]
        other = self.of(others.join(base.rsplit(own, 1)), shape) if own in base else None
        return None if other is None else join(numbers, other, shape)

    def bias_by_distance(self, numbers: np.ndarray) -> bool:
        """Return whether numbers [H,range] are the biases by distance of an encoding of the module.
        The last one is that of all larger distances.
        """
        last, keys = torch.tensor([[self._most - 1]]), torch.arange(self._most)[None]
        for encoding in encodings_in(self._model):
            with torch.no_grad():
                bias = encoding.bias(last, keys)
            if bias is None:
                continue
            expected = numbers_of(bias[0, :, 0].flip(1))  # [1 or H,distances]
            index = np.minimum(np.arange(self._most), numbers.shape[1] - 1)
            if len(expected) not in (1, len(numbers)):
                continue
            errors = np.abs(numbers[:, index] - expected)
            if (errors <= BIAS * (1 + np.abs(expected))).all():
                own = {id(t) for t in (*encoding.parameters(), *encoding.buffers())}
                self.seen |= {name for name, t in self.tensors.items() if id(t) in own}
                return True
        return False


def numbers_of(tensor: torch.Tensor) -> np.ndarray:
    """Return the numbers of a tensor; those of bfloat16 in float32."""
    plain = tensor.detach().cpu()
    numbers: np.ndarray = (plain.float() if plain.dtype == torch.bfloat16 else plain).numpy()
    return numbers


def with_zeros(numbers: np.ndarray, shape: Shape) -> np.ndarray | None:
    """Pad numbers at the end with zeros to a shape; None if the shape is smaller."""
    missing = [wide - size for wide, size in zip(shape, numbers.shape, strict=False)]
    if len(shape) != numbers.ndim or min(missing, default=0) < 0:
        return None
    return np.pad(numbers, [(0, count) for count in missing])


def _by_output(numbers: np.ndarray, _: Shape) -> np.ndarray:
    """Return weights of experts [experts,K,N] as [experts,N,K]; biases [experts,N] unchanged."""
    return numbers if numbers.ndim < 3 else numbers.swapaxes(1, 2)


def _alternating(gates: np.ndarray, ups: np.ndarray, _: Shape) -> np.ndarray:
    """Return weights [experts,2*N,...] whose outputs are those of gates and of ups in turn."""
    both = np.stack([_by_output(gates, ()), _by_output(ups, ())], axis=2)
    return both.reshape(len(both), -1, *both.shape[3:])


def _turns(first: np.ndarray, second: np.ndarray, shape: Shape) -> np.ndarray | None:
    """Return turns per position relative to the first pair, from two parts of frequencies."""
    kept = len(first) - shape[0]
    frequencies = first[kept:].astype(np.float64) + second[kept:]
    return with_zeros((frequencies - frequencies[0]) / (2 * np.pi), shape)


def _cast(dtype: str) -> Form:
    """Return the form of a float32 table that is cast to a dtype of activations."""
    half = getattr(torch, dtype)
    return lambda numbers, _: numbers_of(torch.from_numpy(np.array(numbers)).to(half))


# By the end of a name, which follows the name of a parameter or another such name: matrices of
# linear layers [N,K] as [K,N], weights of experts [experts,K,N] as [K,experts*N], those
# [experts,N,K] as [experts*N,K], and numbers before zeros.
FORMS: Mapping[str, Form] = {
    "T": lambda numbers, _: numbers.T,
    "by_output": _by_output,
    "beside": lambda numbers, shape: numbers.swapaxes(0, 1).reshape(shape),
    "stacked": lambda numbers, shape: numbers.reshape(shape),
    "padded": with_zeros,
    **{dtype: _cast(dtype) for dtype in ("float16", "bfloat16")},
}
# Forms that join two constants, by the end of a name: what it has in the first, what in the second.
PAIRS: Mapping[str, tuple[str, str, Callable[..., np.ndarray | None]]] = {
    "alternating": (".gates", ".ups", _alternating),
    "turns": (".first.", ".second.", _turns),
}


def compare_tensors(folder: Path, manifest: Manifest, model: Model) -> Check:
    """Compare the tensors of a torch program with those of its module.

    Tensors of model.pt2 have the names of the module. Freezing removes names from model.pt: there,
    a constant without an equal tensor in the module fails if it has the sizes of a tensor that is
    missing. Others, which torch computed, and missing tensors are listed.
    """
    module = wrap(model, manifest.signature)
    wanted = dict(module.named_buffers(remove_duplicate=False))
    wanted |= dict(module.named_parameters(remove_duplicate=False))
    path = folder / graph_file(manifest)
    if manifest.target == "pt2":
        program = read_program(path, manifest)
        return _by_name({**program.constants, **program.state_dict}, wanted)
    return _by_content(list(_constants(path)), wanted)


def _by_name(stored: dict[str, torch.Tensor], wanted: dict[str, torch.Tensor]) -> Check:
    failures, skipped, compared = {}, {}, 0
    for name, tensor in stored.items():
        if name in wanted:
            compared += tensor.numel()
            if tensor.dtype != wanted[name].dtype or not torch.equal(tensor, wanted[name]):
                failures[name] = "other numbers than in the module"
        elif tensor.numel() < FEWEST_OF_TORCH:
            skipped[name] = "a constant of the module's code"
        else:
            failures[name] = f"{list(tensor.shape)} that is no tensor of the module"
    skipped |= {name: "the program has it not" for name in wanted if name not in stored}
    return Check(compared, "numbers", failures=failures, skipped=skipped)


def _by_content(stored: list[tuple[str, torch.Tensor]], wanted: dict[str, torch.Tensor]) -> Check:
    """Compare tensors without names: freezing transposed some of them, and computed others."""
    known: dict[Shape, list[str]] = {}
    for name, tensor in wanted.items():
        known.setdefault(_sizes(tensor), []).append(name)
    compared, present, others = 0, set(), []
    for place, tensor in stored:
        alike = known.get(_sizes(tensor), [])
        names = [name for name in alike if _is_turned(tensor, wanted[name])]
        present.update(names)
        if names:
            compared += tensor.numel()
        else:
            others.append((place, tensor))
    # Encodings compute further numbers from their own, and freezing keeps only the result.
    plain = [name for name in wanted if name not in present and "encoding." not in name]
    lost = {_sizes(wanted[name]): name for name in plain}
    failures, skipped = {}, {}
    for place, tensor in others:
        if _sizes(tensor) in lost:
            failures[place] = f"other numbers than {lost[_sizes(tensor)]}"
        else:
            skipped[place] = f"{list(tensor.shape)}, which torch computed when it froze the program"
    skipped |= {name: "the program has it not" for name in wanted if name not in present}
    return Check(compared, "numbers", failures=failures, skipped=skipped)


def _sizes(tensor: torch.Tensor) -> Shape:
    """Return the sizes above 1 in ascending order, which are equal for all transposes."""
    return tuple(sorted(size for size in tensor.shape if size > 1))


def _is_turned(tensor: torch.Tensor, wanted: torch.Tensor) -> bool:
    """Whether a tensor has the dtype and bits of another one, in some order of their axes."""
    if tensor.dtype != wanted.dtype:
        return False
    bits = getattr(torch, f"int{8 * wanted.element_size()}")
    one, other = (part.detach().cpu().squeeze().view(bits) for part in (tensor, wanted))
    orders = itertools.permutations(range(other.dim()))
    return any(torch.equal(one, other.permute(order)) for order in orders)


def _constants(path: Path) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the tensors of a TorchScript program with their places."""
    module = read_script(path)
    yield from module.named_parameters()
    yield from module.named_buffers()
    for index, node in enumerate(module.graph.findAllNodes("prim::Constant")):
        if isinstance(value := node.output().toIValue(), torch.Tensor):
            yield f"constant {index}", value


def compare_tables(model: Model) -> Check:
    """Compare the tables of the encodings of a model; tables that layers share once."""
    failures: dict[str, str] = {}
    skipped: dict[str, str] = {}
    if isinstance(model, ReadModule):
        skipped["tables"] = "numbers of a module that was read as it is, which states no formula"
    compared, worst = 0, 0.0
    for name, table, rows in _tables(model):
        numbers = table.rows.numpy()
        if rows is None:
            if len(numbers) > 1:
                skipped[name] = "its encoding states no formula of rows; its outputs are sampled"
            continue
        error, at = _worst(numbers, rows)
        compared += len(numbers)
        worst = max(worst, min(error, 1.0))
        if not error <= 1:
            failures[name] = f"expected {rows(np.array([[float(at)]]))[0].tolist()[:4]} in row {at}"
            failures[name] += f", got {numbers[at].tolist()[:4]}"
    return Check(compared, "rows", worst, failures, skipped)


def _tables(model: Any) -> Iterator[tuple[str, Table, Rows | None]]:
    """Yield the tables of encodings by name, with the function of their rows."""
    for name, encoding in model.named_modules():
        if isinstance(encoding, PositionEncoding):
            stated = encoding.oracle().tables()
            for part, table in encoding.named_children():
                if isinstance(table, Table):
                    yield f"{name}.{part}", table, stated.get(part)


def _worst(numbers: np.ndarray, rows: Rows) -> tuple[float, int]:
    """Return the largest error of a row relative to its bound, and the row."""
    worst, at = 0.0, 0
    for first in range(0, len(numbers), CHUNK):
        part = numbers[first : first + CHUNK]
        positions = np.arange(first, first + len(part), dtype=np.float64)[:, None]
        wanted = rows(positions)
        if wanted.shape != part.shape:
            return np.inf, first
        size = np.abs(wanted)
        unit = np.spacing(size.astype(np.float32)).astype(np.float64)
        largest = np.maximum.reduceat(size.max(1), np.arange(0, len(part), NEAR))
        scale = np.repeat(largest, NEAR)[: len(part), None]
        bound = np.maximum(unit / 2 + OF_ANGLE * (positions + 8) * scale, SMALLEST)
        errors = (np.abs(part - wanted) / bound).max(1)
        row = int(np.argmax(errors))
        if not errors[row] <= worst:
            worst, at = float(np.nan_to_num(errors[row], nan=np.inf)), first + row
    return worst, at


def compare(folder: Path, manifest: Manifest, source: Source) -> tuple[Check, dict[str, str]]:
    """Compare the numbers of a new artefact with those of its module. Also return the digests of an
    ONNX graph, for its manifest.
    """
    if graph_file(manifest) != "model.onnx":
        return compare_tensors(folder, manifest, source.model), {}
    constants = Constants(read_nodes(folder / graph_file(manifest)), folder)
    check = _Comparison(constants, ExpectedNumbers(source, manifest)).run()
    return check, digests_of(constants)


class _Comparison:
    """The comparison of the constants of one graph.

    Attributes:
        failures: what is wrong, by place.
        skipped: why a constant or a parameter was not compared, by name.
        compared: count of the numbers that were compared.
    """

    def __init__(self, constants: Constants, expected: ExpectedNumbers) -> None:
        self.constants, self.expected = constants, expected
        self.failures: dict[str, str] = {}
        self.skipped: dict[str, str] = {}
        self.compared = 0
        self.tensors = expected.tensors

    def run(self) -> Check:
        names: set[str] = set()
        for place in self.constants.decoded():
            names.update(place.names)
            self._decoded(place)
        for place in self.constants.plain():
            names.update(place.names)
        for name in self.constants.stored:
            if name not in names:
                self.failures[name] = "no node reads it"
            elif name.rpartition(".")[2] not in CODES:
                self._stored(name)
        self._held()
        return Check(self.compared, "numbers", failures=self.failures, skipped=self.skipped)

    def _stored(self, name: str) -> None:
        """Compare a constant that is stored as it is."""
        numbers = self.constants.array(name)
        wanted = self.expected.of(name, numbers.shape)
        if wanted is None and name in self.expected.traced.tensors:
            wanted = self.expected.traced.tensors[name].numpy()  # a constant in the module's code
        if name.endswith(BY_DISTANCE):
            self.compared += numbers.size
            if not self.expected.bias_by_distance(numbers):
                self.failures[name] = "biases by distance that are those of no encoding"
        elif wanted is not None:
            self._exact(name, numbers, wanted)
        elif name in self.expected.traced:
            self.expected.seen |= self.expected.traced.sources(name)
            self._exact(name, numbers, self.expected.traced.computed(name))
        elif numbers.dtype.kind in "iub" or numbers.size < FEWEST or numbers.min() == numbers.max():
            self.skipped[name] = f"{_described(numbers)}, no number of the module"
        else:
            self.failures[name] = f"{_described(numbers)} that belongs to no parameter or table"

    def _decoded(self, place: Place) -> None:
        """Compare weights that were decoded from codes with the rounded parameter."""
        names = [name for name in place.names if not name.startswith(LOWERED)]
        bases = sorted({name.rpartition(".")[0] for name in names})
        if len(bases) != 1 or any(name.rpartition(".")[2] not in CODES for name in names):
            self.failures[str(place)] = "codes and scales of several weights, or of none"
            return
        numbers = _decoded_by_output(place)
        wanted = self.expected.of(bases[0], numbers.shape)
        if wanted is None:
            self.failures[str(place)] = "weights that belong to no parameter"
            return
        if bases[0].endswith(".T"):
            wanted = wanted.T
        padding = numbers[tuple(slice(0, size) for size in wanted.shape)]
        if numbers.ndim == 3 and np.count_nonzero(numbers) != np.count_nonzero(padding):
            self.failures[str(place)] = "expected zeros beyond the weights, got other numbers"
            return
        offsets = self._offsets(bases[0], place)
        if offsets is not None:
            padding = padding + np.repeat(offsets, place.block, -1)[:, : wanted.shape[1]]
        self._exact(str(place), padding, wanted)

    def _offsets(self, base: str, place: Place) -> np.ndarray | None:
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
        if wanted.dtype.name == "bfloat16":  # which Constants gives in float32
            wanted = wanted.astype(np.float32)
        if not _equal(numbers, wanted):
            self.failures[name] = _difference(numbers, wanted)

    def _held(self) -> None:
        """Report parameters that the file does not hold. Equal constants are stored once."""
        seen = [self.tensors[name] for name in self.expected.seen & self.tensors.keys()]
        held = {id(tensor) for tensor in seen}
        for name, tensor in self.tensors.items():
            if id(tensor) in held:
                continue
            if name not in self.expected.traced.read:
                self.skipped[name] = "no operation of the module reads it"
                continue
            numbers = numbers_of(tensor)
            alike = (numbers_of(other) for other in seen if other.shape == tensor.shape)
            if any(_equal(other, numbers) for other in alike):
                self.compared += numbers.size
            elif not tensor.is_floating_point():
                self.skipped[name] = "whole numbers, which the graph holds as rows by distance"
            elif not numbers.any():
                self.skipped[name] = "zeros, which the optimizer does not add"
            elif numbers.shape == () and numbers == 1:
                self.skipped[name] = "1, by which the optimizer does not multiply"
            else:
                self.failures[name] = "a parameter or table that the file does not hold"


def _decoded_by_output(place: Place) -> np.ndarray:
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
    at = tuple(map(int, places[0]))
    count = f"{len(places)} of {numbers.size} numbers differ"
    return f"expected {wanted[at]!r} at {[*at]}, got {numbers[at]!r}; {count}"


def _described(numbers: np.ndarray) -> str:
    return f"{numbers.dtype} {list(numbers.shape)}"
