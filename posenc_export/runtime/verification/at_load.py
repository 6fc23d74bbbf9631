"""The check of a loaded artefact on this machine: a few cells of the parity grid, compared with
the reference stored in the artefact.
"""

from dataclasses import replace
from pathlib import Path

from posenc_export.runtime.artefact.certificate import Proof, bound_of, format_cell, worst_cell
from posenc_export.runtime.session.model import Model
from posenc_export.runtime.verification import measuring, proof, reference
from posenc_export.runtime.verification.case import Level
from posenc_export.runtime.verification.grid_inputs import BATCHES
from posenc_export.runtime.verification.long_sequence import SHORT


def check_outputs(model: Model, folder: Path) -> None:
    """Check that a loaded artefact gives the outputs of its reference on its provider. An artefact
    without a reference is not checked.

    Args:
        model: loaded from `folder`.

    Raises:
        ValueError: an output differs by more than the tolerance of the artefact, the graph fails,
            or the reference cannot be read.
    """
    if model.manifest.reference is None:
        return
    proven = few_cells(model, folder)
    if not proven["passed"]:
        cell = worst_cell(proven)
        got = proven["failures"].get(cell) or f"an error of {format_cell(proven, cell)} in '{cell}'"
        rule = (
            f"expected outputs of provider {model.provider} within {bound_of(proven, cell):.1e} "
            "of the reference of the artefact"
        )
        raise ValueError(f"runtime: {rule}, got {got}; give provider cpu")


def few_cells(model: Model, folder: Path) -> Proof:
    """Measure the cells of Level.LOAD up to the first that exceeds its tolerance, and return
    them as a certificate does.

    Raises:
        ValueError: the reference is missing or cannot be read.
    """
    manifest, expected = model.manifest, reference.read(model.manifest, folder)
    assert manifest.reference is not None  # checked by reference.read
    accuracy = replace(proof.default_accuracy(model.provider, manifest.reference), float32=0.0)
    session = model.session(batch=max(BATCHES), capacity=min(manifest.max_positions, SHORT))
    measured = measuring.measure(
        session, expected, accuracy, lambda _: None, until_failure=True, level=Level.LOAD
    )
    return proof.certificate(session, accuracy, measured, quick=True)
