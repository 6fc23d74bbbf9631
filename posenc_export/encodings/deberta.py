"""Disentangled attention (He et al. 2021, DeBERTa, 3.1; log buckets as in DeBERTa-v2 and v3)."""

import math
from typing import Literal

import numpy as np
import torch
from torch import Tensor

from posenc_export import ops
from posenc_export.encodings.shared.base import Geometry, Oracle, PositionEncoding, Seen, StateSpec
from posenc_export.encodings.shared.buckets import bucket_edges, counted
from posenc_export.shared.refusal import refusal

TERMS = {"both": 2, "c2p": 1, "p2c": 1}  # number of terms besides content


class DeBERTa(PositionEncoding):
    """scores (q_i . k_j + q_i . Kr[d] + k_j . Qr[d]) / sqrt(3 D), d = clip(delta(i - j) + span, 0,
    2 span - 1); Kr, Qr projected from a trained table.

    delta is i - j in v1. In v2 and v3, distances from span / 2 on share buckets that grow
    logarithmically up to max_relative. Both added terms use row d, as in the authors' code and all
    published checkpoints; the paper (3.1) uses delta(j,i) for the term with Qr. With only one of
    the terms, the divisor is sqrt(2 D). The enhanced mask decoder (3.2) is not included, because
    fine-tuned models do not use it.

    The products of a key with Qr are computed when the key arrives, and cached. If a checkpoint
    shares projections with the content (share_att_key), their weights are copied. Memory: products
    of queries [B,H,S,2 span], and the cached products of keys [B,H,T,2 span].

    State: products of keys with Qr, float32, if attention is causal.

    Args:
        geometry: width E, heads, head size D.
        version: "v1" (linear) or "v2" (log buckets, also for v3).
        span: rows of distances on each side: max_relative_positions of v1, position_buckets of v2,
            an even number.
        max_relative: distance of the last bucket of v2, in tokens, above span.
        terms: "both", or one alone: "c2p" with Kr (content to position), "p2c" with Qr (position to
            content); pos_att_type of a checkpoint.

    Weights:
        table: one row per distance, [2 span,E], from the furthest key after the query to the
            furthest key before it.
        of_keys.weight, of_keys.bias: projection of rows to Kr, [H*D,E] and [H*D], heads outermost;
            absent if terms is "p2c".
        of_queries.weight, of_queries.bias: projection of rows to Qr, of the same shapes; absent if
            terms is "c2p".
    """

    shared = False
    most = {"span": 1 << 20, "max_relative": 1 << 20}

    def rescore(self, q: Tensor, seen: Seen, scale: float, states: list[Tensor]) -> Tensor:
        """As in PositionEncoding; states [products with Qr [B,H,T,2 span]] or []."""
        behind = (-ops.distances(seen.positions, seen.key_positions)).clamp(-self.reach, self.reach)
        place = (behind + self.reach).to(torch.int64)
        index = torch.nn.functional.embedding(place, self.of_distance.unsqueeze(1)).squeeze(4)
        rows: Tensor | None = None
        if self.of_keys is not None:
            by_query = (scale * q.to(torch.float32)).transpose(1, 2)  # [B,H,S,D]
            rows = by_query @ self.projected(self.of_keys.weight, self.of_keys.bias)
        key_rows: Tensor | None = None
        if self.of_queries is not None:
            key_rows = states[0]
        content = ops.pick(rows, index, key_rows, scale)
        return ops.attend(q, seen.keys, seen.values, seen.mask, content, scale)

    def edges(self) -> dict[str, int]:
        return bucket_edges(self.of_distance, self.reach)

    def row_rules(self) -> list[str]:
        behind = f"max(q - k, -{self.reach})"
        place = f"min({behind}, {self.reach}) + {self.reach}"
        return [place, counted(behind, self.of_distance, -self.reach)]

    def __init__(
        self,
        geometry: Geometry,
        version: Literal["v1", "v2"] = "v2",
        span: int = 32,
        max_relative: int = 128,
        terms: Literal["both", "c2p", "p2c"] = "both",
    ) -> None:
        super().__init__()
        if span < 2 or (version == "v2" and (span % 2 or max_relative <= span)):
            rule = "span of at least 2, in v2 even and below max_relative"
            raise refusal("deberta", rule, f"span={span}, max_relative={max_relative}")
        self.version, self.span, self.max_relative = version, span, max_relative
        self.count, self.reach = TERMS[terms], span if version == "v1" else max_relative
        self.heads, self.head_size = geometry.heads, geometry.head_size
        self.causal, width = geometry.causal, geometry.width
        self.of_head: Tensor
        self.of_distance: Tensor
        self.register_buffer("of_head", geometry.key_head(), persistent=False)
        deltas = np.arange(-self.reach, self.reach + 1)
        if version == "v2":
            deltas = _log_buckets(deltas, span, max_relative)
        rows = torch.from_numpy(np.clip(deltas + span, 0, 2 * span - 1))
        self.register_buffer("of_distance", rows, persistent=False)
        self.table = torch.nn.Parameter(torch.randn(2 * span, width))
        size = self.heads * self.head_size
        self.of_keys = None if terms == "p2c" else torch.nn.Linear(width, size)
        self.of_queries = None if terms == "c2p" else torch.nn.Linear(width, size)

    def observe(
        self, x: Tensor, k: Tensor, positions: Tensor, write_index: Tensor, states: list[Tensor]
    ) -> list[Tensor]:
        """states [products with Qr [B,H,P,2 span]] to [B,H,T,2 span], or of the call."""
        if self.of_queries is None:
            return states
        by_key = k.index_select(2, self.of_head).to(torch.float32).transpose(1, 2)  # [B,H,S,D]
        by_key = by_key @ self.projected(self.of_queries.weight, self.of_queries.bias)
        if not self.causal:
            return [by_key]
        # Padding may hold NaN or infinities, which a cache would keep.
        valid = positions.ge(0).unsqueeze(1).unsqueeze(3)
        by_key = torch.where(valid, by_key, torch.zeros_like(by_key))
        return [ops.append(states[0], by_key.transpose(1, 2), write_index)]

    def layer_states(self) -> list[StateSpec]:
        if not self.causal or self.of_queries is None:
            return []
        return [StateSpec("products", (self.heads, 2 * self.span), grows=True, dtype="float32")]

    def projected(self, weight: Tensor, bias: Tensor) -> Tensor:
        """Project the table: [1,H,D,2 span] float32."""
        rows = torch.nn.functional.linear(
            self.table.to(torch.float32), weight.to(torch.float32), bias.to(torch.float32)
        )
        return rows.view(1, 2 * self.span, self.heads, self.head_size).permute(0, 2, 3, 1)

    def score_scale(self, head_size: int) -> float:
        return 1 / math.sqrt((1 + self.count) * head_size)


def _log_buckets(distances: np.ndarray, span: int, max_relative: int) -> np.ndarray:
    """Buckets [n] of signed distances [n], with borders from float32 logarithms."""
    middle = span // 2
    far = np.maximum(np.abs(distances), middle).astype(np.float32)
    widest = np.log(np.float32((max_relative - 1) / middle))
    steps = np.log(far / np.float32(middle)) / widest * np.float32(middle - 1)
    buckets = np.sign(distances) * (np.ceil(steps).astype(np.int64) + middle)
    return np.where(np.abs(distances) <= middle, distances, buckets)


class DeBERTaOracle(Oracle, of=DeBERTa):
    def __init__(self, encoding: DeBERTa) -> None:
        super().__init__(encoding)
        self.keys, self.queries = self.projected("of_keys"), self.projected("of_queries")

    def projected(self, part: str) -> np.ndarray:
        """Rows of the table projected to [2 span,H,D]; zeros without a projection."""
        e, table = self.encoding, self.weights["table"]
        if f"{part}.weight" not in self.weights:
            return np.zeros((len(table), e.heads, e.head_size))
        rows = table @ self.weights[f"{part}.weight"].T + self.weights[f"{part}.bias"]
        return rows.reshape(len(table), e.heads, -1)

    def score_scale(self, head_size: int) -> float:
        return float((1 + self.encoding.count) * head_size) ** -0.5

    def content(self, head: int, q: np.ndarray, k: np.ndarray, query: int, key: int) -> float:
        row = self.row(query - key)
        terms = q @ self.keys[row, head] + k @ self.queries[row, head]
        return self.score_scale(len(q)) * float(terms)

    def row(self, behind: int) -> int:
        e, delta = self.encoding, behind
        if e.version == "v2":
            delta = int(_log_buckets(np.array([behind]), e.span, e.max_relative)[0])
        return min(max(delta + e.span, 0), 2 * e.span - 1)
