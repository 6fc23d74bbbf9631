"""The contract of a position encoding: identity hooks, declared states, a range, and a float64 oracle written entry by entry."""

import math
from dataclasses import dataclass
from typing import List, Optional, Sequence, Tuple

import numpy as np
import torch
from torch import Tensor

from posenc_export import ops


@dataclass(frozen=True)
class Geometry:
    """What an encoding may know of its model.

    Args:
        width: model width E.
        heads: query heads H.
        head_size: head size D.
        max_positions: positions 0 .. max_positions - 1 are the declared range.
        causal: keys after the query are hidden.
        kv_heads: key and value heads K; H where 0.
    """

    width: int
    heads: int
    head_size: int
    max_positions: int
    causal: bool = True
    kv_heads: int = 0


@dataclass(frozen=True)
class Carried:
    """A state that an encoding or an attention carries from call to call, zeros at first.

    Args:
        name: in the artefact, behind its layer.
        sizes: [B,*sizes] for a state replaced by every call; (N, D) of [B,N,T,D] for one that is appended to, as keys are.
        grows: appended to (through ops.append), not replaced.
        dtype: numpy name; that of activations where empty.
    """

    name: str
    sizes: Tuple[int, ...]
    grows: bool = False
    dtype: str = ""


class Oracle:
    """The formula once more, in float64, one entry at a time; identity where the encoding does not act."""

    def begin(self, positions: Sequence[int]) -> None:
        """positions of all tokens of a row, before they are rotated; for encodings that go by the length of a call."""

    def embed(self, x: np.ndarray, position: int) -> np.ndarray:
        """x [E] of one token, float64."""
        return x

    def embed_rows(self, x: np.ndarray, positions: Sequence[int]) -> np.ndarray:
        """x [n,E], the tokens of a row from its first on, to [n,E]; for encodings where one depends on those before."""
        return np.stack([self.embed(row.copy(), p) for row, p in zip(x, positions, strict=True)])

    def rotate(self, x: np.ndarray, position: int) -> np.ndarray:
        """x [D] of one query head, float64; of one key head too, unless `rotate_key` says otherwise."""
        return x

    def rotate_key(self, x: np.ndarray, position: int) -> np.ndarray:
        """x [D] of one key head, float64."""
        return self.rotate(x, position)

    def rotate_heads(self, x: np.ndarray, position: int) -> np.ndarray:
        """x [H,D], all query heads of a token; for encodings whose heads turn differently."""
        return np.stack([self.rotate(head, position) for head in x])

    def rotate_key_heads(self, x: np.ndarray, position: int) -> np.ndarray:
        """x [K,D], all key heads of a token."""
        return np.stack([self.rotate_key(head, position) for head in x])

    def observe(self, x: np.ndarray, first: int = 0, types: Optional[np.ndarray] = None) -> None:
        """x [n,E], what the attention of the layer reads at positions first, first + 1, ..., before scores are asked for; types [n] of the tokens or none."""

    def score_scale(self, head_size: int) -> float:
        """Factor on q k."""
        return 1 / math.sqrt(head_size)

    def bias(self, head: int, query: int, key: int) -> float:
        """Score added for one head and one pair of positions."""
        return 0.0

    def scores(self, head: int, q: np.ndarray, keys: np.ndarray, query: int, positions: Sequence[int]) -> np.ndarray:
        """Scores [n] of one query q [D] at position query against rotated keys [n,D] at positions, oldest first."""
        scale = self.score_scale(len(q))
        return np.array([scale * float(q @ key) + self.bias(head, query, p) for key, p in zip(keys, positions, strict=True)])

    def values(self, head: int, values: np.ndarray, query: int, positions: Sequence[int]) -> np.ndarray:
        """What a query at position query mixes [n,D] of values [n,D] at positions."""
        return values


class PositionEncoding(torch.nn.Module):
    """Identity at every hook; an encoding overrides those where it acts, and `oracle`.

    `embed` and `bias` belong to the model, which has one instance; `rotate`, `observe` and `rescore` to a layer.
    `shared`: all layers use that instance; where False, each has one of its own, with trained weights of its own.
    `works_in`: attentions it has a meaning in; one that looks back only is causal, one that mixes neighbours on both sides bidirectional.
    `axes`: coordinates of a token beside its place in the sequence; where above 0, positions are [axes,B,S] in `embed` and `rotate`.
    `chunk`: tokens of a row that a session feeds at a time; what an encoding makes of size [S,T] is bounded by it.
    """

    shared = True
    works_in: Tuple[str, ...] = ("causal", "bidirectional")
    axes = 0
    chunk = 256  # the quickest at widths 768 and 2048 (bench/prefill.py): weights are read often enough, and what a layer makes stays in the cache of a core

    def embed(self, x: Tensor, positions: Tensor) -> Tensor:
        """x [B,S,E], positions [B,S] int64 (-1 padding) to [B,S,E]."""
        return x

    def embed_next(self, x: Tensor, positions: Tensor, states: List[Tensor]) -> Tuple[Tensor, List[Tensor]]:
        """As `embed`, with the states that `embed_states` declares; returns their next values."""
        return self.embed(x, positions), states

    def rotate(self, q: Tensor, k: Tensor, positions: Tensor) -> Tuple[Tensor, Tensor]:
        """q [B,S,H,D], k [B,S,K,D], positions [B,S] int64 (-1 padding) to the same shapes, D being `key_size` afterwards."""
        return q, k

    def bias(self, q_positions: Tensor, k_positions: Tensor) -> Optional[Tensor]:
        """q_positions [B,S], k_positions [B,T] int64 to scores [B,H,S,T] float32, or None for none; entries at padding are ignored."""
        return None

    def observe(self, x: Tensor, k: Tensor, positions: Tensor, write_index: Tensor, states: List[Tensor]) -> List[Tensor]:
        """x [B,S,E] that the attention reads, its rotated keys k [B,S,K,D], and the states that `layer_states` declares; returns their next values, which
        `rescore` sees.

        What is returned behind them reaches the `rescore` of this call only. Attention without a cache has no states;
        where its model has segments, `states` is the token types [B,S] int64."""
        return states

    def rescore(
        self, q: Tensor, keys: Tensor, values: Tensor, mask: Tensor, positions: Tensor, key_positions: Tensor, scale: float, states: List[Tensor]
    ) -> Tensor:
        """The attention itself, for encodings whose scores depend on content: q [B,S,H,D] (rotated), keys and values [B,K,T,D], mask [B,1 or H,S,T],
        positions [B,S], key_positions [B,T] to [B,S,H*D]. Sizes in T are those of the target's cache: only `ops` may name them."""
        return ops.attend(q, keys, values, mask, None, scale)

    def prepare(self) -> None:
        """Rebuild tables that are derived from weights. Called before every export and comparison."""

    def key_size(self, head_size: int) -> int:
        """Width of the queries and keys that `rotate` makes of heads of size D."""
        return head_size

    def token_width(self, width: int) -> int:
        """Width of the token table of a model of width E; where it is not E, `embed` makes [B,S,E] of it."""
        return width

    def initialise_tokens(self, table: Tensor) -> None:
        """Starting values of the token table [V, token_width], before training."""
        torch.nn.init.normal_(table, std=0.02)  # the standard deviation of GPT-2

    def embed_states(self) -> List[Carried]:
        return []

    def layer_states(self) -> List[Carried]:
        return []

    def score_scale(self, head_size: int) -> float:
        """Factor on q k."""
        return 1 / math.sqrt(head_size)

    def oracle(self) -> Oracle:
        return Oracle()


class Table(torch.nn.Module):
    """Rows [M,n] built in float64, kept in float32 whatever the model is cast to, read with Gather.

    Raises:
        ValueError: rows that are not finite.
    """

    rows: Tensor

    def __init__(self, rows: np.ndarray) -> None:
        super().__init__()
        with np.errstate(over="ignore"):  # said below, once
            self.exact = np.ascontiguousarray(rows, dtype=np.float32)
        if not np.isfinite(self.exact).all():
            raise ValueError("encoding: tables hold finite numbers, got others; choose parameters of a usual size")
        self.register_buffer("rows", torch.from_numpy(self.exact), persistent=False)

    def _apply(self, fn, recurse=True):  # type: ignore[no-untyped-def]
        super()._apply(fn, recurse)
        if self.rows.device.type != "meta":  # a cast to half and back would keep half the digits: take the exact rows again
            self.rows = torch.from_numpy(self.exact).to(self.rows.device)
        return self

    def forward(self, positions: Tensor) -> Tensor:
        """positions [B,S] int64, -1 read as 0, to [B,S,n] float32."""
        return torch.nn.functional.embedding(positions.clamp(min=0), self.rows)

    def of_keys(self, key_positions: Tensor) -> Tensor:
        """key_positions [B,T] int64 to [B,T,n]. Slots behind a shorter row may count past the table: their rows mean nothing, and nobody sees them."""
        return torch.nn.functional.embedding(key_positions.clamp(0, self.rows.size(0) - 1), self.rows)


class Exact(torch.nn.Module):
    """A trained tensor that stays float32 when the model is cast: what multiplies positions must not lose digits."""

    def __init__(self, value: Tensor) -> None:
        super().__init__()
        self.value = torch.nn.Parameter(value.to(torch.float32))

    def _apply(self, fn, recurse=True):  # type: ignore[no-untyped-def]
        self.value.data = self.value.data.to(fn(torch.empty(0, device=self.value.device)).device)
        return self

    def forward(self) -> Tensor:
        """The tensor, float32."""
        return self.value


def prepare_loaded(encoding: PositionEncoding, _: object) -> None:
    """After load_state_dict: tables follow the weights."""
    encoding.prepare()
