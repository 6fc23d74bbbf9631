"""The inputs of the parity grid: the tokens of each case, and the long sequence with its edges."""

import hashlib
import math
from dataclasses import dataclass
from typing import Any, Iterator, Mapping

import numpy as np

from posenc_export.runtime.artefact.manifest import Manifest
from posenc_export.runtime.verification.scenarios import AttributeCase

ENCODED = 11  # tokens of the longest encoder sequence
# Most tokens of a row, padding included, in all other cells; caches are allocated in pages of 2
# MiB, so larger capacities cost memory.
SHORT = 256
# Most tokens that fill the cache of a model
LONGEST = 4096
# Limit of weights times tokens of a full cache: 4096 tokens for 32 M weights, 1024 for 128 M
WORK = 1 << 37
CHUNK = 512  # most tokens fed at a time
# Limit for the numbers in the outputs of one call (16 MiB); a large vocabulary reduces the chunk
WIDEST = 1 << 22
KEPT = 1 << 22  # most output values that are kept beside those at edges (16 MiB)
# Most tokens of a bidirectional model, which reads them in one call with all their scores
WHOLE_CALL = 1024
BESIDE = 2  # tokens compared before and after the token at an edge
BEHIND = 64  # tokens after the last edge, whose queries may see keys beyond it
ENDS = 2  # last tokens that are always compared
BATCHES = (1, 3)
# Tokens per row: enough for every way of splitting a sequence, few enough for the element-wise
# oracle.
LENGTH = 36
# Least number of weights that a token reads for which the grid has fewer cells. The full grid would
# take minutes.
LARGE = 1 << 26
SEGMENT_PADDING = 3  # columns of left padding in the first row


def encoder_rows(manifest: Manifest, rows: int) -> list[np.ndarray] | None:
    """Return encoder outputs [q,N] of rows, shorter from row to row; None without an encoder."""
    if not manifest.encoder:
        return None
    sizes = [int(value.axes[1]) * int(value.axes[3]) for value in manifest.encoder[1:]]
    shape = (rows, ENCODED, sum(sizes))
    longest = uniform(shape, "keys and values of an encoder").astype(manifest.passed_dtype)
    return [row[: ENCODED - 3 * index] for index, row in enumerate(longest)]


def inputs(manifest: Manifest, shape: tuple[int, ...], name: str) -> np.ndarray:
    """Generate tokens, or hidden states of variance 1, from a name; equal on every machine."""
    vocabulary = manifest.vocabulary
    if vocabulary:
        return numbers(shape, name, vocabulary)
    source = manifest.inputs[0]
    return uniform((*shape, int(source.axes[-1])), name).astype(source.dtype)


def uniform(shape: tuple[int, ...], name: str) -> np.ndarray:
    """Generate float64 numbers with a uniform distribution of mean 0 and variance 1 from a name."""
    return ((_bits(shape, name) + 0.5) / 2**31 - 1) * math.sqrt(3)


def numbers(shape: tuple[int, ...], name: str, limit: int) -> np.ndarray:
    """Generate whole numbers 0 .. limit - 1, int64, from a name."""
    return (_bits(shape, name).astype(np.int64) * limit) >> 32


def _bits(shape: tuple[int, ...], name: str) -> np.ndarray:
    count = math.prod(shape)
    return np.frombuffer(hashlib.shake_256(name.encode()).digest(4 * count), "<u4").reshape(shape)


@dataclass(frozen=True)
class Run:
    """Neighbouring tokens first .. end - 1 at one or more edges, the first of them at `edge`."""

    first: int
    edge: int
    end: int
    names: tuple[str, ...]


@dataclass(frozen=True)
class LongSequence:
    """A sequence with expected outputs of some of its tokens."""

    tokens: np.ndarray  # [1,n] or [1,n,E]
    compared: np.ndarray  # indices of the tokens with expected outputs [m], ascending
    outputs: np.ndarray  # expected outputs [1,m,V]
    edges: Mapping[str, int]  # indices of tokens at edges, by name

    def unreached(self) -> dict[str, str]:
        """Return the edges behind the last token, with the reason."""
        length = self.tokens.shape[1]
        beyond = {name: edge for name, edge in self.edges.items() if edge >= length}
        reason = f"behind the {length:,} tokens that are read"
        return {name: f"{edge:,}, {reason}" for name, edge in beyond.items()}

    def within(self, first: int, end: int) -> tuple[np.ndarray, np.ndarray]:
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


def runs(edges: Mapping[str, int], length: int) -> list[Run]:
    """Return the runs of a sequence in order. Edges with common neighbours are in one run."""
    merged: list[Run] = []
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
    """Return the indices of tokens that an export compares: `places`, and as many of the last
    tokens as have at most KEPT output values, but at least ENDS.
    """
    last = max(KEPT // int(manifest.outputs[0].axes[-1]), ENDS)
    return np.union1d(places(edges, length), np.arange(max(0, length - last), length))


def calls(compared: np.ndarray, first: int, end: int, chunk: int) -> Iterator[tuple[int, int, int]]:
    """Divide the tokens first .. end - 1 into calls. Yield the first token, the end, and the number
    of last tokens whose outputs are compared. A call ends after a run of compared tokens, so that a
    graph that selects tokens computes few other outputs.
    """
    chosen = set(compared.tolist())
    while first < end:
        stop = min(first + chunk, end)
        begin = next((index for index in range(first, stop) if index in chosen), stop)
        after = next((index for index in range(begin, stop) if index not in chosen), stop)
        yield first, after, after - begin
        first = after


def is_large(manifest: Manifest) -> bool:
    """Whether the grid has shorter sequences, fewer starts and rows, and a shorter full cache."""
    return manifest.step_weights >= LARGE


def length_of(manifest: Manifest) -> int:
    """Return the number of tokens of a sequence L."""
    return min(LENGTH // 2 if is_large(manifest) else LENGTH, manifest.max_positions)


def starts(manifest: Manifest) -> list[int]:
    """Return the start positions of rows: 0, the last, and unless large one in between."""
    last = manifest.max_positions - length_of(manifest)
    chosen = sorted({0, last} if is_large(manifest) else {0, min(1000, last), last})
    if manifest.signature == "mask":
        chosen = [0]  # the graph counts positions from the mask
    return [chosen[row % len(chosen)] for row in range(max(BATCHES))]


def grid_of(manifest: Manifest) -> tuple[Any, ...]:
    """Return what the inputs and expected outputs of a grid depend on besides the model."""
    return (
        manifest.signature,
        manifest.dtype,
        tuple(starts(manifest)),
        length_of(manifest),
        fill_length(manifest),
        fill_chunk(manifest),
    )


def case_inputs(manifest: Manifest) -> tuple[np.ndarray, np.ndarray, int]:
    """Return tokens [B,L] of a case, the same with another ending, and where the endings begin."""
    length, rows = length_of(manifest), max(BATCHES)
    fork_at, tokens = length // 2, inputs(manifest, (rows, length), "tokens")
    other = tokens.copy()
    other[:, fork_at:] = inputs(manifest, (rows, length - fork_at), "another ending")
    return tokens, other, fork_at


def attribute_inputs(manifest: Manifest) -> dict[str, AttributeCase]:
    """Return the inputs of the cells "coordinates" and "segments". "segments" may have both."""
    length, cells = length_of(manifest), {}
    tokens = inputs(manifest, (2, length), "tokens with numbers beside")
    mask = np.ones((2, length), np.int64)
    grid: dict[str, np.ndarray] = {}
    if manifest.axes:
        shape = (manifest.axes, 2, length)
        limit = manifest.coordinate_range or manifest.max_positions
        grid = {"grid": numbers(shape, "coordinates", limit)}
        cells["coordinates"] = AttributeCase(tokens, mask.copy(), grid)
    if manifest.segments:
        mask[0, : min(SEGMENT_PADDING, length - 1)] = 0
        types = numbers((2, length), "segments", manifest.segments)
        cells["segments"] = AttributeCase(tokens, mask, {**grid, "token_types": types})
    return cells
