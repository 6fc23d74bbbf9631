"""Attention of one layer, in one implementation for all encodings and targets."""

from typing import Any, List, Optional, Sequence, Tuple

import numpy as np
import torch
from torch import Tensor

from posenc_export import ops
from posenc_export.encodings.shared.base import PositionEncoding, Seen, StateSpec
from posenc_export.encodings.shared.combined import overrides
from posenc_export.models.config import AttentionConfig
from posenc_export.models.linear_attention import LinearAttention
from posenc_export.models.parts import build, float64
from posenc_export.ops import TokenPlaces
from posenc_export.shared.places import evaluate
from posenc_export.shared.refusal import refusal


class Attention(torch.nn.Module):
    """Grouped-query attention: project, rotate, append to the cache, attend, project. Bidirectional
    attention has no cache.

    Args:
        width: model width E.
        config: sizes and parts.
        encoding: applied to queries, keys and scores. Its bias is part of the mask.

    Raises:
        ValueError: the encoding computes scores itself, and the config has a scale, softcap or
            sinks.
    """

    sinks: Optional[Tensor]

    def __init__(self, width: int, config: AttentionConfig, encoding: PositionEncoding) -> None:
        super().__init__()
        self.by_content = overrides(encoding, "rescore", "observe")
        unusable = [name for name in ("scale", "softcap", "sinks") if getattr(config, name)]
        if self.by_content and unusable:
            names = ", ".join(spec["name"] for spec in config.encodings)
            rule = f"no {', '.join(unusable)} with {names}, which computes scores itself"
            raise refusal("attention", rule, "both", "remove one of them")
        self.heads, self.kv_heads, self.head_size = config.heads, config.kv_heads, config.head_size
        self.given_scale = config.scale
        size, own = config.head_size, config.scale
        self.scale = encoding.score_scale(size) if own is None else own
        self.softcap, self.cached, self.encoding = config.softcap or 0.0, config.causal, encoding
        self.kept = len(encoding.layer_states())
        self.visibility = build("sees", config.sees)
        self.projection = build(
            "projection", config.projection, width, config.heads, config.kv_heads, config.head_size
        )
        sinks = torch.nn.Parameter(torch.zeros(config.heads)) if config.sinks else None
        self.register_parameter("sinks", sinks)

    @torch.jit.unused
    def states(self) -> List[StateSpec]:
        """Return the states that are kept between calls, in the order of `forward`."""
        if not self.cached:
            return []
        key = (self.kv_heads, self.encoding.key_size(self.head_size))
        value = (self.kv_heads, self.head_size)
        caches = [StateSpec("key", key, grows=True), StateSpec("value", value, grows=True)]
        return [*caches, *self.encoding.layer_states()]

    def forward(
        self,
        x: Tensor,
        places: TokenPlaces,
        mask: Tensor,
        states: List[Tensor],
    ) -> Tuple[Tensor, List[Tensor]]:
        """x [B,S,E], mask [B,1 or H,S,T], states to [B,S,E], new states."""
        q, k, v = self.projection(x)  # [B,S,H*D], [B,S,K*D], [B,S,K*D]
        q = ops.split_heads(q, self.heads)  # [B,S,H,D]
        k = ops.split_heads(k, self.kv_heads)  # [B,S,K,D]
        v = ops.split_heads(v, self.kv_heads)  # [B,S,K,D]
        q, k = self.encoding.rotate(q, k, places.coordinates)
        positions, write_index = places.positions, places.write_index
        if self.cached:
            keys = ops.append(states[0], k, write_index)  # [B,K,T,D]
            values = ops.append(states[1], v, write_index)
            carried = self.encoding.observe(x, k, positions, write_index, states[2:])
            present = [keys, values] + carried[: self.kept]
        else:
            keys, values, present = k.transpose(1, 2), v.transpose(1, 2), states[:0]  # [B,K,S,D]
            carried = self.encoding.observe(x, k, positions, write_index, states)
        if self.by_content:
            seen = Seen(keys, values, mask, positions, places.key_positions)
            y = self.encoding.rescore(q, seen, self.scale, carried)
        else:
            y = ops.attend(q, keys, values, mask, None, self.scale, self.softcap, self.sinks)
        return self.projection.output(y), present  # [B,S,E]

    def exact(self, x: np.ndarray, positions: range, places: Sequence[Any]) -> np.ndarray:
        """One row x [n,E], positions, coordinates to [n,E], float64, by query."""
        oracle = self.encoding.oracle()
        q, k, v = self.projection.exact(x)
        q = np.stack([oracle.rotate_heads(*pair) for pair in zip(q, places, strict=True)])
        k = np.stack([oracle.rotate_key_heads(*pair) for pair in zip(k, places, strict=True)])
        oracle.observe(x, positions[0])
        sinks = np.full(self.heads, -np.inf) if self.sinks is None else float64.numbers(self.sinks)
        points = places if self.encoding.grid_bias else positions
        keys_at = np.array(positions)
        weighted_values = np.zeros((len(x), self.heads, v.shape[-1]))
        for head in range(self.heads):
            group = head // (self.heads // self.kv_heads)
            for i, query in enumerate(positions):
                seen = np.flatnonzero(
                    evaluate(self.visibility.rule, {"q": query, "k": keys_at})
                ).tolist()
                at = [points[j] for j in seen]
                vector, keys = q[i, head], k[seen, group]
                scores = self._exact_scores(oracle, head, vector, keys, points[i], at)
                of_keys = oracle.values(head, v[seen, group], points[i], at)
                weighted_values[i, head] = float64.attend(scores, of_keys, sinks[head])
        return float64.linear(self.projection.output, weighted_values.reshape(len(x), -1))

    def _exact_scores(
        self, oracle: Any, head: int, q: np.ndarray, keys: np.ndarray, query: Any, at: List[Any]
    ) -> np.ndarray:
        if self.by_content:
            return np.asarray(oracle.scores(head, q, keys, query, at))
        scale = oracle.score_scale(len(q)) if self.given_scale is None else self.given_scale
        products = keys @ q * scale
        capped = self.softcap * np.tanh(products / self.softcap) if self.softcap else products
        return capped + np.array([oracle.bias(head, query, p) for p in at])


def check_direction(encoding: PositionEncoding, causal: bool) -> None:
    """Raise ValueError if an encoding does not support causal or bidirectional attention."""
    kind = "causal" if causal else "bidirectional"
    # A step counts coordinates on, as positions.
    works_in = ("bidirectional",) if encoding.coordinate_range else encoding.works_in
    if kind not in works_in:
        supported = works_in[0] if works_in else "no"
        rule = f"{supported} attention for {type(encoding).__name__}"
        raise refusal("attention", rule, kind, "choose another encoding or attention")


def attention(width: int, config: AttentionConfig, encoding: PositionEncoding) -> torch.nn.Module:
    """Build the attention that a config describes. ValueError: as check_direction."""
    check_direction(encoding, config.causal)
    kinds = {"softmax": Attention, "linear": LinearAttention}
    return kinds[config.mechanism](width, config, encoding)
