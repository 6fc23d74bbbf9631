"""The expected outputs of the parity grid, the reference file that stores them, and the certificate
of measured errors.

The file only has float32 numbers: grid_inputs.py generates inputs from names, and shapes are those
of the manifest. An export takes the same outputs from the live module.

Shapes: L tokens of a sequence, V numbers of an output.
"""

import math
from contextlib import suppress
from dataclasses import dataclass, field, replace
from importlib import metadata
from pathlib import Path
from typing import Any, Mapping, cast

import msgspec
import numpy as np

from posenc_export.runtime.artefact import certificate as certificates
from posenc_export.runtime.artefact import machine
from posenc_export.runtime.artefact.manifest import Manifest
from posenc_export.runtime.artefact.records import Reference
from posenc_export.runtime.session.model import Model
from posenc_export.runtime.session.session import Session
from posenc_export.runtime.verification import grid_inputs
from posenc_export.runtime.verification.grid_inputs import LongSequence
from posenc_export.runtime.verification.scenarios import AttributeCase, Case
from posenc_export.shared.numerics import LIMIT
from posenc_export.shared.refusal import refusal, short_repr

FILE_NAME = "reference.bin"
CHOICES = {"TopK", "ArgMax"}  # operators whose outputs a small change of inputs may exchange
LARGEST = 1_000_000  # limit of the file's size in bytes


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
        """Return the accuracy with another stated tolerance, which as exported is no smaller."""
        if self.float32:
            return replace(self, float32=tolerance, tolerance=max(tolerance, self.tolerance))
        return replace(self, tolerance=tolerance)


def accuracy_on(provider: str, reference: Reference, tolerance: float | None = None) -> Accuracy:
    """Return the accuracy of an artefact on a provider, for a certificate. tolerance: a bound that
    the user gives (`check_tolerance`), on the CPU for the float32 form of an artefact that rounds,
    otherwise for the outputs; None for that of the export. Raise ValueError if that is above
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


def as_exported(accuracy: Accuracy, ran: Session | Model) -> Accuracy:
    """Return the accuracy of an artefact as exported. On the CPU, outputs of activations or caches
    in few bits only have to be finite: the kernels that round them have contracts (conformance/).
    So do those of experts, which only ort-cuda has in half precision: an input that is rounded may
    choose other ones.
    """
    manifest = ran.manifest
    chooses = manifest.target == "ort-cuda" and not CHOICES.isdisjoint(manifest.operators)
    few = ran.provider == "cpu" and (manifest.dtype == "float32" or chooses)
    return Accuracy(certificates.FINITE) if few else accuracy


def check_tolerance(tolerance: float | None) -> None:
    """Raise ValueError unless a given tolerance is above 0 and below 1, the error of zeros."""
    if tolerance is not None and not (isinstance(tolerance, (int, float)) and 0 < tolerance < 1):
        rule = "tolerance to be above 0 and below 1"
        raise refusal("verify", rule, short_repr(tolerance), "omit it for the default")


@dataclass(frozen=True)
class Expected:
    """Inputs and expected outputs of the parity grid.

    Raises:
        ValueError: an expected output is not finite.
    """

    columns: np.ndarray  # indices of the compared numbers of an output [V]
    case: Case  # with the larger number of rows of grid_inputs.BATCHES, at different starts
    # By name of a cell, inputs and expected outputs [2,L,V], if the encoding has coordinates or the
    # model has segments
    attribute_cases: dict[str, tuple[AttributeCase, np.ndarray]]
    long: LongSequence | None  # the long sequence; None if it is not run
    # Indices of the compared numbers of the second output; empty if there is none
    readout_columns: np.ndarray = field(default_factory=lambda: np.arange(0))

    def __post_init__(self) -> None:
        outputs = {name: [full] for name, (_, full) in self.attribute_cases.items()}
        outputs["rows of tokens"] = [self.case.full, self.case.other_full]
        if self.case.readout is not None:
            outputs["readout"] = [self.case.readout]
        if self.long is not None:
            outputs["the long sequence"] = [self.long.outputs]
        for name, arrays in outputs.items():
            if not all(np.isfinite(array).all() for array in arrays):
                rule, got = "finite outputs of the module", f"NaN or infinity for '{name}'"
                raise refusal("verify", rule, got, "check its weights, or export again")


@dataclass
class Measured:
    """Errors of the grid by name of a cell, and the checks beside the grid by name."""

    cells: dict[str, float] = field(default_factory=dict)  # numerics.cell_error
    failures: dict[str, str] = field(default_factory=dict)  # message of the graph that failed
    checks: dict[str, certificates.Check] = field(default_factory=dict)
    unreached: dict[str, str] = field(default_factory=dict)  # edges without a cell, with the reason

    def joined(self, other: "Measured") -> "Measured":
        """Return these errors and those of other cells, checks and edges."""
        pairs = zip(vars(self).values(), vars(other).values(), strict=True)
        return Measured(*({**own, **others} for own, others in pairs))

    def named(self, prefix: str) -> "Measured":
        """Return the same figures with a prefix before the name of each cell."""
        by_cell = {name: vars(self)[name] for name in ("cells", "failures")}
        prefixed = {k: {prefix + n: v for n, v in part.items()} for k, part in by_cell.items()}
        return replace(self, **prefixed)

    def exceeds(self, tolerance: float) -> bool:
        """Whether a cell exceeds a tolerance."""
        return any(not error <= tolerance for error in self.cells.values())


def rounded_up(error: float) -> float:
    """Round an error up to two digits, by at most 10 percent; FAILED if it is not finite."""
    if not math.isfinite(error):
        return certificates.FAILED
    return float(f"{1.05 * error:.1e}")


def certificate(
    ran: Session | Model, accuracy: Accuracy, measured: Measured, quick: bool = False
) -> certificates.Proof:
    """Return what was measured as a certificate of the manifest (artefact.certificate)."""
    exported = [name for name in measured.cells if name.startswith(certificates.EXPORTED)]
    content: dict[str, Any] = {
        "tolerance": accuracy.stated,
        "provider": ran.provider,
        "machine": machine_of(ran),
        "cells": measured.cells,
        "bounds": dict.fromkeys(exported, as_exported(accuracy, ran).tolerance),
        "failures": measured.failures,
        "unreached": measured.unreached,
        "grid": "quick" if quick else "whole",
        "checks": msgspec.to_builtins(measured.checks),
    }
    return cast(certificates.Proof, {"passed": certificates.passes(content), **content})


def machine_of(ran: Session | Model) -> str:
    """Return the names of the processor or GPU, and of the library that ran, with its version."""
    distribution = "torch" if ran.manifest.in_torch else "onnxruntime"
    device = machine.gpu() if ran.provider == "cuda" else machine.processor()
    described = f"{device}, {distribution}"
    for name in (distribution, f"{distribution}-gpu"):
        with suppress(metadata.PackageNotFoundError):
            return f"{described} {metadata.version(name).partition('+')[0]}"
    return described


def write(manifest: Manifest, expected: Expected, accuracy: Accuracy, folder: Path) -> Reference:
    """Write the reference file to a folder, with as many numbers of expected outputs as fit."""
    case, long = expected.case, expected.long
    parts = [case.full, case.other_full[:, case.fork_at :]]
    parts += [full for _, full in expected.attribute_cases.values()]
    if long is not None:
        stored = np.isin(long.compared, _places(manifest, long.edges))
        parts.append(long.outputs[:, stored])
    parts += [] if case.readout is None else [case.readout]
    layout = _layout(manifest, None if long is None else long.edges)
    pairs = zip(parts, layout, strict=True)
    content = b"".join(part[..., columns].astype("<f4").tobytes() for part, (_, columns) in pairs)
    (folder / FILE_NAME).write_bytes(content)
    edges, columns = {} if long is None else dict(long.edges), len(layout[0][1])
    return Reference(
        columns, accuracy.tolerance, long is not None, accuracy.noise, accuracy.float32, edges
    )


def read(manifest: Manifest, folder: Path) -> Expected:
    """Read the reference file of an artefact whose files were checked. Raise ValueError if there is
    none, or if it has another size or numbers that are not finite.
    """
    if manifest.reference is None or FILE_NAME not in manifest.files:
        remedy = "verify it against its module, or export again"
        raise refusal(f"artefact {folder}", "a reference", "none", remedy)
    edges = manifest.reference.edges if manifest.reference.filled else None
    layout = _layout(manifest, edges)
    ends = np.cumsum([math.prod(shape) * len(columns) for shape, columns in layout])
    size = (folder / FILE_NAME).stat().st_size
    if size != 4 * ends[-1]:
        rule = f"expected {FILE_NAME} with {4 * ends[-1]} bytes"
        raise ValueError(f"artefact {folder}: {rule}, got {size}; export again")
    split = np.split(np.fromfile(folder / FILE_NAME, "<f4"), ends[:-1])
    pairs = zip(split, layout, strict=True)
    parts = iter([part.reshape(*shape, len(columns)) for part, (shape, columns) in pairs])
    tokens, other, fork_at = grid_inputs.case_inputs(manifest)
    full, ending = next(parts), next(parts)
    other_full = np.concatenate((full[:, :fork_at], ending), axis=1)
    inputs = grid_inputs.attribute_inputs(manifest).items()
    attribute_cases, long = {name: (case, next(parts)) for name, case in inputs}, None
    if edges is not None:
        whole = grid_inputs.tokens_of(manifest, grid_inputs.length_for(manifest, edges))
        long = LongSequence(whole, _places(manifest, edges), next(parts), edges)
    starts, encoder = grid_inputs.starts(manifest), grid_inputs.encoder_rows(manifest, len(tokens))
    readout = next(parts, None)
    case = Case(tokens, full, starts, fork_at, other, other_full, encoder, readout)
    return Expected(layout[0][1], case, attribute_cases, long, layout[-1][1])


def _layout(
    manifest: Manifest, edges: Mapping[str, int] | None
) -> list[tuple[tuple[int, ...], np.ndarray]]:
    """Return for each stored part its shape without the last axis, and the indices of the stored
    numbers of an output: all, or a pseudo-random selection, so that the file has at most LARGEST
    bytes. edges: None without a long sequence.
    """
    length, rows = grid_inputs.length_of(manifest), max(grid_inputs.BATCHES)
    shapes: list[tuple[int, ...]] = [(rows, length), (rows, length - length // 2)]
    shapes += [(2, length)] * len(grid_inputs.attribute_inputs(manifest))
    shapes += [] if edges is None else [(1, len(_places(manifest, edges)))]
    layout: list[tuple[tuple[int, ...], np.ndarray]] = []
    for value in manifest.outputs:
        parts = [(rows, length)[: len(value.axes) - 1]] if layout else shapes
        count = max(1, LARGEST // (4 * sum(map(math.prod, parts))))
        order = grid_inputs.numbers((int(value.axes[-1]),), "columns", 2**31)
        drawn = np.sort(np.argsort(order, kind="stable")[:count])
        layout += [(shape, drawn) for shape in parts]
    return layout


def _places(manifest: Manifest, edges: Mapping[str, int]) -> np.ndarray:
    return grid_inputs.places(edges, grid_inputs.length_for(manifest, edges))
