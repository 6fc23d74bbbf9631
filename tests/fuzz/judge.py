"""Check verification on mutated artefacts that load: it must fail for every artefact whose
outputs changed.
"""

from pathlib import Path
from typing import List, Optional

import numpy as np

from posenc_export.runtime import GraphError, load, verify
from posenc_export.shared.numerics import worst_error

PROVED, DISPROVED = "loaded, verification passed", "loaded, verification failed"
# Verification bounds the error on the inputs of the reference, which are at most sqrt(3). The
# inputs here are normally distributed and up to twice as large, so a weight with a small error may
# be within the tolerance there and exceed it here by a factor of up to 2. Larger differences count
# as changed outputs.
REACH = 2.0


class Judge:
    """Compares the outputs of a mutated artefact with those of the original, and with the result of
    its verification.

    Args:
        source: the original artefact.
    """

    def __init__(self, source: Path) -> None:
        self.expected = numbers(source)

    def __call__(self, folder: Path) -> str:
        """Return PROVED, DISPROVED, or a description of the finding."""
        try:
            proof = verify(folder, provider="cpu", record=False)
        except (
            ValueError,
            GraphError,
        ) as refusal:  # the reference is missing, or a call is out of range
            return DISPROVED if "\n" not in str(refusal) else f"raised {str(refusal)[:200]!r}"
        if not proof["passed"]:
            return DISPROVED
        given = numbers(folder)
        bound = REACH * proof["tolerance"]
        wrong = (
            given is None
            or self.expected is None
            or any(
                not worst_error(a, b) <= bound for a, b in zip(given, self.expected, strict=True)
            )
        )
        return "verification passes an artefact that gives other numbers" if wrong else PROVED


def numbers(folder: Path) -> Optional[List[np.ndarray]]:
    """Return the outputs of a few calls on other inputs than those of the reference; None if a
    call is refused.
    """
    try:
        session = load(folder, provider="cpu", threads=1).session()
        width = int(session.manifest.inputs[0].axes[-1])
        x = (
            np.random.default_rng(7)
            .standard_normal((2, 20, width))
            .astype(session.manifest.inputs[0].dtype)
        )
        results = [session.prefill(x[:, :9], start=[3, 11]), session.prefill(x[:, 9:13], chunk=3)]
        session.rewind([2, 0])
        results += [session.step(x[:, 13 + index]) for index in range(3)]
        return [*results, session.fork().prefill([x[0, 16:], x[1, 16:18]])]
    except (ValueError, GraphError):
        return None
