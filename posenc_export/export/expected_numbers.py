"""The numbers that a graph has to store, by name of the constant: those of the module."""

from typing import Callable, Dict, Mapping, Optional, Set, Tuple

import numpy as np
import torch

from posenc_export.export.signatures import wrap
from posenc_export.export.trace import Source
from posenc_export.runtime.artefact.manifest import Manifest

OF_SCALES = ".scale"  # ends the name of the scales of a cache in 8 bits
# End names of tables by distance (targets/distance_tables.py): of biases, and of rows of a table.
BY_DISTANCE, ROW_OF_DISTANCE = ".by_distance", ".row_of_distance"


class ExpectedNumbers:
    """Numbers of a module by the names that its graph gives to constants.

    Args:
        source: of the graph.
        manifest: of the artefact.

    Attributes:
        tensors: parameters and buffers by name in the calling convention.
        seen: names of those that a constant was compared with.
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
        self.tensors: Dict[str, torch.Tensor] = {**buffers, **parameters}
        self.traced = source.traced(manifest)
        self.seen: Set[str] = set()
        self._scales, self._model = source.cache_scales, source.model
        self._most = manifest.max_positions

    def of(self, name: str, shape: Tuple[int, ...]) -> Optional[np.ndarray]:
        """Return the numbers of a constant of a shape; None if its name is not known."""
        if name in self.tensors:
            self.seen.add(name)
            return numbers_of(self.tensors[name])
        if f"model.{name}" in self.tensors:  # rounded weights have their names in the model
            return self.of(f"model.{name}", shape)
        if name.removesuffix(OF_SCALES) in self._scales:
            return _flat_scales(self._scales[name.removesuffix(OF_SCALES)], shape)
        base, _, suffix = name.rpartition(".")
        if suffix.isdecimal():  # of one expert [K,N]
            return self._part(base, int(suffix))
        return FORMS[suffix](self, base, shape) if suffix in FORMS else None

    def bias_by_distance(self, numbers: np.ndarray, bound: float) -> bool:
        """Return whether numbers [H,range] are the biases of an encoding of the module by distance,
        the last of which is that of all larger distances.

        Args:
            bound: of errors, relative to 1 + |bias|.
        """
        encodings = {id(part.encoding): part.encoding for part in self._model.attentions()}
        last, keys = torch.tensor([[self._most - 1]]), torch.arange(self._most)[None]
        for encoding in encodings.values():
            with torch.no_grad():
                bias = encoding.bias(last, keys)
            if bias is None:
                continue
            expected = numbers_of(bias[0, :, 0].flip(1))  # [1 or H,distances]
            index = np.minimum(np.arange(self._most), numbers.shape[1] - 1)
            if len(expected) not in (1, len(numbers)):
                continue
            errors = np.abs(numbers[:, index] - expected)
            if (errors <= bound * (1 + np.abs(expected))).all():
                own = {id(t) for t in (*encoding.parameters(), *encoding.buffers())}
                self.seen |= {name for name, t in self.tensors.items() if id(t) in own}
                return True
        return False

    def row_of_distance(self, rows: np.ndarray) -> bool:
        """Return whether rows [range] stand together in a table of integers of an encoding, and the
        last is that of all larger distances.
        """
        for name, tensor in self.tensors.items():
            if tensor.dtype != torch.int64 or tensor.dim() != 1:
                continue
            table, count = tensor.numpy(), len(rows)
            for first in range(len(table) - count + 1):
                same = np.array_equal(table[first : first + count], rows)
                if same and (table[first + count :] == rows[-1]).all():
                    self.seen.add(name)
                    return True
        return False

    def _part(self, base: str, index: int) -> Optional[np.ndarray]:
        whole = self.of(base, ())
        return None if whole is None else whole[index].T

    def transposed(self, base: str, shape: Tuple[int, ...]) -> Optional[np.ndarray]:
        """Matrices [K,N] of linear layers [N,K]."""
        numbers = self.of(base, shape)
        return None if numbers is None else numbers.T

    def by_output(self, base: str, shape: Tuple[int, ...]) -> Optional[np.ndarray]:
        """Weights of experts [experts,K,N] as [experts,N,K]; biases [experts,N] unchanged."""
        numbers = self.of(base, shape)
        return numbers if numbers is None or numbers.ndim < 3 else numbers.swapaxes(1, 2)

    def beside(self, base: str, shape: Tuple[int, ...]) -> Optional[np.ndarray]:
        """Weights of experts [experts,K,N] as [K,experts*N]."""
        numbers = self.of(base, shape)
        return None if numbers is None else numbers.swapaxes(0, 1).reshape(shape)

    def stacked(self, base: str, shape: Tuple[int, ...]) -> Optional[np.ndarray]:
        """Weights of experts [experts,N,K] as [experts*N,K], and biases in one row."""
        numbers = self.of(base, shape)
        return None if numbers is None else numbers.reshape(shape)

    def alternating(self, base: str, shape: Tuple[int, ...]) -> Optional[np.ndarray]:
        """Outputs of gates and of ups in turn, [experts,2*N,...]."""
        ups = ".ups".join(base.rsplit(".gates", 1))
        parts = [self.by_output(name, shape) for name in (base, ups)]
        first, second = parts
        if first is None or second is None or base == ups:
            return None
        both = np.empty((len(first), 2 * first.shape[1], *first.shape[2:]), first.dtype)
        both[:, 0::2], both[:, 1::2] = first, second
        return both

    def padded(self, base: str, shape: Tuple[int, ...]) -> Optional[np.ndarray]:
        """Numbers followed by zeros along each axis."""
        numbers = self.of(base, shape)
        return None if numbers is None else with_zeros(numbers, shape)

    def turns(self, base: str, shape: Tuple[int, ...]) -> Optional[np.ndarray]:
        """Further turns per position of keys that were cached with the frequencies of a prompt.

        The tables `first` and `second` hold leading and further digits of frequencies.
        """
        first, second = (
            self.of(name, shape) for name in (base, ".second.".join(base.rsplit(".first.", 1)))
        )
        if first is None or second is None:
            return None
        kept = len(first) - shape[0]
        frequencies = first[kept:].astype(np.float64) + second[kept:]
        return with_zeros((frequencies - frequencies[0]) / (2 * np.pi), shape)

    def kept(self, base: str, shape: Tuple[int, ...]) -> Optional[np.ndarray]:
        """The frequencies of positions whose keys are not turned, the first row of a table."""
        numbers = self.of(base, shape)
        return None if numbers is None else numbers[0]

    def cast(self, base: str, dtype: str) -> Optional[np.ndarray]:
        """A table of float32 in a dtype of activations."""
        numbers = self.of(base, ())
        return None if numbers is None else _rounded(numbers, dtype)


Form = Callable[[ExpectedNumbers, str, Tuple[int, ...]], Optional[np.ndarray]]
# By the end of a name, which follows the name of a parameter or another such name.
FORMS: Mapping[str, Form] = {
    "T": ExpectedNumbers.transposed,
    "transposed": ExpectedNumbers.transposed,
    "by_output": ExpectedNumbers.by_output,
    "beside": ExpectedNumbers.beside,
    "stacked": ExpectedNumbers.stacked,
    "alternating": ExpectedNumbers.alternating,
    "padded": ExpectedNumbers.padded,
    "kept": ExpectedNumbers.kept,
    "turns": ExpectedNumbers.turns,
    "float16": lambda numbers, base, _: numbers.cast(base, "float16"),
    "bfloat16": lambda numbers, base, _: numbers.cast(base, "bfloat16"),
}


def numbers_of(tensor: torch.Tensor) -> np.ndarray:
    """Return the numbers of a tensor; those of bfloat16 in float32."""
    plain = tensor.detach().cpu()
    numbers: np.ndarray = (plain.float() if plain.dtype == torch.bfloat16 else plain).numpy()
    return numbers


def with_zeros(numbers: np.ndarray, shape: Tuple[int, ...]) -> Optional[np.ndarray]:
    """Return numbers in the front of an array of zeros; None if the shape is smaller."""
    if len(shape) != numbers.ndim or any(
        wide < size for wide, size in zip(shape, numbers.shape, strict=True)
    ):
        return None
    whole: np.ndarray = np.zeros(shape, numbers.dtype)
    whole[tuple(slice(size) for size in numbers.shape)] = numbers
    return whole


def _flat_scales(scales: np.ndarray, shape: Tuple[int, ...]) -> np.ndarray:
    """Return scales [K,D] of a cache as [K*wide]; channels that pad heads have scale 1."""
    whole: np.ndarray = np.ones((len(scales), shape[0] // len(scales)), np.float32)
    whole[:, : scales.shape[1]] = scales
    return whole.reshape(-1)


def _rounded(numbers: np.ndarray, dtype: str) -> np.ndarray:
    return numbers_of(torch.from_numpy(np.array(numbers)).to(getattr(torch, dtype)))
