"""One comparison of the parity grid."""

from dataclasses import dataclass
from typing import Callable

from posenc_export.runtime.session.session import Session
from posenc_export.runtime.verification.scenarios import Pairs


@dataclass(frozen=True)
class Cell:
    """One comparison.

    Args:
        name: in the certificate.
        pairs: drives a session and yields pairs of actual and expected outputs.
        of: index of the compared output, in Manifest.outputs.
        against: name of the cell whose actual outputs are the expected outputs of this one, or
            whose error bounds that of a readout; empty for none.
        continues: whether the session keeps the tokens of the cell before; else it is empty.
    """

    name: str
    pairs: Callable[[Session], Pairs]
    of: int = 0
    against: str = ""
    continues: bool = False
