"""The numbers that a graph has to store, by name of the constant: those of the module."""

from typing import Callable, Dict, Mapping, Optional, Set, Tuple

import numpy as np
import torch

from posenc_export.encodings.shared.tables import levels_of
from posenc_export.export.signatures import wrap
from posenc_export.export.trace import Source
from posenc_export.models.whole_pass import encodings_in
from posenc_export.runtime.artefact.manifest import Manifest
from posenc_export.shared.numerics import LEVELS

OF_SCALES = ".scale"  # ends the name of the scales of a cache in 8 bits
BY_DISTANCE = ".by_distance"  # ends the name of a table of biases (targets/by_distance.py)
Shape = Tuple[int, ...]
Form = Callable[[np.ndarray, Shape], Optional[np.ndarray]]


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
        self._levels = levels_of(module)
        self.traced = source.traced(manifest)
        self.seen: Set[str] = set()
        self._scales, self._model = source.cache_scales, source.model
        self._most = manifest.max_positions

    def of(self, name: str, shape: Shape) -> Optional[np.ndarray]:
        """Return the numbers of a constant of a shape; None if its name is not known."""
        if name in self.tensors:
            self.seen.add(name)
            return numbers_of(self.tensors[name])
        if f"model.{name}" in self.tensors:  # rounded weights have their names in the model
            return self.of(f"model.{name}", shape)
        if name.removesuffix(OF_SCALES) in self._scales:
            return _flat_scales(self._scales[name.removesuffix(OF_SCALES)], shape)
        base, _, form = name.rpartition(".")
        tables = {name: part for name, part in self._levels.items() if part.name == base}
        if tables and form in LEVELS:
            self.seen |= tables.keys() & self.tensors.keys()
            level: np.ndarray = getattr(next(iter(tables.values())).tables, form)
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

    def bias_by_distance(self, numbers: np.ndarray, bound: float) -> bool:
        """Return whether numbers [H,range] are the biases of an encoding of the module by distance,
        the last of which is that of all larger distances. bound: of errors, relative to 1 + |bias|.
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
            if (errors <= bound * (1 + np.abs(expected))).all():
                own = {id(t) for t in (*encoding.parameters(), *encoding.buffers())}
                self.seen |= {name for name, t in self.tensors.items() if id(t) in own}
                return True
        return False


def numbers_of(tensor: torch.Tensor) -> np.ndarray:
    """Return the numbers of a tensor; those of bfloat16 in float32."""
    plain = tensor.detach().cpu()
    numbers: np.ndarray = (plain.float() if plain.dtype == torch.bfloat16 else plain).numpy()
    return numbers


def with_zeros(numbers: np.ndarray, shape: Shape) -> Optional[np.ndarray]:
    """Return numbers in the front of an array of zeros; None if the shape is smaller."""
    if len(shape) != numbers.ndim or any(
        wide < size for wide, size in zip(shape, numbers.shape, strict=True)
    ):
        return None
    whole: np.ndarray = np.zeros(shape, numbers.dtype)
    whole[tuple(slice(size) for size in numbers.shape)] = numbers
    return whole


def _flat_scales(scales: np.ndarray, shape: Shape) -> np.ndarray:
    """Return scales [K,D] of a cache as [K*wide]; channels that pad heads have scale 1."""
    whole: np.ndarray = np.ones((len(scales), shape[0] // len(scales)), np.float32)
    whole[:, : scales.shape[1]] = scales
    return whole.reshape(-1)


def _by_output(numbers: np.ndarray, _: Shape) -> np.ndarray:
    """Weights of experts [experts,K,N] as [experts,N,K]; biases [experts,N] unchanged."""
    return numbers if numbers.ndim < 3 else numbers.swapaxes(1, 2)


def _alternating(gates: np.ndarray, ups: np.ndarray, _: Shape) -> np.ndarray:
    """Outputs of gates and of ups in turn, [experts,2*N,...]."""
    both = np.stack([_by_output(gates, ()), _by_output(ups, ())], axis=2)
    return both.reshape(len(both), -1, *both.shape[3:])


def _turns(first: np.ndarray, second: np.ndarray, shape: Shape) -> Optional[np.ndarray]:
    """Further turns per position of cached keys, from leading and further digits of frequencies."""
    kept = len(first) - shape[0]
    frequencies = first[kept:].astype(np.float64) + second[kept:]
    return with_zeros((frequencies - frequencies[0]) / (2 * np.pi), shape)


def _cast(dtype: str) -> Form:
    """A table of float32 in a dtype of activations."""
    half = getattr(torch, dtype)
    return lambda numbers, _: numbers_of(torch.from_numpy(np.array(numbers)).to(half))


# By the end of a name, which follows the name of a parameter or another such name: matrices of
# linear layers [N,K] as [K,N], weights of experts [experts,K,N] as [K,experts*N], those
# [experts,N,K] as [experts*N,K], and numbers before zeros.
FORMS: Mapping[str, Form] = {
    **dict.fromkeys(("T", "transposed"), lambda numbers, _: numbers.T),
    "by_output": _by_output,
    "beside": lambda numbers, shape: numbers.swapaxes(0, 1).reshape(shape),
    "stacked": lambda numbers, shape: numbers.reshape(shape),
    "padded": with_zeros,
    **{dtype: _cast(dtype) for dtype in ("float16", "bfloat16")},
}
# Forms of two constants, with parts of their names.
PAIRS: Mapping[str, Tuple[str, str, Callable[..., Optional[np.ndarray]]]] = {
    "alternating": (".gates", ".ups", _alternating),
    "turns": (".first.", ".second.", _turns),
}
