"""What a reference is and says about itself.

Shapes: B batch, L tokens, V numbers of an output.
"""

from dataclasses import dataclass
from typing import Mapping, Optional, Protocol, Tuple

import numpy as np

UNSTATED = 4096  # positions of a model that does not state a number


@dataclass(frozen=True)
class Facts:
    """What a reference says about itself.

    Args:
        width: numbers of an output for each token V.
        vocabulary: number of token ids; 0 if it reads hidden states.
        features: size E of the hidden states that it reads.
        positions: number of positions.
        causal: whether a token sees no later ones.
        edges: positions and distances at which the computation changes, by name.
        tolerance: largest error that rounding in float32 explains.
        depth: number of layers.
        whole: number of tokens from which on the numbers of a token depend on how many follow it,
            so that only whole sequences are compared; 0 for none.
        window: number of keys of every layer; 0 if there is no window or layers differ.
        heads: number and size of the heads of a cache, (0, 0) if unknown.
        starts: whether sequences can begin at other positions than 0.
    """

    width: int
    vocabulary: int
    features: int
    positions: int
    causal: bool
    edges: Mapping[str, int]
    tolerance: float
    depth: int
    whole: int = 0
    window: int = 0
    heads: Tuple[int, int] = (0, 0)
    starts: bool = True


class Reference(Protocol):
    """Computes whole sequences."""

    facts: Facts

    def outputs(self, tokens: np.ndarray, start: int = 0) -> np.ndarray:
        """Return the outputs [B,L,V] of rows of equal length, float32."""

    def disturbed(self, seed: int) -> Optional["Reference"]:
        """Return the reference with a last digit of each weight changed at random, or None."""
