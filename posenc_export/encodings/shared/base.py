"""The contract of an encoding: hooks, identity by default, states, range, float64 oracle."""

import math
from dataclasses import dataclass
from typing import Mapping, NamedTuple

import numpy as np
import torch
from torch import Tensor

from posenc_export import ops
from posenc_export.encodings.shared.oracles import Oracle, Rows
from posenc_export.encodings.shared.tables import Exact, Table
from posenc_export.shared.refusal import refusal

__all__ = ["Exact", "Geometry", "Oracle", "PositionEncoding", "Rows", "Seen", "StateSpec", "Table"]


@dataclass(frozen=True)
class Geometry:
    """Sizes of the model that an encoding is built for.

    Args:
        width: model width E.
        heads: query heads H.
        head_size: head size D.
        max_positions: size of the declared range of positions, 0 .. max_positions - 1.
        causal: whether keys after the query are hidden.
        kv_heads: key and value heads K; 0 for H.
    """

    width: int
    heads: int
    head_size: int
    max_positions: int
    causal: bool = True
    kv_heads: int = 0

    def key_head(self) -> Tensor:
        """The key head of each query head, [H] int64."""
        return torch.arange(self.heads) // (self.heads // (self.kv_heads or self.heads))


@dataclass(frozen=True)
class StateSpec:
    """A state that an encoding or an attention carries from call to call, initially zeros.

    Args:
        name: name in the artefact, after the name of the layer.
        sizes: sizes after the batch: [B,*sizes] for a state that every call replaces; (N, D) of
            [B,N,T,D] for a state that calls append to, as keys.
        grows: whether calls append to the state (through ops.append) instead of replacing it.
        dtype: numpy dtype name; empty for the dtype of the activations.
    """

    name: str
    sizes: tuple[int, ...]
    grows: bool = False
    dtype: str = ""


def key_of(encoding: torch.nn.Module) -> str:
    """The name of an encoding of this package in messages, which is that of its module."""
    return type(encoding).__module__.rpartition(".")[2]


class Seen(NamedTuple):
    """What the queries of a call attend to: keys and values [B,K,T,D], mask [B,1 or H,S,T],
    positions [B,S] of the queries and key_positions [B,T].

    T depends on the cache of the target, so that only `ops` may refer to it.
    """

    keys: Tensor
    values: Tensor
    mask: Tensor
    positions: Tensor
    key_positions: Tensor


class PositionEncoding(torch.nn.Module):
    """Base class of encodings. Every hook is the identity; an encoding overrides the hooks where it
    acts, and `oracle`.

    The model calls `embed` and `bias` of one instance; each layer calls `rotate`, `observe` and
    `rescore`. Positions and coordinates are 0 .. max_positions - 1, if the documentation of an
    encoding has no other range. Constructors raise ValueError for sizes and parameters that types,
    `least`, `above`, `most` or the documentation exclude.

    Attributes:
        shared: whether all layers use one instance; if False, each has its own trained weights.
        works_in: kinds of attention it is defined for, "causal" and "bidirectional".
        axes: coordinates of a token besides its position; if above 0, `embed` and `rotate` take
            positions [axes,B,S].
        grid_bias: whether `bias` takes coordinates [axes,B,S] and [axes,B,T] too, in bidirectional
            attention; positions [B,S] and [B,T] then stand for all axes.
        coordinate_range: number of values of a coordinate that is no place in the sequence, and 0
            if it is not given, in bidirectional attention; 0 for coordinates in the range of
            positions, which stand for them.
        with_position: whether coordinates are [1+axes,B,S], after the position.
        window: rows and columns of the window whose places, row by row, are the positions of
            `bias` or `rescore`, for pictures; (0, 0) for positions of a sequence.
        least, above, most: smallest, exceeded and largest values of parameters, by name; others are
            refused before anything is built.
        any_size: whether `rotate` and `rescore` take queries and keys of any size, and so may stand
            beside an encoding with another `key_size`.
        chunk: tokens of a row that a session feeds at a time, which bounds tensors of size [S,T].
        built: the name and the geometry that `encodings.build` built it from.
    """

    oracle_class = Oracle
    shared = True
    works_in: tuple[str, ...] = ("causal", "bidirectional")
    axes = 0
    grid_bias = False
    coordinate_range = 0
    with_position = False
    any_size = False
    window = (0, 0)  # without a type annotation, which TorchScript would read
    built = ("", Geometry(0, 0, 0, 0))
    least: Mapping[str, float] = {}
    above: Mapping[str, float] = {}
    most: Mapping[str, float] = {}
    # The fastest at widths 768 and 2048 (bench/prefill.py of commit dc58e7a): weights are reused
    # often enough, and activations of a layer stay in the cache of a core.
    chunk = 256

    def embed(self, x: Tensor, positions: Tensor) -> Tensor:
        """x [B,S,E], positions [B,S] int64 (-1 padding) to [B,S,E]."""
        return x

    def embed_next(
        self, x: Tensor, positions: Tensor, states: list[Tensor]
    ) -> tuple[Tensor, list[Tensor]]:
        """`embed` with the states of `embed_states`, whose next values it returns."""
        return self.embed(x, positions), states

    def rotate(self, q: Tensor, k: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        """q [B,S,H,D], k [B,S,K,D], positions [B,S] to these shapes, `key_size` for D."""
        return q, k

    def bias(self, q_positions: Tensor, k_positions: Tensor) -> Tensor | None:
        """q_positions [B,S], k_positions [B,T] to [B,H,S,T] float32 or None; padding is ignored."""
        return None

    def observe(
        self, x: Tensor, k: Tensor, positions: Tensor, write_index: Tensor, states: list[Tensor]
    ) -> list[Tensor]:
        """Return the next values of the states that `layer_states` declares, which `rescore`
        receives.

        x [B,S,E] is the input of the attention and k [B,S,K,D] its rotated keys. Tensors returned
        after the states reach the `rescore` of this call only. Attention without a cache has no
        states.
        """
        return states

    def rescore(self, q: Tensor, seen: Seen, scale: float, states: list[Tensor]) -> Tensor:
        """Compute the attention of rotated queries q [B,S,H,D], for encodings whose scores depend
        on content: [B,S,H*D].
        """
        return ops.attend(q, seen.keys, seen.values, seen.mask, None, scale)

    def formulas(self) -> Mapping[str, Rows]:
        """Formulas of tables of positions, by the name of the Table: the rows [n,*] float64 of
        positions [n,1] float64. An export compares every row.
        """
        return {}

    def filled(self, table: str, count: int) -> Table:
        """One of the tables of `formulas`, with the rows of positions 0 .. count - 1."""
        return Table(self.formulas()[table](np.arange(count, dtype=np.float64)[:, None]))

    def edges(self) -> Mapping[str, int]:
        """First positions or distances from which the formula is another, by a name such as
        "window 512". Every proof compares both sides.
        """
        return {}

    def row_rules(self) -> list[str]:
        """Rules (shared/places.py) of the rows of tables that are read: by a token at position q
        with coordinates x0, x1 and so on, or by a query at q and a key at k. A proof shows that
        graphs read these rows at all positions.
        """
        return []

    def bias_rule(self) -> str:
        """What `bias` is a constant of at least 0 of each head times, for a query at q and a key at
        k, as a rule (shared/places.py); empty if there is no such rule.
        """
        return ""

    def check_multiple(self, what: str, size: int, of: int = 2, remedy: str = "") -> None:
        """Raise ValueError for a size that is not a multiple of a number."""
        if size % of:
            rule = f"an even {what}" if of == 2 else f"a {what} that is a multiple of {of}"
            raise refusal(key_of(self), rule, size, remedy or f"choose another {what}")

    def prepare(self) -> None:
        """Rebuild tables derived from weights, before an export or comparison."""

    def key_size(self, head_size: int) -> int:
        """Size of the query and key heads that `rotate` returns for heads of size D."""
        return head_size

    def token_width(self, width: int) -> int:
        """Width of the token table, which `embed` converts to width E."""
        return width

    def initialise_tokens(self, table: Tensor) -> None:
        """Initialise the token table [V, token_width] in place."""
        torch.nn.init.normal_(table, std=0.02)  # the standard deviation of GPT-2

    def embed_states(self) -> list[StateSpec]:
        """States of `embed_next`."""
        return []

    def layer_states(self) -> list[StateSpec]:
        """States of `observe` and `rescore`, in every layer."""
        return []

    def score_scale(self, head_size: int) -> float:
        """Factor on the products q k."""
        return 1 / math.sqrt(head_size)

    def oracle(self) -> Oracle:
        """Return the oracle, with the current weights."""
        return self.oracle_class(self)


def own_hooks(kind: type, *hooks: str) -> list[str]:
    """Return those of some hooks that a class of encodings overrides."""
    return [hook for hook in hooks if getattr(kind, hook) is not getattr(PositionEncoding, hook)]
