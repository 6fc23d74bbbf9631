"""One comparison of the parity grid, and the errors of several."""

from dataclasses import dataclass, field
from typing import Callable, Dict

from posenc_export.runtime.session.session import Session
from posenc_export.runtime.verification.scenarios import Pairs


@dataclass(frozen=True)
class Cell:
    """One comparison.

    Args:
        name: in the certificate.
        pairs: drives a session and yields pairs of actual and expected outputs.
        of: index of the compared output, in Manifest.outputs.
        against: name of the cell whose actual outputs are the expected outputs of this one, or whose error bounds that of a readout; empty for none.
        continues: whether the session keeps the tokens of the cell before; else it is empty.
    """

    name: str
    pairs: Callable[[Session], Pairs]
    of: int = 0
    against: str = ""
    continues: bool = False


@dataclass
class Measured:
    """Errors of an artefact on the grid, by name of a cell."""

    cells: Dict[str, float] = field(default_factory=dict)  # numerics.cell_error
    bounds: Dict[str, float] = field(
        default_factory=dict
    )  # tolerance of the cells whose tolerance is not that of the artefact
    failures: Dict[str, str] = field(
        default_factory=dict
    )  # message of the graph that failed in the cell
    unreached: Dict[str, str] = field(
        default_factory=dict
    )  # edges that no cell reached, with the reason

    def joined(self, other: "Measured") -> "Measured":
        """Return these errors and those of other cells."""
        return Measured(
            {**self.cells, **other.cells},
            {**self.bounds, **other.bounds},
            {**self.failures, **other.failures},
            {**self.unreached, **other.unreached},
        )

    def exceeds(self, tolerance: float) -> bool:
        """Whether a cell exceeds its tolerance, which is `tolerance` unless `bounds` has another."""
        return any(
            not error <= self.bounds.get(name, tolerance) for name, error in self.cells.items()
        )
