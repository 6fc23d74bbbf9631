"""The checks of a proof that need the artefact alone: no module and no torch (docs/reliability.md)."""

from pathlib import Path
from typing import Callable, Dict, Mapping

from posenc_export.runtime.artefact.certificate import Check
from posenc_export.runtime.session.model import Model
from posenc_export.runtime.verification import fused_attention, indices

# By name in the certificate: a function of the artefact's folder and its loaded model.
CHECKS: Mapping[str, Callable[[Path, Model], Check]] = {
    "indices": indices.check,
    "attention": fused_attention.check,
}


def of_artefact(folder: Path, model: Model, progress: Callable[[str], None]) -> Dict[str, Check]:
    """Run the checks of an artefact and return them by name.

    Args:
        folder: of the artefact, whose files were checked.
        model: loaded from it.
        progress: called with one line of text for each check.
    """
    checks = {}
    for name, check in CHECKS.items():
        progress(f"{model.manifest.target}: checking {name}")
        checks[name] = check(folder, model)
    return checks
