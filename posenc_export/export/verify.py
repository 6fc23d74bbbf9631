"""Verify an artefact: compare it with the eager module on the grid of scenarios, and the eager
module with the float64 oracle.
"""

from pathlib import Path
from typing import Any, Mapping

import msgspec
import torch

from posenc_export.export import numbers
from posenc_export.export.describe import Model
from posenc_export.export.expected import conditioned, expected_outputs, oracle_cells
from posenc_export.export.options import ExportOptions
from posenc_export.export.quantization import samples
from posenc_export.export.quantization.formats import format_of
from posenc_export.export.quantization.samples import Sample, default_sample
from posenc_export.export.read_module import ReadModule, read_again
from posenc_export.export.sources import Sources, in_dtype
from posenc_export.export.trace import Source
from posenc_export.models.config_json import from_json, to_json
from posenc_export.models.presets import rebuild
from posenc_export.models.whole_pass import foreign_encodings
from posenc_export.runtime import load
from posenc_export.runtime.artefact import manifest as manifests
from posenc_export.runtime.artefact.certificate import (
    Check,
    bound_of,
    failed_checks,
    format_cell,
    worst_cell,
)
from posenc_export.runtime.artefact.manifest import Calibration, Manifest
from posenc_export.runtime.session.model import Model as Loaded
from posenc_export.runtime.verification import checks, measuring, proof
from posenc_export.runtime.verification.float32_form import load_form
from posenc_export.runtime.verification.grid_inputs import grid_of
from posenc_export.runtime.verification.proof import Accuracy, Expected
from posenc_export.runtime.verification.proof import certificate as certificate_of
from posenc_export.shared.progress import Progress, silent
from posenc_export.shared.refusal import refusal


class VerificationError(Exception):
    """Raised when an artefact does not agree with its module.

    Attributes:
        certificate: the measured errors, in the form of the manifest.
    """

    certificate: dict[str, Any]


def failure(certificate: dict[str, Any], own: Mapping[str, str]) -> str:
    """Return what a certificate shows to be wrong: the first failed check, or the worst cell, and
    the first that failed. own: class names of encodings from outside the package, by name; if the
    worst cell compares with an oracle, they are named.
    """
    for name, reason in failed_checks(certificate).items():
        return f"expected check '{name}' to pass, got {reason}; do not deploy"
    cells = certificate["cells"].items()
    failed = [name for name, error in cells if not error <= bound_of(certificate, name)]
    worst = worst_cell(certificate)
    more = f", the worst of {len(failed)} cells from '{failed[0]}' on" if len(failed) > 1 else ""
    got = f"{format_cell(certificate, worst)} at '{worst}'{more}"
    remedy = "do not deploy"
    if own and "oracle" in worst:
        classes = " and ".join(own.values())
        remedy += f": encoding {' or '.join(own)} disagrees with its oracle; "
        remedy += f"run posenc_export.testing.check_encoding on {classes}"
    return f"expected errors within {bound_of(certificate, worst):.1e}, got {got}; {remedy}"


def verify(
    folder: str | Path,
    model: Model | torch.nn.Module | None = None,
    progress: Progress | None = None,
    provider: str = "cpu",
    calibrate: str | Path | None = None,
    tolerance: float | None = None,
) -> dict[str, Any]:
    """Compare an artefact with its module and the module with its oracle; write the certificate
    into the manifest and return it.

    On a machine without the module or torch, use posenc_export.runtime.verify.

    Args:
        model: the float32 module that was exported; may be omitted for presets and seeded models.
        progress: called with one line of text at each stage.
        provider: as for runtime.load.
        calibrate: file with the calibration data of the export, if the weights were rounded with
            it.
        tolerance: as for runtime.verify.

    Returns:
        {"passed", "tolerance", "provider", "machine", "cells": {name: error}, "bounds", "failures",
        "grid", "unreached", "against": reference of the module} (artefact.certificate).

    Raises:
        ValueError: the folder is not an artefact, the model has another description, the
            calibration data is missing or differs, or the tolerance of the export is above 0.1 and
            `tolerance` is not given.
    """
    folder, say = Path(folder), progress or silent
    proof.check_tolerance(tolerance)
    loaded = load(folder, provider, threads=1)
    manifest = loaded.manifest
    module: Model
    if model is None:
        module = rebuild(from_json(manifest.config), manifest.source, manifest.packages)
    else:
        module = read_again(model, manifest.config)
    if to_json(module.config) != manifest.config:
        rule = f"the model that was exported to {folder}"
        raise refusal("verify", rule, "one with another config", "pass that model")
    if manifest.reference is None:
        rule = "an artefact with a reference"
        raise refusal("verify", rule, f"none in {folder}", "export it again")
    source = _source(module, manifest, calibrate, say)
    accuracy = proof.accuracy_on(loaded.provider, manifest.reference, tolerance)
    expected = expected_outputs(source.exact, manifest, say=say)
    measured = measuring.measured(loaded, folder, expected, accuracy, say)
    measured.checks |= checks.of_artefact(folder, loaded, say, _known(source))
    exact = oracle_cells(source.exact, manifest, expected)
    certificate = _certificate(loaded, source.exact, accuracy, measured, exact)
    manifests.write(manifest.replace(certificate=certificate), folder)
    return certificate


def _source(
    model: Model, manifest: Manifest, calibrate: str | Path | None, say: Progress
) -> Source:
    """Return a float32 model in the dtype of an artefact, with weights rounded as there."""
    if manifest.weights is None:
        return Sources(model).of(manifest.dtype)
    name, described, sample = manifest.weights.format, manifest.calibration, None
    if described is not None and format_of(name).calibrated:
        sample = _sample(described, in_dtype(model, "float32"), calibrate)
    formats = manifest.formats or None
    return Sources(model).of(manifest.dtype, name, sample, formats=formats, say=say)


def _sample(described: Calibration, model: Model, calibrate: str | Path | None) -> Sample:
    """Return the calibration data of the export. Raise ValueError without it or for another."""
    wanted = described.sha256
    sample = default_sample(model) if calibrate is None else samples.read(calibrate, model)
    if sample is None or sample.sha256 != wanted:
        got = "none" if sample is None or calibrate is None else f"one with {sample.sha256}"
        rule = f"the calibration data of the export, sha256 {wanted}"
        raise refusal("verify", rule, got, "give its file as calibrate, --calibrate FILE")
    return sample.kept(described.tokens)


def check_written(
    folder: Path,
    source: Source,
    manifest: Manifest,
    expected: Expected,
    compared: Check,
    accuracy: Accuracy,
    options: ExportOptions,
) -> Manifest:
    """Verify a new artefact, and return its manifest with the certificate and the tolerance that it
    was held to. compared: its constants with the module; accuracy: of a correct artefact.

    No provider of the CPU computes in bfloat16. An artefact in bfloat16 has no certificate: its
    float32 form is verified, and rounds to bfloat16 where the file casts to it in place of the
    artefact as exported.

    Raises:
        VerificationError: a cell exceeds the tolerance.
    """
    model, say = source.exact, options.say
    say(f"{manifest.target}: comparing the module with its formula")
    # Before the graph is loaded, so that its weights and the float64 head are not in memory
    # together.
    key = ("oracle", *grid_of(manifest))
    exact = source.once(key, lambda: oracle_cells(model, manifest, expected, say))
    known = {"numbers": compared, **_known(source)}
    runs = manifest.dtype != "bfloat16"
    # With one thread per operator, so that certificates repeat their figures.
    loaded = load(folder, "cpu", threads=1) if runs else load_form(folder, manifest, 1, True)
    measured = measuring.measured(loaded, folder, expected, accuracy, say, quick=options.quick)
    measured.checks |= checks.of_artefact(folder, loaded, say, known) if runs else known
    certificate = _certificate(loaded, model, accuracy, measured, exact, options.quick)
    if not (certificate["passed"] or failed_checks(certificate)):
        accuracy = conditioned(accuracy, source, expected)
        certificate = _certificate(loaded, model, accuracy, measured, exact, options.quick)
    if not certificate["passed"]:
        outside = {one.built[0]: type(one).__name__ for one in foreign_encodings(model)}
        error = VerificationError(f"verify: {failure(certificate, outside)}")
        error.certificate = certificate
        raise error
    assert manifest.reference is not None
    bounds = {"tolerance": accuracy.tolerance, "float32": accuracy.float32}
    reference = msgspec.structs.replace(manifest.reference, **bounds)
    return manifest.replace(reference=reference, certificate=certificate if runs else None)


def _known(source: Source) -> dict[str, Check]:
    """Return the checks that need the module, besides that of its numbers."""
    return {"tables": source.once(("tables",), lambda: numbers.compare_tables(source.model))}


def _certificate(
    ran: Loaded,
    model: Model,
    accuracy: Accuracy,
    measured: proof.Measured,
    exact: dict[str, float],
    quick: bool = False,
) -> dict[str, Any]:
    """Return the certificate with the cells of the artefact and those of the oracle, and what the
    oracle is.
    """
    measured.cells |= exact
    content = certificate_of(ran, accuracy, measured, quick)
    read = isinstance(model, ReadModule)
    own = "the module itself in float64 on whole sequences" if read else "its formula in float64"
    return {**content, "against": own}
