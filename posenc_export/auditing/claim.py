"""What is asked of a proof of a graph of others, and what it answers."""

from dataclasses import dataclass, field
from typing import Dict, List

from posenc_export.auditing.inputs import Interface


@dataclass(frozen=True)
class Question:
    """What a proof needs to know."""

    interface: Interface
    most: int  # number of positions
    starts: bool  # whether sequences begin at other positions than 0
    padded: bool  # whether padding stands before tokens
    # By layer, the rule (shared/places.py) of the keys k that a query at q sees; one for all layers
    sees: List[str]
    by_length: bool = False  # whether angles depend on the length of a sequence


@dataclass(frozen=True)
class Claim:
    """What a graph does at every length."""

    name: str
    status: str  # "proved", "refuted" or "not proved"
    text: str  # what is proved, or what a call shows, or why it is not proved
    # Of a counterexample: S and P, the slots "padding" to "end" of the tokens of the row, the
    # position "start" of its first token, "column", "slot", "position", "position of the key"
    call: Dict[str, int] = field(default_factory=dict)
