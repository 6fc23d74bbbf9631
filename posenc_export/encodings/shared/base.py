"""The contract of a position encoding: hooks that default to the identity, declared states, a
range of positions, and a float64 oracle.
"""

import math
from dataclasses import dataclass
from typing import Any, Callable, Dict, List, Literal, Mapping, Optional, Sequence, Tuple, Type

import numpy as np
import torch
from torch import Tensor

from posenc_export import ops

Rows = Callable[[np.ndarray], np.ndarray]


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
    sizes: Tuple[int, ...]
    grows: bool = False
    dtype: str = ""


@dataclass(frozen=True)
class Edge:
    """A place at which a computation changes, so that both sides of it are compared.

    Args:
        name: what changes there, such as "window 512".
        at: first position or distance behind the edge.
        by: "distance" between a query and a key in tokens, or "position" of a query.
    """

    name: str
    at: int
    by: Literal["distance", "position"] = "distance"


class Weights(Dict[str, np.ndarray]):
    """Trained numbers of an encoding by name, float64.

    Args:
        encoding: encoding that has them, or None for none.

    Raises:
        ValueError: a name that is not that of a trained number is read.
    """

    def __init__(self, encoding: Any) -> None:
        super().__init__(
            {}
            if encoding is None
            else {name: in_float64(value) for name, value in encoding.named_parameters()}
        )
        self.cls, self.fixed = (
            type(encoding).__name__,
            () if encoding is None else tuple(name for name, _ in encoding.named_buffers()),
        )

    def __missing__(self, name: str) -> np.ndarray:
        found, remedy = repr(name), "read one of these, or an attribute of self.encoding"
        if name in self.fixed:
            found, remedy = (
                f"{name}, a buffer",
                "keep fixed numbers in a Table and trained ones in an Exact",
            )
        rule = f"the name of a trained number ({', '.join(self) or 'it has none'})"
        raise ValueError(
            f"encoding {self.cls}: expected its oracle to read {rule}, got {found}; {remedy}"
        )


class Oracle:
    """An independent float64 implementation of the formula, one entry at a time. Each method is the
    identity unless overridden.

    `class XOracle(Oracle, of=X)` makes a subclass the oracle of the encoding X.

    Args:
        encoding: the encoding that the oracle judges; an oracle reads its parameters, and its
            trained numbers from `weights`, by name, in float64.
    """

    table_ulps = 0.5  # largest rounding of a table's numbers to float32, in units of the last place

    def __init_subclass__(cls, of: Optional[Type["PositionEncoding"]] = None) -> None:
        super().__init_subclass__()
        if of is not None:
            of.oracle_class = cls

    def __init__(self, encoding: Any = None) -> None:
        self.encoding = encoding
        self.weights: Dict[str, np.ndarray] = Weights(encoding)

    def tables(self) -> Mapping[str, Rows]:
        """State tables of positions: their rows [n,*] float64 by positions [n,1] float64.

        By name of the Table in the encoding. An export compares every row of these tables.
        """
        return {}

    def begin(self, positions: Sequence[int]) -> None:
        """Keep the largest position of a row, before its tokens are rotated; for encodings that
        depend on the length of a call.
        """
        self.longest = max(positions)

    def embed(self, x: np.ndarray, position: int) -> np.ndarray:
        """Encode one token x [E], float64."""
        return x

    def embed_rows(self, x: np.ndarray, positions: Sequence[int]) -> np.ndarray:
        """Encode x [n,E], the tokens of a row from its first token on; for encodings where a
        token depends on earlier tokens.
        """
        return np.stack([self.embed(row.copy(), p) for row, p in zip(x, positions, strict=True)])

    def rotate(self, x: np.ndarray, position: int) -> np.ndarray:
        """Rotate one query head x [D], float64; also one key head, unless `rotate_key` is
        overridden.
        """
        return x

    def rotate_key(self, x: np.ndarray, position: int) -> np.ndarray:
        """Rotate one key head x [D], float64."""
        return self.rotate(x, position)

    def rotate_heads(self, x: np.ndarray, position: int) -> np.ndarray:
        """Rotate all query heads of a token, x [H,D]; for encodings that rotate heads
        differently.
        """
        return np.stack([self.rotate(head, position) for head in x])

    def rotate_key_heads(self, x: np.ndarray, position: int) -> np.ndarray:
        """Rotate all key heads of a token, x [K,D]."""
        return np.stack([self.rotate_key(head, position) for head in x])

    def observe(self, x: np.ndarray, first: int = 0, types: Optional[np.ndarray] = None) -> None:
        """Keep x [n,E], the input of the attention at positions first, first + 1, ..., and the
        token types [n] or None, for `content`.
        """
        self.x, self.first, self.types = x, first, types

    def score_scale(self, head_size: int) -> float:
        """Factor on the products q k."""
        return 1 / math.sqrt(head_size)

    def bias(self, head: int, query: int, key: int) -> float:
        """Bias added to the score of one head and one pair of positions."""
        return 0.0

    def content(self, head: int, q: np.ndarray, k: np.ndarray, query: int, key: int) -> float:
        """Term of the score of one query q [D] and one rotated key k [D], at positions query and
        key, that depends on content.
        """
        return 0.0

    def scores(
        self, head: int, q: np.ndarray, keys: np.ndarray, query: int, positions: Sequence[int]
    ) -> np.ndarray:
        """Scores [n] of one query q [D] at position query against rotated keys [n,D] at
        positions, oldest first.
        """
        scale = self.score_scale(len(q))
        return np.array(
            [
                scale * float(q @ k)
                + self.bias(head, query, p)
                + self.content(head, q, k, query, p)
                for k, p in zip(keys, positions, strict=True)
            ]
        )

    def values(
        self, head: int, values: np.ndarray, query: int, positions: Sequence[int]
    ) -> np.ndarray:
        """Values [n,D] that a query at position query mixes, given the values [n,D] at
        positions.
        """
        return values


class PositionEncoding(torch.nn.Module):
    """Base class of encodings. Every hook is the identity; an encoding overrides the hooks where it
    acts, and `oracle`.

    The model calls `embed` and `bias` of one instance; each layer calls `rotate`, `observe` and
    `rescore`. `shared`: whether all layers use one instance; if False, each layer has its own
    instance with its own trained weights. `works_in`: kinds of attention that the encoding is
    defined for, "causal" and "bidirectional". `axes`: number of coordinates of a token besides its
    position in the sequence; if above 0, `embed` and `rotate` take positions [axes,B,S]. `window`:
    rows and columns of the window whose places, row by row, are the positions that `bias` reads,
    for pictures; (0, 0) for positions of a sequence. `least`, `above`, `most`: smallest values,
    values that are exceeded, and largest values of parameters, by name; others are refused before
    anything is built. `chunk`: number of tokens of a row that a session feeds at a time; it bounds
    the tensors of size [S,T] that an encoding creates.
    """

    oracle_class = Oracle
    shared = True
    works_in: Tuple[str, ...] = ("causal", "bidirectional")
    axes = 0
    window = (0, 0)  # without a type annotation, which TorchScript would read
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
        self, x: Tensor, positions: Tensor, states: List[Tensor]
    ) -> Tuple[Tensor, List[Tensor]]:
        """`embed` for encodings with states: takes the states that `embed_states` declares and
        returns their next values too.
        """
        return self.embed(x, positions), states

    def rotate(self, q: Tensor, k: Tensor, positions: Tensor) -> Tuple[Tensor, Tensor]:
        """q [B,S,H,D], k [B,S,K,D], positions [B,S] int64 (-1 padding) to the same shapes, with
        `key_size` in place of D.
        """
        return q, k

    def bias(self, q_positions: Tensor, k_positions: Tensor) -> Optional[Tensor]:
        """q_positions [B,S], k_positions [B,T] int64 to biases [B,H,S,T] float32, or None for no
        bias; entries at padding are ignored.
        """
        return None

    def observe(
        self, x: Tensor, k: Tensor, positions: Tensor, write_index: Tensor, states: List[Tensor]
    ) -> List[Tensor]:
        """Return the next values of the states that `layer_states` declares, which `rescore`
        receives.

        x [B,S,E] is the input of the attention and k [B,S,K,D] its rotated keys. Tensors returned
        after the states reach the `rescore` of this call only. Attention without a cache has no
        states; if its model has segments, `states` is the token types [B,S] int64.
        """
        return states

    def rescore(
        self,
        q: Tensor,
        keys: Tensor,
        values: Tensor,
        mask: Tensor,
        positions: Tensor,
        key_positions: Tensor,
        scale: float,
        states: List[Tensor],
    ) -> Tensor:
        """Compute the attention, for encodings whose scores depend on content: q [B,S,H,D]
        (rotated), keys and values [B,K,T,D], mask [B,1 or H,S,T], positions [B,S], key_positions
        [B,T] to [B,S,H*D]. T depends on the cache of the target, so that only `ops` may refer to
        it.
        """
        return ops.attend(q, keys, values, mask, None, scale)

    def edges(self) -> List[Edge]:
        """Positions and distances at which the formula changes. Every export compares both sides
        of them.
        """
        return []

    def prepare(self) -> None:
        """Rebuild tables that are derived from weights. Called before every export and
        comparison.
        """

    def key_size(self, head_size: int) -> int:
        """Size of the query and key heads that `rotate` returns for heads of size D."""
        return head_size

    def token_width(self, width: int) -> int:
        """Width of the token table of a model of width E; if it is not E, `embed` converts
        [B,S,token_width] to [B,S,E].
        """
        return width

    def initialise_tokens(self, table: Tensor) -> None:
        """Initialise the token table [V, token_width] in place."""
        torch.nn.init.normal_(table, std=0.02)  # the standard deviation of GPT-2

    def embed_states(self) -> List[StateSpec]:
        """States of `embed_next`."""
        return []

    def layer_states(self) -> List[StateSpec]:
        """States of `observe` and `rescore`, in every layer."""
        return []

    def score_scale(self, head_size: int) -> float:
        """Factor on the products q k."""
        return 1 / math.sqrt(head_size)

    def oracle(self) -> Oracle:
        """Return the oracle, with the current weights."""
        return self.oracle_class(self)


def in_float64(value: Tensor) -> np.ndarray:
    """A copy of a trained tensor for an oracle."""
    return value.detach().double().numpy()


class Table(torch.nn.Module):
    """Rows [M,n] computed in float64, kept in float32 when the model is cast, and read with Gather.

    Raises:
        ValueError: rows that are not finite.
    """

    rows: Tensor

    def __init__(self, rows: np.ndarray) -> None:
        super().__init__()
        with np.errstate(over="ignore"):  # reported below
            self.exact = np.ascontiguousarray(rows, dtype=np.float32)
        if not np.isfinite(self.exact).all():
            raise ValueError(
                "encoding: expected tables of finite numbers, got infinity or NaN; choose "
                "parameters closer to their defaults"
            )
        self.register_buffer("rows", torch.from_numpy(self.exact), persistent=False)

    def _apply(self, fn, recurse=True):  # type: ignore[no-untyped-def]
        super()._apply(fn, recurse)
        if (
            self.rows.device.type != "meta"
        ):  # a cast to float16 loses digits: restore the exact rows
            self.rows = torch.from_numpy(self.exact).to(self.rows.device)
        return self

    def forward(self, positions: Tensor) -> Tensor:
        """positions [B,S] int64 (-1 is read as 0) to [B,S,n] float32."""
        return torch.nn.functional.embedding(positions.clamp(min=0), self.rows)


class Exact(torch.nn.Module):
    """A trained tensor that stays float32 when the model is cast, because it multiplies
    positions.
    """

    def __init__(self, value: Tensor) -> None:
        super().__init__()
        self.value = torch.nn.Parameter(value.to(torch.float32))

    def _apply(self, fn, recurse=True):  # type: ignore[no-untyped-def]
        self.value.data = self.value.data.to(fn(torch.empty(0, device=self.value.device)).device)
        return self

    def forward(self) -> Tensor:
        """Return the tensor, float32."""
        return self.value


def prepare_loaded(encoding: PositionEncoding, _: object) -> None:
    """Rebuild tables after load_state_dict."""
    encoding.prepare()


def weight_versions(encoding: PositionEncoding) -> List[int]:
    """Return the version counter of each parameter. It grows when the parameter is modified in
    place, as optimisers do.
    """
    return [parameter._version for parameter in encoding.parameters()]


def prepare_if_changed(encoding: PositionEncoding) -> None:
    """Rebuild tables if weights have changed since `prepare`, which stores weight_versions in
    the attribute `prepared`.
    """
    if encoding.prepared != weight_versions(encoding):
        encoding.prepare()
