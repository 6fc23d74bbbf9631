"""The checks of a proof that need the artefact alone: no module and no torch (docs/reliability.md)."""

from pathlib import Path
from typing import Callable, Dict, Mapping, Optional

from posenc_export.runtime.artefact.certificate import Check
from posenc_export.runtime.artefact.rules import graph_file
from posenc_export.runtime.session.model import Model
from posenc_export.runtime.verification import fused_attention, indices


def operators(folder: Path, model: Model) -> Optional[Check]:
    """Compare the kernels that compute with weights of few bits or in float16 with their contracts, on the CPU (operators.py)."""
    if graph_file(model.manifest) != "model.onnx" or model.provider != "cpu":
        return None
    from posenc_export.runtime.verification.operators import of_artefact  # needs onnxruntime

    return of_artefact(folder, model.manifest)


# By name in the certificate: a function of the artefact's folder and its loaded model, which
# returns None if the artefact has nothing to check.
CHECKS: Mapping[str, Callable[[Path, Model], Optional[Check]]] = {
    "indices": indices.check,
    "attention": fused_attention.check,
    "operators": operators,
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
        result = check(folder, model)
        if result is not None:
            checks[name] = result
    return checks
