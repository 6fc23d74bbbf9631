"""Cases of the parity grid, and the container for their expected outputs. Needs numpy and a
manifest, no torch.

Inputs are generated from names (inputs.py). Expected outputs come from the reference file of the
artefact or from the live module; measuring.py compares either with the artefact's outputs.

Shapes: B batch, L tokens of a sequence, V numbers of an output.
"""

import math
from contextlib import suppress
from dataclasses import dataclass, field, replace
from importlib import metadata
from typing import Any, Dict, List, Optional, Tuple, Union, cast

import msgspec
import numpy as np

from posenc_export.runtime.artefact import machine
from posenc_export.runtime.artefact.certificate import FAILED, Check, Proof, passes
from posenc_export.runtime.artefact.manifest import Manifest
from posenc_export.runtime.artefact.schema import Reference
from posenc_export.runtime.graphs import providers
from posenc_export.runtime.session.model import Model
from posenc_export.runtime.session.session import Session
from posenc_export.runtime.verification.inputs import inputs, numbers
from posenc_export.runtime.verification.long_sequence import LongSequence, fill_chunk, fill_length
from posenc_export.runtime.verification.scenarios import Case
from posenc_export.shared.numerics import LIMIT, rounding_tolerance

BATCHES = (1, 3)
# Tokens per row: enough for every way of splitting a sequence, few enough for the element-wise
# oracle.
LENGTH = 36
# Weights that a token reads from which on the grid has fewer cells; the full grid would take
# minutes.
LARGE = 1 << 26
SEGMENT_PADDING = 3  # columns of left padding in the first row


@dataclass(frozen=True)
class Accuracy:
    """How far the outputs of a correct artefact may be from those of its module."""

    tolerance: (
        float  # bound of the error of a cell (numerics.cell_error) that is compared with the module
    )
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
    """Return the accuracy of an artefact on a provider, for a certificate.

    Args:
        reference: of the artefact.
        tolerance: bound given by the user: of the float32 form of an artefact that rounds
            activations, or of the provider's outputs if that is not the CPU; None for that of the
            export.

    Raises:
        ValueError: a given tolerance outside 0 .. 1, or one of the export above numerics.LIMIT that
            is not given again.
    """
    check_tolerance(tolerance)
    accuracy = default_accuracy(provider, reference)
    if tolerance is not None:
        if provider == "cpu":
            return accuracy.with_stated(tolerance)
        return replace(accuracy, tolerance=tolerance)
    if (bound := max(accuracy.tolerance, accuracy.float32)) > LIMIT:
        raise ValueError(
            f"verify: expected an artefact with a tolerance of at most {LIMIT}, got "
            f"{bound:.2g}; export it again, or give tolerance {bound:.2g}"
        )
    return accuracy


def default_accuracy(provider: str, reference: Reference) -> Accuracy:
    """Return the accuracy of an artefact on a provider, with the tolerance of the export however
    large it is.
    """
    added = providers.noise(provider)
    noise = math.hypot(reference.noise, added)
    return Accuracy(
        max(reference.tolerance, rounding_tolerance(noise)) if added else reference.tolerance,
        noise,
        reference.float32,
    )


def check_tolerance(tolerance: Optional[float]) -> None:
    """Raise ValueError unless a tolerance that the user gives is above 0 and below 1: outputs of
    zeros have an error of 1.
    """
    if tolerance is not None and not 0 < tolerance < 1:
        raise ValueError(
            f"verify: expected tolerance to be above 0 and below 1, got {tolerance}; omit it "
            "for the default"
        )


@dataclass(frozen=True)
class AttributeCase:
    """Tokens with attributes: coordinates, segments or both."""

    tokens: np.ndarray  # [2,L] or [2,L,E]
    mask: np.ndarray  # attention mask [2,L]; with segments, the first row has left padding
    attributes: Dict[
        str, np.ndarray
    ]  # arguments of Session.prefill: "grid" [axes,2,L], "token_types" [2,L] or both


@dataclass(frozen=True)
class Expected:
    """Inputs and expected outputs of the parity grid.

    Args:
        columns: indices of the compared numbers of an output [V].
        readout_columns: the same for the second output; empty if there is none.
        cases: by start position, for the larger of BATCHES.
        attribute_cases: by name of a cell, inputs and expected outputs [2,L,V], if the encoding has
            coordinates or the model has segments.
        long: the long sequence; None if it is not run.

    Raises:
        ValueError: an expected output is not finite.
    """

    columns: np.ndarray
    cases: Dict[int, Case]
    attribute_cases: Dict[str, Tuple[AttributeCase, np.ndarray]]
    long: Optional[LongSequence]
    readout_columns: np.ndarray = field(default_factory=lambda: np.arange(0))

    def __post_init__(self) -> None:
        outputs = {
            f"start {start}": [case.full, case.other_full] for start, case in self.cases.items()
        }
        outputs |= {
            f"readout, start {start}": [case.readout]
            for start, case in self.cases.items()
            if case.readout is not None
        }
        outputs |= {name: [full] for name, (_, full) in self.attribute_cases.items()}
        outputs |= {} if self.long is None else {"the long sequence": [self.long.outputs]}
        for name, arrays in outputs.items():
            if not all(np.isfinite(array).all() for array in arrays):
                raise ValueError(
                    "verify: expected finite outputs of the module, got NaN or infinity for "
                    f"'{name}'; check its weights, or export again"
                )


@dataclass
class Measured:
    """What was measured on an artefact: errors of the grid by name of a cell, and the checks
    beside the grid by name.
    """

    cells: Dict[str, float] = field(default_factory=dict)  # numerics.cell_error
    # Tolerance of the cells whose tolerance is not that of the artefact.
    bounds: Dict[str, float] = field(default_factory=dict)
    failures: Dict[str, str] = field(default_factory=dict)  # message of the graph that failed
    checks: Dict[str, Check] = field(default_factory=dict)
    unreached: Dict[str, str] = field(default_factory=dict)  # edges without a cell, with the reason

    def joined(self, other: "Measured") -> "Measured":
        """Return these errors and those of other cells, checks and edges."""
        return Measured(
            {**self.cells, **other.cells},
            {**self.bounds, **other.bounds},
            {**self.failures, **other.failures},
            {**self.checks, **other.checks},
            {**self.unreached, **other.unreached},
        )

    def named(self, prefix: str) -> "Measured":
        """Return the same figures with a prefix before the name of each cell."""
        return Measured(
            {f"{prefix}{name}": error for name, error in self.cells.items()},
            {f"{prefix}{name}": bound for name, bound in self.bounds.items()},
            {f"{prefix}{name}": message for name, message in self.failures.items()},
            self.checks,
            self.unreached,
        )

    def exceeds(self, tolerance: float) -> bool:
        """Whether a cell exceeds its tolerance, which is `tolerance` unless `bounds` has
        another.
        """
        return any(
            not error <= self.bounds.get(name, tolerance) for name, error in self.cells.items()
        )


def starts(manifest: Manifest) -> List[int]:
    """Return the start positions of the sequences: 0, one in the middle unless the model is
    large, and the last at which a sequence fits.
    """
    if manifest.signature == "mask":
        return [0]  # the graph counts positions from the mask
    last = manifest.max_positions - length_of(manifest)
    return sorted({0, last} if is_large(manifest) else {0, min(1000, last), last})


def is_large(manifest: Manifest) -> bool:
    """Whether the grid is reduced: shorter sequences, two start positions, batch 1 only at the
    first of them, fewer tokens in the full cache.
    """
    return manifest.step_weights >= LARGE


def length_of(manifest: Manifest) -> int:
    """Return the number of tokens of a sequence L."""
    return min(LENGTH // 2 if is_large(manifest) else LENGTH, manifest.max_positions)


def grid_of(manifest: Manifest) -> Tuple[Any, ...]:
    """Return what the inputs of the grid and their expected outputs depend on, besides the
    model.
    """
    return (
        manifest.signature,
        manifest.dtype,
        tuple(starts(manifest)),
        length_of(manifest),
        fill_length(manifest),
        fill_chunk(manifest),
    )


def case_inputs(manifest: Manifest) -> Tuple[np.ndarray, np.ndarray, int]:
    """Return tokens of a case [B,L], the same tokens with another ending, and the index where
    the endings begin.
    """
    length, rows = length_of(manifest), max(BATCHES)
    fork_at, tokens = length // 2, inputs(manifest, (rows, length), "tokens")
    other = tokens.copy()
    other[:, fork_at:] = inputs(manifest, (rows, length - fork_at), "another ending")
    return tokens, other, fork_at


def attribute_inputs(manifest: Manifest) -> Dict[str, AttributeCase]:
    """Return the inputs of the cells "coordinates" and "segments". If a model has both, the cell
    "segments" also has coordinates.
    """
    length, cells = length_of(manifest), {}
    tokens, whole = (
        inputs(manifest, (2, length), "tokens with numbers beside"),
        np.ones((2, length), np.int64),
    )
    grid = (
        {"grid": numbers((manifest.axes, 2, length), "coordinates", manifest.max_positions)}
        if manifest.axes
        else {}
    )
    if grid:
        cells["coordinates"] = AttributeCase(tokens, whole, grid)
    if manifest.segments:
        padded = whole.copy()
        padded[0, : min(SEGMENT_PADDING, length - 1)] = 0
        cells["segments"] = AttributeCase(
            tokens,
            padded,
            {**grid, "token_types": numbers((2, length), "segments", manifest.segments)},
        )
    return cells


def rounded_up(error: float) -> float:
    """Round an error up to two digits, by at most 10 percent, since a certificate states an
    upper bound. FAILED if the error is not finite.
    """
    if not math.isfinite(error):
        return FAILED
    return float(f"{1.05 * error:.1e}")


def certificate(
    ran: Union[Session, Model], accuracy: Accuracy, measured: Measured, quick: bool = False
) -> Proof:
    """Return a certificate in the form of the manifest (artefact.certificate).

    Args:
        ran: what was measured.
    """
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
    """Return the name of the processor or GPU, and the library that runs the graph with its
    version.
    """
    distribution = providers.distribution_of(ran.provider, ran.manifest)
    described = (
        f"{machine.gpu() if ran.provider == 'cuda' else machine.processor()}, {distribution}"
    )
    for name in (distribution, f"{distribution}-gpu", f"{distribution}-webgpu"):
        with suppress(metadata.PackageNotFoundError):
            return f"{described} {metadata.version(name).partition('+')[0]}"
    return described
