"""Measure an artefact: its float32 form, as exported, or a few cells when it is loaded."""

from dataclasses import replace
from pathlib import Path
from typing import Callable, Optional

from posenc_export.runtime.artefact.certificate import (
    EXPORTED,
    FINITE,
    FORM,
    Proof,
    bound_of,
    format_cell,
    worst_cell,
)
from posenc_export.runtime.session.model import Model
from posenc_export.runtime.verification import measuring, proof, reference
from posenc_export.runtime.verification.case import Level
from posenc_export.runtime.verification.grid_inputs import BATCHES, SHORT
from posenc_export.runtime.verification.proof import Accuracy, Expected, Measured


def measured(
    model: Model,
    folder: Path,
    expected: Expected,
    accuracy: Accuracy,
    progress: Callable[[str], None],
    threads: Optional[int] = 1,
    quick: bool = False,
) -> Measured:
    """Measure every cell of the float32 form, if the artefact has one, and of the artefact, from
    which `model` was loaded with these threads per operator. quick: run one scenario for each kind
    of call. Raise ValueError if the form cannot be loaded, ModuleNotFoundError without ONNX
    Runtime.
    """
    level = Level.QUICK if quick else Level.WHOLE
    if not accuracy.float32:
        session, *workers = measuring.sessions(model, threads)
        return measuring.measure(session, expected, accuracy, progress, workers, level=level)
    from posenc_export.runtime.verification.float32_form import load_form

    form = load_form(folder, model.manifest, threads)
    of_both = of_form(form, expected, accuracy, progress, threads, quick)
    del form  # and its memory
    progress(f"{model.manifest.target}: verifying as exported")
    limit = accuracy
    if model.provider == "cpu":
        limit, level = Accuracy(FINITE), Level.QUICK
    session, *workers = measuring.sessions(model, threads)
    exported = measuring.measure(session, expected, limit, progress, workers, level=level)
    exported.bounds = {name: limit.tolerance for name in exported.cells} | exported.bounds
    return of_both.joined(exported.named(EXPORTED))


def of_form(
    form: Model,
    expected: Expected,
    accuracy: Accuracy,
    progress: Callable[[str], None],
    threads: Optional[int] = 1,
    quick: bool = False,
) -> Measured:
    """Measure every cell of the float32 form of an artefact; see `measured`."""
    progress(f"{form.manifest.target}: verifying the float32 form")
    level, limit = Level.QUICK if quick else Level.WHOLE, Accuracy(accuracy.float32)
    session, *workers = measuring.sessions(form, threads)
    measured = measuring.measure(session, expected, limit, progress, workers, level=level)
    return measured.named(FORM)


def check_outputs(model: Model, folder: Path) -> None:
    """Raise ValueError unless a model that was loaded from `folder` gives, within the tolerance,
    the outputs of its reference on its provider. An artefact without a reference is not checked.
    """
    if model.manifest.reference is None:
        return
    proven = few_cells(model, folder)
    if not proven["passed"]:
        cell = worst_cell(proven)
        got = proven["failures"].get(cell) or f"an error of {format_cell(proven, cell)} in '{cell}'"
        bound = f"within {bound_of(proven, cell):.1e} of the reference of the artefact"
        rule = f"expected outputs of provider {model.provider} {bound}"
        raise ValueError(f"runtime: {rule}, got {got}; give provider cpu")


def few_cells(model: Model, folder: Path) -> Proof:
    """Measure the cells of Level.LOAD up to the first that exceeds its tolerance, and return them
    as a certificate does. Raise ValueError if the reference is missing or cannot be read.
    """
    manifest, expected = model.manifest, reference.read(model.manifest, folder)
    assert manifest.reference is not None  # checked by reference.read
    accuracy = replace(proof.default_accuracy(manifest.reference), float32=0.0)
    session = model.session(batch=max(BATCHES), capacity=min(manifest.max_positions, SHORT))
    measured = measuring.measure(
        session, expected, accuracy, lambda _: None, until_failure=True, level=Level.LOAD
    )
    return proof.certificate(session, accuracy, measured, quick=True)
