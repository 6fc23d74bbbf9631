"""What a reference is and says about itself, and what is proved of a graph.

Shapes: B batch, L tokens, V numbers of an output.
"""

from dataclasses import dataclass, field
from typing import Any, Callable, Mapping, Protocol

import numpy as np

UNSTATED = 4096  # positions of a model that does not state a number
LIMITED = ("window", "chunk")  # beginnings of names of edges where keys become invisible


@dataclass(frozen=True)
class Facts:
    """What a reference says about itself."""

    width: int  # numbers of an output for each token V
    vocabulary: int  # number of token ids; 0 if it reads hidden states
    features: int  # size E of the hidden states that it reads
    positions: int  # number of positions
    causal: bool  # whether a token sees no later ones
    edges: Mapping[str, int]  # positions and distances at which the computation changes, by name
    tolerance: float  # largest error that rounding in float32 explains
    depth: int  # number of layers
    # Tokens from which on the numbers of a token depend on how many follow it, so that only whole
    # sequences are compared; 0 for none.
    whole: int = 0
    starts: bool = True  # whether sequences can begin at other positions than 0
    # Whether layers add biases by distance, whose rounding depends on where a sequence begins
    biased: bool = False
    # By layer, the rule (shared/places.py) of the keys k that a query at q sees, or "" for none;
    # empty if the reference declares none.
    sees: tuple[str, ...] = ()

    @property
    def rules(self) -> tuple[str, ...]:
        """The rules, or that of all layers as it was measured, if nothing limits it."""
        if self.sees or any(name.startswith(LIMITED) for name in self.edges):
            return self.sees or ("",)
        return ("k <= q" if self.causal else "k >= 0",)


class Reference(Protocol):
    """Computes whole sequences."""

    facts: Facts
    model: Any  # a torch.nn.Module, or None if its weights cannot be changed

    def outputs(self, tokens: np.ndarray, start: int = 0) -> np.ndarray:
        """Return the outputs [B,L,V] of rows of equal length, float32."""

    def changed(self, change: Callable[[Any], Any]) -> "Reference":
        """Return the reference with other weights. change: returns a copy of a model with them."""


@dataclass(frozen=True)
class Claim:
    """What a graph does at every length."""

    name: str
    status: str  # "proved", "refuted" or "not proved"
    text: str  # what is proved, or what a call shows, or why it is not proved
    # Of a counterexample: S and P, the slots "padding" to "end" of the tokens of the row, the
    # position "start" of its first token, "column", "slot", "position", "position of the key"
    call: dict[str, int] = field(default_factory=dict)
