"""What an audit finds."""

from dataclasses import asdict, dataclass
from typing import Any, Dict, Mapping, Tuple

from posenc_export.auditing.observing import Observed


@dataclass(frozen=True)
class AuditedCell:
    """One way to call the graph.

    Args:
        name: batch, start and scenario.
        status: "right", "wrong", "refused" if the graph failed, or "not possible" if its inputs
            cannot express the calls.
        error: largest error, relative to the largest output; 0 if nothing was compared.
        tolerance: largest error of a right graph.
        first: index of the first wrong token of a sequence; -1 if none is wrong.
        message: why it is refused or not possible.
    """

    name: str
    status: str
    error: float = 0.0
    tolerance: float = 0.0
    first: int = -1
    message: str = ""


@dataclass(frozen=True)
class Audit:
    """The result of an audit.

    Args:
        verdict: "right", "wrong", or "refused" if the graph fails in a call that its inputs can
            express, and is right in all others.
        sentence: which calls are wrong, and what they have in common.
        cause: a key of answer.CAUSES, or a named fault; empty if nothing is wrong.
        cells: in the order in which they were measured.
        inputs: rows of the table of inputs: "name", "type", "meaning".
        unreached: edges of the reference that no cell reached, with the reason.
        observed: the error of each compared token.
        program: source of a program that repeats the first wrong token with numpy and the library
            that runs the graph; empty if none is wrong.
    """

    verdict: str
    sentence: str
    cause: str
    cells: Tuple[AuditedCell, ...]
    inputs: Tuple[Dict[str, str], ...]
    unreached: Mapping[str, str]
    observed: Observed
    program: str = ""

    @property
    def right(self) -> bool:
        """Whether every call that the inputs can express ran and is right."""
        return self.verdict == "right"

    def as_json(self) -> Dict[str, Any]:
        """Return everything but the errors of single tokens, for JSON."""
        cells = [asdict(cell) for cell in self.cells]
        return {
            "verdict": self.verdict,
            "sentence": self.sentence,
            "cause": self.cause,
            "cells": cells,
            "inputs": list(self.inputs),
            "unreached": dict(self.unreached),
        }
