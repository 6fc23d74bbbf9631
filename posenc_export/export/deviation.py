"""Measure the deviation of an artefact with rounded weights, activations or caches from its float32 module, on the inputs of its reference."""

from pathlib import Path
from typing import List, Tuple

import numpy as np

from posenc_export.export.describe import Model
from posenc_export.export.expected import expected_outputs
from posenc_export.runtime import load
from posenc_export.runtime.artefact import manifest as manifests
from posenc_export.runtime.artefact.manifest import Manifest
from posenc_export.runtime.artefact.schema import Deviation
from posenc_export.runtime.verification.proof import rounded_up


def write(folder: Path, manifest: Manifest, exact: Manifest, model: Model) -> Manifest:
    """Measure the deviation of a certified artefact and write it into the manifest. It says how much the rounding of weights changes the outputs, and has no limit.

    Args:
        exact: manifest of a certified artefact with the same weights that computes in float32.
        model: the float32 module, with weights that are not rounded.
    """
    proof = exact.certificate
    assert proof is not None and manifest.certificate is not None
    actual, expected = _outputs(folder, manifest, model)
    error = rounded_up(float(np.sqrt(np.square(actual - expected).mean() / (np.square(expected).mean() or 1.0))))
    agreement = float((actual.argmax(-1) == expected.argmax(-1)).mean()) if manifest.kind == "decoder" else 0.0
    found = Deviation(error, round(agreement, 3), int(np.prod(expected.shape[:-1])), max(proof["cells"].values()), proof["tolerance"])
    manifest = manifest.replace(deviation=found)
    manifests.write(manifest, folder)
    return manifest


def _outputs(folder: Path, manifest: Manifest, model: Model) -> Tuple[np.ndarray, np.ndarray]:
    """Return the outputs of the artefact and of the module for all cases of the reference [cases*B,L,V], float64."""
    session, actual, expected = load(folder, provider="cpu", threads=1).session(), [], []
    for case in expected_outputs(model, manifest, filled=False).cases.values():
        session.reset()
        actual.append(session.prefill(case.tokens, chunk=case.tokens.shape[1], **case.beginning()))
        expected.append(case.full)
    return _whole(actual), _whole(expected)


def _whole(parts: List[np.ndarray]) -> np.ndarray:
    return np.concatenate(parts).astype(np.float64)
