"""Relative sinusoids with content and position terms (Dai et al. 2019, Transformer-XL, 3.3;
XLNet the same).
"""

import math
from typing import List, Literal, Mapping, Optional

import numpy as np
import torch
from torch import Tensor

from posenc_export import ops
from posenc_export.encodings.shared import sinusoids
from posenc_export.encodings.shared.base import (
    Edge,
    Geometry,
    Oracle,
    PositionEncoding,
    Rows,
    Table,
)
from posenc_export.shared.refusal import refusal


class TransformerXL(PositionEncoding):
    """scores ((q_i + u_h) . k_j + (q_i + v_h) . W_h R_d) / sqrt(D), d = i - j, R_d = [sin(d w_k),
    cos(d w_k)], w_k = 10000^(-2k/E); u, v, W trained.

    The second term is ops.wave_products of W_h^T (q_i + v_h), exact for any offset and gap. Memory
    besides the scores: rotated queries [B,H,S,E] and sinusoids of keys [B,T,E]. With a clamp,
    distances d are clipped to -clamp .. clamp.

    With segments, ((q_i + s_h) . e_h[t_i != t_j]) / sqrt(D) is added, with token types t and
    trained s, e (Yang et al. 2019, XLNet, Relative Segment Encodings). Without token types the term
    is the same for all keys and is left out.

    Hook: rescore. State: none. Range: 0 .. max_positions - 1.

    Args:
        geometry: width E (even) of R, heads, head size D.
        clamp: largest distance in tokens, clamp_len of Transformer-XL and XLNet; 0 for no limit.
        segments: "pairs" adds the term of segments, as XLNet; "none", as Transformer-XL.

    Weights:
        u, v: added to queries in the first and the second term, [H,D] each; r_w_bias and r_r_bias
            of checkpoints.
        weight: W, [H,D,E]: columns of sines, then of cosines, which alternate in Conformers
            (linear_pos of Wav2Vec2-Conformer, relative_k_proj of Parakeet).
        s: added to queries in the term of segments, [H,D], r_s_bias of XLNet; if segments is
            "pairs".
        segment: e for tokens of the same segment, then for tokens of different segments, [2,H,D],
            seg_embed of XLNet; if segments is "pairs".

    Raises:
        ValueError: odd width, a negative clamp, unknown segments.
    """

    shared = False
    least = {"clamp": 0}
    s: Optional[Tensor]
    segment: Optional[Tensor]

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
        """As in PositionEncoding; states [token types [B,S]] or []."""
        by_head = (q.to(torch.float32) + self.v.to(torch.float32)).transpose(1, 2)
        projected = by_head @ self.weight.to(torch.float32)
        relative = ops.wave_products(projected, positions, key_positions, self.waves.rows)
        if self.clamp > 0:
            behind, ahead = (projected @ self.ends.rows).split(1, dim=-1)
            distances = ops.distances(positions, key_positions)
            relative = torch.where(
                distances.lt(-self.clamp),
                behind,
                torch.where(distances.gt(self.clamp), ahead, relative),
            )
        added, segment = self.s, self.segment
        if added is not None and segment is not None and len(states) > 0:
            by_head = (q.to(torch.float32) + added.to(torch.float32)).transpose(1, 2)
            of_pairs = by_head @ segment.to(torch.float32).permute(1, 2, 0)  # [B,H,S,2]
            same, other = of_pairs.split(1, dim=-1)
            is_same = ops.distances(states[0], states[0]).eq(0)
            relative = relative + torch.where(is_same, same, other)
        return ops.attend((q + self.u.to(q.dtype)), keys, values, mask, scale * relative, scale)

    def edges(self) -> List[Edge]:
        return [Edge(f"clamp {self.clamp}", self.clamp + 1)] if self.clamp else []

    def __init__(
        self, geometry: Geometry, clamp: int = 0, segments: Literal["none", "pairs"] = "none"
    ) -> None:
        super().__init__()
        if geometry.width % 2:
            raise refusal("transformer_xl", "an even width", geometry.width, "choose another width")
        self.width, self.clamp = geometry.width, clamp
        frequencies = sinusoids.frequencies(geometry.width)
        angles = np.arange(geometry.max_positions)[:, None] * frequencies
        # Cosines first, in the order of the rotated queries.
        self.waves = Table(np.concatenate((np.cos(angles), np.sin(angles)), axis=1))
        ends = np.outer(frequencies, (clamp, -clamp))  # before and after the query
        self.ends = Table(np.concatenate((np.sin(ends), np.cos(ends))))
        pairs, size = segments == "pairs", (geometry.heads, geometry.head_size)
        self.u = torch.nn.Parameter(0.5 * torch.randn(size))
        self.v = torch.nn.Parameter(0.5 * torch.randn(size))
        width = geometry.width
        self.weight = torch.nn.Parameter(torch.randn(*size, width) / math.sqrt(width))
        self.s = torch.nn.Parameter(0.5 * torch.randn(size)) if pairs else None
        self.segment = torch.nn.Parameter(torch.randn(2, *size)) if pairs else None


class TransformerXLOracle(Oracle, of=TransformerXL):
    def tables(self) -> Mapping[str, Rows]:
        rows = sinusoids.formula(self.encoding.width)

        def waves(positions: np.ndarray) -> np.ndarray:
            interleaved = rows(positions)
            return np.concatenate((interleaved[:, 1::2], interleaved[:, ::2]), axis=1)

        return {"waves": waves}

    def content(self, head: int, q: np.ndarray, k: np.ndarray, query: int, key: int) -> float:
        u, v, weight = (self.weights[name][head] for name in ("u", "v", "weight"))
        clamp, d = self.encoding.clamp, query - key
        waves = sinusoids.row(min(max(d, -clamp), clamp) if clamp else d, weight.shape[1])
        r = np.concatenate((waves[::2], waves[1::2]))
        score = u @ k + (q + v) @ (weight @ r) + self.segment_term(head, q, query, key)
        return float(score) / math.sqrt(len(q))

    def segment_term(self, head: int, q: np.ndarray, query: int, key: int) -> float:
        if self.types is None or "segment" not in self.weights:
            return 0.0
        other = int(self.types[query - self.first] != self.types[key - self.first])
        return float((q + self.weights["s"][head]) @ self.weights["segment"][other, head])
