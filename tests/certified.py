"""The certificate of a session that no artefact belongs to."""

from typing import Any

from posenc_export.export.describe import Model
from posenc_export.export.expected import accuracy_of, oracle_cells
from posenc_export.runtime import Session
from posenc_export.runtime.verification.measuring import measure
from posenc_export.runtime.verification.proof import Expected, certificate


def certify(session: Session, model: Model, expected: Expected) -> dict[str, Any]:
    """Compare a session with the eager module, and the eager module with its oracle."""
    accuracy = accuracy_of(model, session.manifest)
    measured = measure(session, expected, accuracy, lambda _: None)
    measured.cells |= oracle_cells(model, session.manifest, expected)
    return certificate(session, accuracy, measured)
