"""Measure the errors of an artefact: run the cells of the parity grid on a session of its graph, of
its float32 form if it rounds, or a few when it is loaded.
"""

from dataclasses import replace
from pathlib import Path
from typing import Dict, Optional

import numpy as np

from posenc_export.runtime.artefact.certificate import (
    EXPORTED,
    FINITE,
    FORM,
    bound_of,
    format_cell,
    worst_cell,
)
from posenc_export.runtime.session.errors import GraphError
from posenc_export.runtime.session.model import Model
from posenc_export.runtime.session.session import Session
from posenc_export.runtime.verification import grid_inputs, proof
from posenc_export.runtime.verification.cells import cells_of
from posenc_export.runtime.verification.proof import Accuracy, Expected, Measured
from posenc_export.runtime.verification.scenarios import Cell, Level
from posenc_export.shared.numerics import Errors, cell_error
from posenc_export.shared.progress import Progress, Steps, silent


def measured(
    model: Model,
    folder: Path,
    expected: Expected,
    accuracy: Accuracy,
    progress: Progress,
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
        return measure(_filled(model), expected, accuracy, progress, level=level)
    from posenc_export.runtime.verification.float32_form import load_form

    form = load_form(folder, model.manifest, threads)
    of_both = of_form(form, expected, accuracy, progress, quick)
    del form  # and its memory
    progress(f"{model.manifest.target}: verifying as exported")
    limit = accuracy
    if model.provider == "cpu":
        limit, level = Accuracy(FINITE), Level.QUICK
    exported = measure(_filled(model), expected, limit, progress, level=level)
    exported.bounds = {name: limit.tolerance for name in exported.cells} | exported.bounds
    return of_both.joined(exported.named(EXPORTED))


def of_form(
    form: Model, expected: Expected, accuracy: Accuracy, progress: Progress, quick: bool = False
) -> Measured:
    """Measure every cell of the float32 form of an artefact; see `measured`."""
    progress(f"{form.manifest.target}: verifying the float32 form")
    level, limit = Level.QUICK if quick else Level.WHOLE, Accuracy(accuracy.float32)
    return measure(_filled(form), expected, limit, progress, level=level).named(FORM)


def _filled(model: Model) -> Session:
    """Open a session with room for the long sequence."""
    return model.session(capacity=grid_inputs.fill_length(model.manifest))


def check_outputs(model: Model, folder: Path) -> None:
    """Raise ValueError unless a model that was loaded from `folder` gives, within the tolerance,
    the outputs of its reference on its provider, in the cells of Level.LOAD; also if that reference
    cannot be read. An artefact without one is not checked.
    """
    manifest = model.manifest
    if manifest.reference is None:
        return
    accuracy = replace(proof.default_accuracy(manifest.reference), float32=0.0)
    capacity = min(manifest.max_positions, grid_inputs.SHORT)
    session = model.session(batch=max(grid_inputs.BATCHES), capacity=capacity)
    expected = proof.read(manifest, folder)
    result = measure(session, expected, accuracy, silent, until_failure=True, level=Level.LOAD)
    proven = proof.certificate(session, accuracy, result, quick=True)
    if not proven["passed"]:
        cell = worst_cell(proven)
        got = proven["failures"].get(cell) or f"an error of {format_cell(proven, cell)} in '{cell}'"
        bound = f"within {bound_of(proven, cell):.1e} of the reference of the artefact"
        rule = f"expected outputs of provider {model.provider} {bound}"
        raise ValueError(f"runtime: {rule}, got {got}; give provider cpu")


def measure(
    session: Session,
    expected: Expected,
    accuracy: Accuracy,
    progress: Progress,
    until_failure: bool = False,
    level: Level = Level.WHOLE,
) -> Measured:
    """Measure every cell of a grid. progress: called with one line of text at each stage.
    until_failure: stop at the first cell that exceeds its tolerance.
    """
    title = f"{session.manifest.target}: verifying"
    progress(title)
    cells, result = list(cells_of(session.manifest, expected, level)), Measured()
    steps = Steps(progress, title, len(cells), "cells")
    for cell in cells:
        columns = (expected.columns, expected.readout_columns)[cell.of]
        error = _error(session, cell, columns, result.failures, accuracy.rounds)
        result.cells[cell.name] = proof.rounded_up(error)
        steps.advance()
        if until_failure and result.exceeds(accuracy.tolerance):
            break
    if level is Level.WHOLE and expected.long is not None:
        result.unreached = expected.long.unreached()
    return result


def _error(
    session: Session, cell: Cell, columns: np.ndarray, failures: Dict[str, str], rounds: bool
) -> float:
    """Run a cell and return its error; infinity, and a failure, if the graph fails. columns: of an
    output, the indices of its expected numbers.
    """
    if not cell.continues:
        session.reset()
    errors = Errors()
    try:
        for pair in cell.pairs(session):
            actual, expected = (
                output
                if output.shape[-1] == len(columns)  # a file holds only these
                else output[..., columns]
                for output in pair
            )
            errors.add(actual, expected)
    except GraphError as error:
        failures[cell.name] = str(error)
        return float("inf")
    return cell_error(errors, rounds)
