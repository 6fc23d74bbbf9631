"""Structure and rounding of a graph, apart: its float32 form, the reference of the same numbers,
and what the rounding costs. Which weight of the reference a rounded constant is, is found by shape
and closeness.

Shapes: B rows, L tokens, V numbers of an output. A weight is a matrix of N rows of K numbers, a
vector one of K = 1.
"""

import copy
from dataclasses import dataclass, field
from typing import Any, Mapping, NamedTuple

import numpy as np
import torch

from posenc_export.auditing.facts import Reference
from posenc_export.auditing.inputs import NotUnrounded
from posenc_export.models.whole_pass import encodings_in
from posenc_export.runtime.verification.proof import Accuracy
from posenc_export.shared import numerics
from posenc_export.shared.numerics import NOISE, UNIT_ROUNDOFF

# Largest part of its size by which rounding changes a weight: in codes, so many times the error of
# one scale for all numbers, and no more than this.
TIMES, MOST = 3.0, 0.7
EPSILON = 1e-4  # smaller constants, such as those of norms, change less than float32 rounds
HIDES = -6e4  # of masks
FIRST = 8  # rows by which most weights are told apart
Taken = dict[tuple[str, int], np.ndarray]  # numbers by name and first row of what they are of


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

    pieces: list[Piece] = field(default_factory=list)
    # By constants of products that are none, the nearest weight, and how much it differs
    strange: dict[str, str] = field(default_factory=dict)
    kept: list[str] = field(default_factory=list)  # other constants that are no weights

    def into(self, model: Any) -> Any:
        """Put the numbers into a model, in place, and return it."""
        filled: dict[str, np.ndarray] = {}
        for piece in self.pieces:
            if piece.slot not in filled:
                old = model.get_parameter(piece.slot).detach().float().numpy()
                filled[piece.slot] = _matrix(old).copy()
            filled[piece.slot][piece.first : piece.first + len(piece.numbers)] = piece.numbers
        for slot, numbers in filled.items():
            owner, _, name = slot.rpartition(".")
            old = model.get_parameter(slot)
            new = torch.from_numpy(numbers.reshape(old.shape)).to(old.dtype)
            changed = torch.nn.Parameter(new, requires_grad=False)
            setattr(model.get_submodule(owner), name, changed)
        for encoding in encodings_in(model) if hasattr(model, "attentions") else ():
            encoding.prepare()
        return model


def carried(
    weights: Mapping[str, tuple[str, str, str]], numbers: Mapping[str, np.ndarray], model: Any
) -> Carried:
    """Find the weights of a model that the rounded constants of a graph are.

    Args:
        weights: by name, the fields of unrounded.Weight: format, source and role.
        numbers: by name, what a constant stands for.
    """
    stored, result = slots(model), Carried()
    taken: Taken = {}
    for name in sorted(weights, key=lambda name: -numbers[name].size):
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


def slots(model: Any) -> list[Slot]:
    """Return the parameters of a model; one that several modules share counts for each."""
    found = []
    for name, parameter in model.named_parameters(remove_duplicate=False):
        if parameter.numel() and parameter.is_floating_point():
            rows = isinstance(model.get_submodule(name.rpartition(".")[0]), torch.nn.Embedding)
            found.append(Slot(name, rows, _matrix(parameter.detach().float().numpy())))
    return found


def bound(kind: str, numbers: np.ndarray) -> float:
    """Return the largest part of its size by which rounding changes a weight."""
    if kind in NOISE:
        return 2 * UNIT_ROUNDOFF[kind]
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


def _pieces(
    numbers: np.ndarray, role: str, limit: float, stored: list[Slot], taken: Taken
) -> tuple[list[Piece] | None, str]:
    """Return the rows of weights that make up a constant, or None and the nearest weight."""
    matrix, nearest = _matrix(numbers), (np.inf, "")
    turned = [matrix.T] if matrix.shape[1] > 1 else []
    for rows in (*turned, matrix) if role == "product" else (matrix, *turned):
        pieces: list[Piece] = []
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
    rows: np.ndarray, role: str, limit: float, stored: list[Slot], taken: Taken
) -> tuple[float, Piece] | None:
    """Return the weight that the first rows are nearest to, and how far they are."""
    best: tuple[tuple[bool, bool, bool, float], Piece] | None = None
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


@dataclass(frozen=True)
class Rounding:
    """How a graph whose weights are rounded is compared."""

    format: str  # of its weights, such as "8 bits"
    original: Reference
    reference: Reference  # with the numbers of the graph
    form: Any  # the float32 form, as Graph
    carried: Carried

    @property
    def compared(self) -> str:
        """The precision in which the form is compared: that of constants that remain rounded."""
        kept = "few bits" if self.format.endswith("bits") else self.format
        return kept if self.carried.kept else "float32"

    @property
    def words(self) -> str:
        """What a sentence says about the weights."""
        if not self.carried.kept:
            return f"weights in {self.format}"
        count, such = len(self.carried.kept), self.carried.kept[0]
        which = f"such as {such}, are no weights" if count > 1 else f"{such}, is no weight"
        why = f"so errors of {self.format} were accepted in the structure, too"
        return f"weights in {self.format} ({count} of its constants, {which}, {why})"

    @property
    def strange(self) -> str:
        """What a sentence says about the first weight that is none of the reference."""
        for name, why in self.carried.strange.items():
            return f"the weight {name} is none of the reference: {why}"
        return ""


def rounding_of(graph: Any, reference: Reference) -> Rounding:
    """Return how a graph is compared whose weights are rounded. Raise NotUnrounded if its float32
    form is not known, or the reference cannot get its weights.
    """
    form = graph.unrounded()
    if reference.model is None:
        raise NotUnrounded("the weights of the reference cannot be exchanged")
    known = carried(form.weights, form.numbers, reference.model)
    other = reference.changed(lambda model: known.into(copy.deepcopy(model)))
    return Rounding(graph.rounded, reference, other, form, known)


def accuracy_of(precision: str, exact: float) -> Accuracy:
    """Return the accuracy of a graph in a precision. exact: tolerance in float32."""
    if precision == "few bits":
        return Accuracy(numerics.LIMIT, numerics.LIMIT)
    noise = NOISE.get(precision, 0.0)
    return Accuracy(numerics.rounding_tolerance(noise), noise) if noise else Accuracy(exact)


@dataclass(frozen=True)
class Loss:
    """What rounding costs. Of outputs that are no logits, the last two are None."""

    format: str  # of the weights, such as "8 bits"
    error: float  # largest error of a full pass of rows, relative to the largest output
    activations: float  # part of it that is not due to weights: largest error in all cells
    cosine: float  # of the outputs of a token with the reference's, and of the means of rows
    lowest: float  # the lowest of them
    # Kullback-Leibler divergence of the probabilities of the next token, in nats, on average: its
    # exponential is the factor of the perplexity of text that the reference would write.
    divergence: float | None = None
    agreement: float | None = None  # part of tokens whose most probable next token is the same

    def __str__(self) -> str:
        if self.divergence is None or self.agreement is None:
            said = f"cosine {self.cosine:.5f} with the reference, the lowest {self.lowest:.5f}"
        else:
            factor = float(np.exp(self.divergence))
            said = f"perplexity times {factor:.4f} (divergence {self.divergence:.2g} nats)"
            said += f", the same most probable token at {self.agreement:.1%} of the tokens"
        return f"{said}, errors of at most {self.error:.1e} of the largest output"


def loss(
    actual: np.ndarray, expected: np.ndarray, logits: bool, kind: str, activations: float
) -> Loss:
    """Return the loss of outputs [B,L,V] against those of the reference.

    Args:
        logits: whether they are logits.
        kind, activations: Loss.format and Loss.activations.
    """
    own, right = actual.astype(np.float64), expected.astype(np.float64)
    of_rows = (_cosines(own.mean(1), right.mean(1)) if not logits else np.zeros(0),)
    cosines = np.concatenate((_cosines(own, right).ravel(), *of_rows))
    cosine, lowest = float(cosines.mean()), float(cosines.min())
    error = numerics.worst_error(own, right)
    if not logits:
        return Loss(kind, error, activations, cosine, lowest)
    p, q = _log_softmax(right), _log_softmax(own)
    divergence = float((np.exp(p) * (p - q)).sum(-1).mean())
    same = float((own.argmax(-1) == right.argmax(-1)).mean())
    return Loss(kind, error, activations, cosine, lowest, divergence, same)


def _log_softmax(logits: np.ndarray) -> np.ndarray:
    shifted = logits - logits.max(-1, keepdims=True)
    return np.asarray(shifted - np.log(np.exp(shifted).sum(-1, keepdims=True)))


def _cosines(x: np.ndarray, y: np.ndarray) -> np.ndarray:
    sizes = np.linalg.norm(x, axis=-1) * np.linalg.norm(y, axis=-1)
    return np.asarray((x * y).sum(-1) / np.where(sizes > 0, sizes, 1))
