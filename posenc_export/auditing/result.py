"""What an audit finds."""

from dataclasses import dataclass
from typing import Any, Dict, Mapping, Optional, Tuple

import msgspec

from posenc_export.auditing.answer import Observed
from posenc_export.auditing.facts import Claim
from posenc_export.auditing.rounding import Loss

WRITTEN = "verdict sentence cause cells inputs unreached claims loss".split()


@dataclass(frozen=True)
class AuditedCell:
    """One way to call the graph."""

    name: str  # batch, start and scenario
    # "right", "wrong", "refused" if the graph failed, "not possible" if inputs cannot express it
    status: str
    error: float = 0.0  # largest error, relative to the largest output; 0 if nothing was compared
    tolerance: float = 0.0  # largest error of a right graph
    first: int = -1  # index of the first wrong token of a sequence; -1 if none is wrong
    message: str = ""  # why it is refused or not possible


@dataclass(frozen=True)
class Audit:
    """The result of an audit."""

    # "right", "wrong", or "refused" if the graph fails in a call that its inputs can express, and
    # is right in all others.
    verdict: str
    sentence: str  # which calls are wrong, and what they have in common
    cause: str  # a key of answer.CAUSES, or a named fault; empty if nothing is wrong
    cells: Tuple[AuditedCell, ...]  # in the order in which they were measured
    inputs: Tuple[Dict[str, str], ...]  # table of inputs: "name", "type", "meaning"
    unreached: Mapping[str, str]  # edges of the reference that no cell reached, with the reason
    observed: Observed  # the error of each compared token
    loss: Optional[Loss] = None  # what rounding costs, of a graph whose weights are rounded
    # What is proved of an ONNX graph at every length, refuted, or neither
    claims: Tuple[Claim, ...] = ()
    # Source that repeats the first wrong token with numpy and the library of the graph, or empty
    program: str = ""

    @property
    def right(self) -> bool:
        """Whether every call that the inputs can express ran and is right."""
        return self.verdict == "right"

    def as_json(self) -> Dict[str, Any]:
        """Return everything but the errors of single tokens and the program, for JSON."""
        return {name: msgspec.to_builtins(getattr(self, name)) for name in WRITTEN}
