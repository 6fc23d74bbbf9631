"""The reference with the numbers that a graph stores: which of its weights each rounded constant
is, found by shape and closeness.

Shapes: a weight is a matrix of N rows of K numbers, a vector one of K = 1.
"""

from dataclasses import dataclass, field
from typing import Any, Dict, List, Mapping, NamedTuple, Optional, Tuple

import numpy as np
import torch

from posenc_export.models.whole_pass import encodings_in
from posenc_export.shared.numerics import BFLOAT16, UNIT_ROUNDOFF

# Largest part of its size by which rounding changes a weight: in codes, so many times the error of
# one scale for all numbers, and no more than this.
TIMES, MOST = 3.0, 0.7
HALVES = {"float16": 2 * UNIT_ROUNDOFF["float16"], "bfloat16": 2 * BFLOAT16}
EPSILON = 1e-4  # smaller constants, such as those of norms, change less than float32 rounds
HIDES = -6e4  # of masks
FIRST = 8  # rows by which most weights are told apart


class Slot(NamedTuple):
    """A parameter of a reference, in one of the modules that hold it."""

    name: str
    rows: bool  # whether it is a table of rows rather than the weight of a product
    numbers: np.ndarray  # [N,K]


class Piece(NamedTuple):
    """Rows of a weight of the reference, and what the graph has for them."""

    slot: str
    first: int
    numbers: np.ndarray


@dataclass
class Carried:
    """What is known of the rounded constants of a graph."""

    pieces: List[Piece] = field(default_factory=list)
    # By constants of products that are none, the nearest weight, and how much it differs
    strange: Dict[str, str] = field(default_factory=dict)
    kept: List[str] = field(default_factory=list)  # other constants that are no weights

    def into(self, model: Any) -> Any:
        """Put the numbers into a model, in place, and return it."""
        modules, filled = dict(model.named_modules()), dict[str, np.ndarray]()
        for piece in self.pieces:
            owner, _, name = piece.slot.rpartition(".")
            if piece.slot not in filled:
                old = getattr(modules[owner], name).detach().float().numpy()
                filled[piece.slot] = _matrix(old).copy()
            filled[piece.slot][piece.first : piece.first + len(piece.numbers)] = piece.numbers
        for slot, numbers in filled.items():
            owner, _, name = slot.rpartition(".")
            old = getattr(modules[owner], name)
            new = torch.from_numpy(numbers.reshape(old.shape)).to(old.dtype)
            setattr(modules[owner], name, torch.nn.Parameter(new, requires_grad=False))
        for encoding in encodings_in(model) if hasattr(model, "attentions") else ():
            encoding.prepare()
        return model


def carried(
    weights: Mapping[str, Tuple[str, str, str]], numbers: Mapping[str, np.ndarray], model: Any
) -> Carried:
    """Find the weights of a model that the rounded constants of a graph are.

    Args:
        weights: by name, format, source and role, as of unrounded.Weight.
        numbers: by name, what a constant stands for.
    """
    stored, result = slots(model), Carried()
    taken: Dict[Tuple[str, int], np.ndarray] = {}
    order = sorted(weights, key=lambda name: -numbers[name].size)
    for name in order:
        kind, source, role = weights[name]
        array, limit = numbers[name], bound(kind, numbers[name])
        pieces, nearest = _pieces(array, role, limit, stored, taken)
        if pieces is not None:
            result.pieces += pieces
        elif role == "product" and array.squeeze().ndim > 1:
            result.strange[source] = f"{nearest}, and rounding to {kind} explains {limit:.1%}"
        elif not _exact(array):
            result.kept.append(source)
    return result


def slots(model: Any) -> List[Slot]:
    """Return the parameters of a model; one that several modules share counts for each."""
    found = []
    for path, module in model.named_modules():
        for name, parameter in module.named_parameters(recurse=False):
            if parameter.numel() and parameter.is_floating_point():
                rows = isinstance(module, torch.nn.Embedding)
                numbers = _matrix(parameter.detach().float().numpy())
                found.append(Slot(f"{path}.{name}" if path else name, rows, numbers))
    return found


def bound(kind: str, numbers: np.ndarray) -> float:
    """Return the largest part of its size by which rounding changes a weight."""
    if kind in HALVES:
        return HALVES[kind]
    size = float(np.sqrt(np.mean(np.square(numbers)))) or 1.0
    step = float(np.abs(numbers).max()) / 2 ** (int(kind.split()[0]) - 1)
    return min(MOST, TIMES * step / 12**0.5 / size)


def _matrix(numbers: np.ndarray) -> np.ndarray:
    squeezed = numbers.squeeze()
    return squeezed.reshape(-1, squeezed.shape[-1] if squeezed.ndim > 1 else 1)


def _exact(numbers: np.ndarray) -> bool:
    """Return whether all numbers are as they were before they were rounded to half precision."""
    sizes = np.abs(numbers[np.isfinite(numbers) & (numbers > HIDES)])
    powers = np.frexp(sizes)[0] == 0.5
    return bool(((sizes % 1 == 0) | powers | (sizes < EPSILON)).all())


Taken = Dict[Tuple[str, int], np.ndarray]


def _pieces(
    numbers: np.ndarray, role: str, limit: float, stored: List[Slot], taken: Taken
) -> Tuple[Optional[List[Piece]], str]:
    """Return the rows of weights that make up a constant, or None and the nearest weight."""
    matrix, nearest = _matrix(numbers), (np.inf, "")
    turned = [matrix.T] if matrix.shape[1] > 1 else []
    for rows in (*turned, matrix) if role == "product" else (matrix, *turned):
        pieces: List[Piece] = []
        begin = 0
        while begin < len(rows):
            best = _best(rows[begin:], role, limit, stored, taken)
            if best is None or best[0] > limit:
                nearest = min(nearest, (np.inf, "") if best is None else (best[0], best[1].slot))
                break
            pieces.append(best[1])
            begin += len(best[1].numbers)
        else:
            taken.update({(p.slot, p.first): p.numbers for p in pieces})
            return pieces, ""
    if not nearest[1]:
        return None, "no weight has its shape"
    return None, f"it differs from the nearest, {nearest[1]}, by {nearest[0]:.1%}"


def _best(
    rows: np.ndarray, role: str, limit: float, stored: List[Slot], taken: Taken
) -> Optional[Tuple[float, Piece]]:
    """Return the weight that the first rows are nearest to, and how far they are."""
    best: Optional[Tuple[Tuple[bool, bool, bool, float], Piece]] = None
    for slot in stored:
        if slot.numbers.shape[1] != rows.shape[1]:
            continue
        for first in range(0, len(slot.numbers), len(rows)):
            count = min(len(rows), len(slot.numbers) - first)
            own, other = rows[:count], slot.numbers[first : first + count]
            error = _distance(own[:FIRST], other[:FIRST])
            if error <= 4 * limit and count > FIRST:
                error = _distance(own, other)
            used = taken.get((slot.name, first))
            conflict = used is not None and not np.array_equal(used, own)
            key = (error > limit, conflict, slot.rows != (role == "rows"), error)
            if best is None or key < best[0]:
                best = key, Piece(slot.name, first, own)
    if best is None or (best[0][1] and not best[0][0]):
        return None
    return best[0][3], best[1]


def _distance(x: np.ndarray, y: np.ndarray) -> float:
    size, change = float(np.linalg.norm(y)), float(np.linalg.norm(x - y))
    return change / size if size else (np.inf if change else 0.0)
