"""Measure an artefact that rounds activations: its float32 form, and the artefact as exported.

The float32 form shows whether the graph is right, at the tolerance of float32. The error of the
artefact as exported is that of rounding. On the CPU it is reported and has no limit.
"""

from pathlib import Path
from typing import Callable, Optional

from posenc_export.runtime.artefact.certificate import EXPORTED, FINITE, FORM
from posenc_export.runtime.session.model import Model
from posenc_export.runtime.verification.case import Level
from posenc_export.runtime.verification.measuring import measure, sessions
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
    """Measure every cell of the float32 form, if the artefact has one, and of the artefact.

    Args:
        model: loaded from `folder`.
        threads: threads per operator of the model and its form.
        quick: run one scenario for each kind of call.

    Raises:
        ModuleNotFoundError: the artefact has a form, and ONNX Runtime is not installed.
        ValueError: the form cannot be loaded.
    """
    level = Level.QUICK if quick else Level.WHOLE
    if not accuracy.float32:
        return _cells(model, expected, accuracy, progress, threads, level)
    from posenc_export.runtime.verification.float32_form import load_form

    form = load_form(folder, model.manifest, threads)
    of_both = of_form(form, expected, accuracy, progress, threads, quick)
    del form  # and its memory
    progress(f"{model.manifest.target}: verifying as exported")
    limit = accuracy
    if model.provider == "cpu":
        limit, level = Accuracy(FINITE), Level.QUICK
    exported = _cells(model, expected, limit, progress, threads, level)
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
    level = Level.QUICK if quick else Level.WHOLE
    limit = Accuracy(accuracy.float32)
    return _cells(form, expected, limit, progress, threads, level).named(FORM)


def _cells(
    model: Model,
    expected: Expected,
    limit: Accuracy,
    progress: Callable[[str], None],
    threads: Optional[int],
    level: Level,
) -> Measured:
    session, *workers = sessions(model, threads)
    return measure(session, expected, limit, progress, workers, level=level)
