"""Whether verification tells the truth of an artefact that loads: it must find every one whose numbers changed."""

from pathlib import Path
from typing import List, Optional

import numpy as np

from posenc_export.numerics import worst_error
from posenc_export.runtime import GraphError, load, verify

PROVED, DISPROVED = "loaded and proved", "loaded and disproved"
# Verification bounds the error on the inputs of the reference, whose numbers end at sqrt(3). The inputs here are normal and reach twice as far, so a weight
# that is off by a few roundings may stay within the tolerance there and exceed it by as much here. Numbers count as others beyond that.
REACH = 2.0


class Judge:
    """Compares what a mutated artefact gives, and what its verification says, with the artefact it was made of.

    Args:
        source: the whole artefact.
    """

    def __init__(self, source: Path) -> None:
        self.expected = numbers(source)

    def __call__(self, folder: Path) -> str:
        """PROVED, DISPROVED, or what is wrong."""
        try:
            found = verify(folder, provider="cpu", record=False)
        except (ValueError, GraphError) as refusal:  # a reference that is not there, a call that is out of range
            return DISPROVED if "\n" not in str(refusal) else f"raised {str(refusal)[:200]!r}"
        if not found["passed"]:
            return DISPROVED
        given = numbers(folder)
        bound = REACH * found["tolerance"]
        wrong = given is None or self.expected is None or any(not worst_error(a, b) <= bound for a, b in zip(given, self.expected, strict=True))
        return "verification passes an artefact that gives other numbers" if wrong else PROVED


def numbers(folder: Path) -> Optional[List[np.ndarray]]:
    """Outputs of a few calls on inputs that are not those of the reference; None where one of them is refused."""
    try:
        session = load(folder, provider="cpu", threads=1).session()
        width = int(session.manifest.inputs[0].axes[-1])
        x = np.random.default_rng(7).standard_normal((2, 20, width)).astype(session.manifest.inputs[0].dtype)
        made = [session.prefill(x[:, :9], start=[3, 11]), session.prefill(x[:, 9:13], chunk=3)]
        session.rewind([2, 0])
        made += [session.step(x[:, 13 + index]) for index in range(3)]
        return [*made, session.fork().prefill([x[0, 16:], x[1, 16:18]])]
    except (ValueError, GraphError):
        return None
