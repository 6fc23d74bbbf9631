"""Structure and rounding of a graph, apart: its float32 form, the reference of the same numbers,
and what the rounding costs.

Shapes: B rows, L tokens, V numbers of an output.
"""

import copy
from dataclasses import dataclass, field
from typing import Any, Optional

import numpy as np

from posenc_export.auditing.carrying import Carried, carried
from posenc_export.auditing.facts import Reference
from posenc_export.auditing.inputs import NotUnrounded
from posenc_export.runtime.verification.proof import Accuracy
from posenc_export.shared import numerics

NOISE = {"float16": numerics.FLOAT16_NOISE, "bfloat16": numerics.BFLOAT16_NOISE}


@dataclass
class Rounding:
    """How a graph whose weights are rounded is compared."""

    format: str  # of its weights, such as "8 bits"
    original: Reference
    reference: Reference  # with the numbers of the graph
    form: Any = None  # the float32 form, as Graph; None if it is not known
    reason: str = ""  # why it is not
    carried: Carried = field(default_factory=Carried)

    @property
    def compared(self) -> str:
        """The precision in which the form is compared: that of constants that remain rounded."""
        return numerics_of(self.format) if self.carried.kept else "float32"

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


def numerics_of(kind: str) -> str:
    """Return the precision of a graph whose weights have a format."""
    return "few bits" if kind.endswith("bits") else kind


def rounding_of(graph: Any, reference: Reference) -> Rounding:
    """Return how a graph is compared whose weights are rounded."""
    result = Rounding(graph.rounded, reference, reference)
    try:
        form = graph.unrounded()
    except NotUnrounded as reason:
        result.reason = str(reason)
        return result
    if reference.model is None:
        result.reason = "the weights of the reference cannot be exchanged"
        return result
    known = carried(form.weights, form.numbers, reference.model)
    result.form, result.carried = form, known
    result.reference = reference.changed(lambda model: known.into(copy.deepcopy(model)))
    return result


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
    divergence: Optional[float] = None
    agreement: Optional[float] = None  # part of tokens whose most probable next token is the same

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
    p, q = _logarithms(right), _logarithms(own)
    divergence = float((np.exp(p) * (p - q)).sum(-1).mean())
    same = float((own.argmax(-1) == right.argmax(-1)).mean())
    return Loss(kind, error, activations, cosine, lowest, divergence, same)


def _cosines(x: np.ndarray, y: np.ndarray) -> np.ndarray:
    sizes = np.linalg.norm(x, axis=-1) * np.linalg.norm(y, axis=-1)
    return np.asarray((x * y).sum(-1) / np.where(sizes > 0, sizes, 1))


def _logarithms(logits: np.ndarray) -> np.ndarray:
    shifted = logits - logits.max(-1, keepdims=True)
    return np.asarray(shifted - np.log(np.exp(shifted).sum(-1, keepdims=True)))
