"""What the parity grid expects of an artefact, what is measured, and the certificate of both.

Expected outputs come from the reference file of the artefact or from the live module; measuring.py
compares either with the artefact's outputs.

Shapes: L tokens of a sequence, V numbers of an output.
"""

import math
from contextlib import suppress
from dataclasses import dataclass, field, replace
from importlib import metadata
from typing import Any, Dict, Optional, Tuple, Union, cast

import msgspec
import numpy as np

from posenc_export.runtime.artefact import machine
from posenc_export.runtime.artefact.certificate import FAILED, Check, Proof, passes
from posenc_export.runtime.artefact.records import Reference
from posenc_export.runtime.session.model import Model
from posenc_export.runtime.session.session import Session
from posenc_export.runtime.verification.case import AttributeCase, Case
from posenc_export.runtime.verification.grid_inputs import LongSequence
from posenc_export.shared.numerics import LIMIT
from posenc_export.shared.refusal import refusal


@dataclass(frozen=True)
class Accuracy:
    """How far the outputs of a correct artefact may be from those of its module."""

    # Bound of the error of a cell (numerics.cell_error) that is compared with the module.
    tolerance: float
    # Root mean square error of one rounded product, relative to it (numerics.rounding_tolerance); 0
    # if activations are not rounded.
    noise: float = 0.0
    float32: float = 0.0  # tolerance of the float32 form of the artefact; 0 if it has none
    fixed: bool = False  # whether the user gave the tolerance, which then does not grow

    @property
    def rounds(self) -> bool:
        """Whether activations are rounded."""
        return self.noise > 0

    @property
    def stated(self) -> float:
        """The tolerance that a certificate states: that of the float32 form, if there is one."""
        return self.float32 or self.tolerance

    def with_stated(self, tolerance: float) -> "Accuracy":
        """Return the accuracy with another stated tolerance."""
        if self.float32:
            return replace(self, float32=tolerance)
        return replace(self, tolerance=tolerance)


def accuracy_on(provider: str, reference: Reference, tolerance: Optional[float] = None) -> Accuracy:
    """Return the accuracy of an artefact on a provider, for a certificate. tolerance: given by the
    user (`check_tolerance`): of the float32 form of an artefact that rounds, or of the provider's
    outputs if that is not the CPU; None for that of the export. Raise ValueError if that is above
    numerics.LIMIT.
    """
    accuracy = default_accuracy(reference)
    if tolerance is not None:
        if provider == "cpu":
            return accuracy.with_stated(tolerance)
        return replace(accuracy, tolerance=tolerance)
    if (bound := max(accuracy.tolerance, accuracy.float32)) > LIMIT:
        rule, got = f"an artefact with a tolerance of at most {LIMIT}", f"{bound:.2g}"
        raise refusal("verify", rule, got, f"export it again, or give tolerance {bound:.2g}")
    return accuracy


def default_accuracy(reference: Reference) -> Accuracy:
    """Return the accuracy with the tolerance of the export, however large."""
    return Accuracy(reference.tolerance, reference.noise, reference.float32)


def check_tolerance(tolerance: Optional[float]) -> None:
    """Raise ValueError unless a given tolerance is within 0 .. 1: zeros have an error of 1."""
    if tolerance is not None and not 0 < tolerance < 1:
        rule = "tolerance to be above 0 and below 1"
        raise refusal("verify", rule, tolerance, "omit it for the default")


@dataclass(frozen=True)
class Expected:
    """Inputs and expected outputs of the parity grid.

    Raises:
        ValueError: an expected output is not finite.
    """

    columns: np.ndarray  # indices of the compared numbers of an output [V]
    cases: Dict[int, Case]  # by start position, for the larger of grid_inputs.BATCHES
    # By name of a cell, inputs and expected outputs [2,L,V], if the encoding has coordinates or the
    # model has segments
    attribute_cases: Dict[str, Tuple[AttributeCase, np.ndarray]]
    long: Optional[LongSequence]  # the long sequence; None if it is not run
    # The same for the second output; empty if there is none
    readout_columns: np.ndarray = field(default_factory=lambda: np.arange(0))

    def __post_init__(self) -> None:
        outputs = {name: [full] for name, (_, full) in self.attribute_cases.items()}
        for start, case in self.cases.items():
            outputs[f"start {start}"] = [case.full, case.other_full]
            if case.readout is not None:
                outputs[f"readout, start {start}"] = [case.readout]
        if self.long is not None:
            outputs["the long sequence"] = [self.long.outputs]
        for name, arrays in outputs.items():
            if not all(np.isfinite(array).all() for array in arrays):
                rule, got = "finite outputs of the module", f"NaN or infinity for '{name}'"
                raise refusal("verify", rule, got, "check its weights, or export again")


@dataclass
class Measured:
    """Errors of the grid by name of a cell, and the checks beside the grid by name."""

    cells: Dict[str, float] = field(default_factory=dict)  # numerics.cell_error
    # Tolerance of the cells whose tolerance is not that of the artefact.
    bounds: Dict[str, float] = field(default_factory=dict)
    failures: Dict[str, str] = field(default_factory=dict)  # message of the graph that failed
    checks: Dict[str, Check] = field(default_factory=dict)
    unreached: Dict[str, str] = field(default_factory=dict)  # edges without a cell, with the reason

    def joined(self, other: "Measured") -> "Measured":
        """Return these errors and those of other cells, checks and edges."""
        pairs = zip(vars(self).values(), vars(other).values(), strict=True)
        return Measured(*({**own, **others} for own, others in pairs))

    def named(self, prefix: str) -> "Measured":
        """Return the same figures with a prefix before the name of each cell."""
        cells = {prefix + name: error for name, error in self.cells.items()}
        bounds = {prefix + name: bound for name, bound in self.bounds.items()}
        failures = {prefix + name: message for name, message in self.failures.items()}
        return replace(self, cells=cells, bounds=bounds, failures=failures)

    def exceeds(self, tolerance: float) -> bool:
        """Whether a cell exceeds its tolerance: `tolerance`, or its own in `bounds`."""
        bounds = {name: self.bounds.get(name, tolerance) for name in self.cells}
        return any(not error <= bounds[name] for name, error in self.cells.items())


def rounded_up(error: float) -> float:
    """Round an error up to two digits, by at most 10 percent; FAILED if it is not finite."""
    if not math.isfinite(error):
        return FAILED
    return float(f"{1.05 * error:.1e}")


def certificate(
    ran: Union[Session, Model], accuracy: Accuracy, measured: Measured, quick: bool = False
) -> Proof:
    """Return what was measured as a certificate of the manifest (artefact.certificate)."""
    content: Dict[str, Any] = {
        "tolerance": accuracy.stated,
        "provider": ran.provider,
        "machine": machine_of(ran),
        "cells": measured.cells,
        "bounds": measured.bounds,
        "failures": measured.failures,
        "unreached": measured.unreached,
        "grid": "quick" if quick else "whole",
        "checks": msgspec.to_builtins(measured.checks),
    }
    return cast(Proof, {"passed": passes(content), **content})


def machine_of(ran: Union[Session, Model]) -> str:
    """Return the name of the processor or GPU, and the library of the graph with its version."""
    distribution = "torch" if ran.manifest.in_torch else "onnxruntime"
    device = machine.gpu() if ran.provider == "cuda" else machine.processor()
    described = f"{device}, {distribution}"
    for name in (distribution, f"{distribution}-gpu", f"{distribution}-webgpu"):
        with suppress(metadata.PackageNotFoundError):
            return f"{described} {metadata.version(name).partition('+')[0]}"
    return described
