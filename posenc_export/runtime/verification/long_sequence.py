"""The long sequence of the parity grid: its tokens, its edges, and the tokens whose outputs are
compared.

An edge is a position or a number of cached tokens at which the computation changes, such as the
size of a window. A sequence that starts at position 0 reaches an edge when it reads the token with
that index: its position, its distance to the first token and the number of cached tokens are the
same number.
"""

from dataclasses import dataclass
from typing import Dict, Iterator, List, Mapping, Tuple

import numpy as np

from posenc_export.runtime.artefact.manifest import Manifest
from posenc_export.runtime.verification.inputs import inputs

# Most tokens of a row, padding included, in all other cells; caches are allocated in pages of 2
# MiB, so larger capacities cost memory.
SHORT = 256
LONGEST = (
    4096  # most tokens that fill the cache of a whole model; edges are also run on a reduced one
)
WORK = (
    1 << 37
)  # limit of weights times tokens for a whole model: 4096 tokens for 32 M weights, 1024 for 128 M
CHUNK = 512  # most tokens fed at a time
WIDEST = (
    1 << 22
)  # limit for the numbers in the outputs of one call (16 MiB); a large vocabulary reduces the chunk
KEPT = 1 << 22  # most output values kept of all tokens (16 MiB); of others, only those at edges
WHOLE_CALL = (
    1024  # most tokens of a bidirectional model, which reads them in one call with all their scores
)
BESIDE = 2  # tokens compared before and after the token at an edge
BEHIND = 64  # tokens behind the last edge: queries that may look at a key beyond it
ENDS = 2  # last tokens that are always compared


@dataclass(frozen=True)
class Run:
    """Neighbouring tokens first .. end - 1 at one or more edges, the first of them at `edge`."""

    first: int
    edge: int
    end: int
    names: Tuple[str, ...]

    @property
    def title(self) -> str:
        """Name of the run in a certificate."""
        return f"tokens {self.first:,} to {self.end - 1:,}, {', '.join(self.names)}"


@dataclass(frozen=True)
class LongSequence:
    """A sequence with expected outputs of some of its tokens.

    Args:
        tokens: [1,n] or [1,n,E].
        compared: indices of the tokens with expected outputs [m], ascending.
        outputs: expected outputs [1,m,V].
        edges: indices of tokens at edges, by name.
    """

    tokens: np.ndarray
    compared: np.ndarray
    outputs: np.ndarray
    edges: Mapping[str, int]

    def unreached(self) -> Dict[str, str]:
        """Return the edges behind the last token, with the reason."""
        length = self.tokens.shape[1]
        return {
            name: f"{edge:,}, behind the {length:,} tokens that are read"
            for name, edge in self.edges.items()
            if edge >= length
        }

    def within(self, first: int, end: int) -> Tuple[np.ndarray, np.ndarray]:
        """Return the compared indices [k] of tokens first .. end - 1, and their outputs [1,k,V]."""
        low, high = np.searchsorted(self.compared, (first, end))
        return self.compared[low:high], self.outputs[:, low:high]


def fill_length(manifest: Manifest) -> int:
    """Return the number of tokens that fill a cache, which is also the capacity of that cache."""
    affordable = max(WORK // max(manifest.step_weights, 1), SHORT)
    return min(manifest.max_positions, LONGEST, affordable)


def length_for(manifest: Manifest, edges: Mapping[str, int]) -> int:
    """Return the tokens of the long sequence; 0 for a bidirectional model without edges."""
    if manifest.states:
        return fill_length(manifest)
    reached = [edge for edge in edges.values() if edge + BESIDE < WHOLE_CALL]
    return min(manifest.max_positions, max(reached) + BEHIND) if reached else 0


def fill_chunk(manifest: Manifest) -> int:
    """Return how many tokens to feed at a time: fewer if the outputs of all are computed."""
    if manifest.input("logits_index"):
        return CHUNK
    return max(1, min(CHUNK, WIDEST // int(manifest.outputs[0].axes[-1])))


def tokens_of(manifest: Manifest, length: int) -> np.ndarray:
    """Return the tokens of the long sequence [1,n] or [1,n,E]."""
    return inputs(manifest, (1, length), "tokens to fill a cache")


def runs(edges: Mapping[str, int], length: int) -> List[Run]:
    """Return the runs of a sequence in order. Edges with common neighbours are in one run."""
    merged: List[Run] = []
    for name, edge in sorted(edges.items(), key=lambda item: (item[1], item[0])):
        first, end = max(edge - BESIDE, 0), min(edge + BESIDE + 1, length)
        if not 0 < edge < length:
            continue
        if merged and first <= merged[-1].end:
            last = merged.pop()
            merged.append(Run(last.first, last.edge, end, (*last.names, name)))
        else:
            merged.append(Run(first, edge, end, (name,)))
    return merged


def places(edges: Mapping[str, int], length: int) -> np.ndarray:
    """Return the indices of tokens whose outputs are stored: at edges and the last, ascending."""
    chosen = {index for run in runs(edges, length) for index in range(run.first, run.end)}
    return np.array(sorted({*chosen, *range(max(0, length - ENDS), length)}), np.int64)


def compared_of(manifest: Manifest, edges: Mapping[str, int], length: int) -> np.ndarray:
    """Return the indices of tokens that an export compares: `places`, and the last up to KEPT."""
    last = max(KEPT // int(manifest.outputs[0].axes[-1]), ENDS)
    return np.union1d(places(edges, length), np.arange(max(0, length - last), length))


def calls(compared: np.ndarray, first: int, end: int, chunk: int) -> Iterator[Tuple[int, int, int]]:
    """Divide the tokens first .. end - 1 into calls; yield the first token, the end, and the number
    of last tokens whose outputs are compared.

    A call ends behind the last of several neighbouring compared tokens, so that a graph that
    computes outputs of selected tokens computes few others.
    """
    chosen = set(compared.tolist())
    while first < end:
        stop = min(first + chunk, end)
        begin = next((index for index in range(first, stop) if index in chosen), stop)
        after = next((index for index in range(begin, stop) if index not in chosen), stop)
        yield first, after, after - begin
        first = after
