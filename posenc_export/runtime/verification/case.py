"""What the parity grid consists of: cases, scenarios that divide a case into calls, and cells."""

import dataclasses
import enum
from dataclasses import dataclass
from typing import Any, Callable, Dict, Iterator, Optional, Protocol, Sequence, Tuple, Union

import numpy as np

Pairs = Iterator[Tuple[np.ndarray, np.ndarray]]  # actual and expected outputs


class Calls(Protocol):
    """The calls of a Session that scenarios of rows with caches make. A graph that others wrote
    answers them, too (auditing/session.py). Arguments are those of Session.
    """

    def prefill(self, *inputs: Any, **how: Any) -> np.ndarray: ...

    def step(self, inputs: np.ndarray) -> np.ndarray: ...

    def rewind(self, n: Any) -> None: ...

    def reset(self) -> None: ...

    def fork(self) -> "Calls": ...


class Level(enum.IntEnum):
    """The grids; each has the cells of those before it."""

    LOAD = 0  # a few, for `load` on a provider other than the CPU
    QUICK = 1  # one of each kind of call
    WHOLE = 2  # those of one row, of all starts, and the long sequence, too


@dataclass(frozen=True)
class Case:
    """Inputs of a few rows, the outputs of a full pass over them, and both for a second ending."""

    tokens: np.ndarray  # inputs [B,L] int64 or [B,L,E]
    full: np.ndarray  # outputs of the full pass [B,L,V] or [B,L,E]
    start: Union[int, Sequence[int]]  # position of the first token, or that of each row
    fork_at: int  # index of the first token in which `tokens` and `other` differ
    other: np.ndarray  # inputs and full pass of the same rows with the second ending
    other_full: np.ndarray
    # Encoder outputs of each row [q,N], if the model reads an encoder.
    encoder: Optional[Sequence[np.ndarray]] = None
    # Second output for `tokens`, [B,N] or [B,L,N], if the model has one.
    readout: Optional[np.ndarray] = None

    def rows(self, count: int) -> "Case":
        """Return the case of the first `count` rows."""
        return dataclasses.replace(
            self,
            tokens=self.tokens[:count],
            full=self.full[:count],
            start=self.start if isinstance(self.start, int) else self.start[:count],
            other=self.other[:count],
            other_full=self.other_full[:count],
            encoder=self.encoder and self.encoder[:count],
            readout=None if self.readout is None else self.readout[:count],
        )

    def beginning(self, first: int = 0, end: Optional[int] = None) -> Dict[str, Any]:
        """Return the keyword arguments of the first call on the rows first .. end - 1."""
        start = self.start if isinstance(self.start, int) else list(self.start[first:end])
        encoder = {} if self.encoder is None else {"encoder": self.encoder[first:end]}
        return {"start": start, **encoder}


@dataclass(frozen=True)
class AttributeCase:
    """Tokens with attributes: coordinates, segments or both."""

    tokens: np.ndarray  # [2,L] or [2,L,E]
    mask: np.ndarray  # attention mask [2,L]; with segments, the first row has left padding
    # Arguments of Session.prefill: "grid" [axes,2,L], "token_types" [2,L] or both.
    attributes: Dict[str, Any]


@dataclass(frozen=True)
class Scenario:
    """A way to divide a case into calls, which must give the outputs of one full pass."""

    name: str  # in the certificate
    # Drives a session and yields pairs of actual and expected outputs
    run: Callable[[Any, Case], Pairs]
    level: Level = Level.QUICK  # the smallest grid that has it


@dataclass(frozen=True)
class Cell:
    """One comparison."""

    name: str  # in the certificate
    # Drives a session and yields pairs of actual and expected outputs
    pairs: Callable[[Any], Pairs]
    of: int = 0  # index of the compared output, in Manifest.outputs
    # Name of the cell whose actual outputs are the expected outputs of this one, or whose error
    # bounds that of a readout; empty for none
    against: str = ""
    # Whether the session keeps the tokens of the cell before; else it is empty
    continues: bool = False
