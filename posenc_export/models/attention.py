"""Attention of one layer, in one implementation for all encodings and targets; linear attention."""

from typing import Any, Sequence

import numpy as np
import torch
from torch import Tensor

from posenc_export import ops
from posenc_export.encodings.shared.base import PositionEncoding, Seen, StateSpec
from posenc_export.encodings.shared.combined import overrides
from posenc_export.models.config import AttentionConfig
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

    sinks: Tensor | None

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

    def states(self) -> list[StateSpec]:
        """Return the states that are kept between calls, in the order of `forward`."""
        if not self.cached:
            return []
        key = (self.kv_heads, self.encoding.key_size(self.head_size))
        value = (self.kv_heads, self.head_size)
        caches = [StateSpec("key", key, grows=True), StateSpec("value", value, grows=True)]
        return [*caches, *self.encoding.layer_states()]

    def forward(
        self, x: Tensor, places: TokenPlaces, mask: Tensor, states: list[Tensor]
    ) -> tuple[Tensor, list[Tensor]]:
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
        keys_at, rule = np.array(positions), self.visibility.rule
        shown = [evaluate(rule, {"q": query, "k": keys_at}) for query in positions]
        seen_by = [np.flatnonzero(keys).tolist() for keys in shown]
        weighted_values = np.zeros((len(x), self.heads, v.shape[-1]))
        for head in range(self.heads):
            group = head // (self.heads // self.kv_heads)
            for i, seen in enumerate(seen_by):
                at = [points[j] for j in seen]
                vector, keys = q[i, head], k[seen, group]
                scores = self._exact_scores(oracle, head, vector, keys, points[i], at)
                of_keys = oracle.values(head, v[seen, group], points[i], at)
                weighted_values[i, head] = float64.attend(scores, of_keys, sinks[head])
        return float64.linear(self.projection.output, weighted_values.reshape(len(x), -1))

    def _exact_scores(
        self, oracle: Any, head: int, q: np.ndarray, keys: np.ndarray, query: Any, at: list[Any]
    ) -> np.ndarray:
        if self.by_content:
            return np.asarray(oracle.scores(head, q, keys, query, at))
        scale = oracle.score_scale(len(q)) if self.given_scale is None else self.given_scale
        products = keys @ q * scale
        capped = self.softcap * np.tanh(products / self.softcap) if self.softcap else products
        return capped + np.array([oracle.bias(head, query, p) for p in at])


class LinearAttention(Attention):
    """Linear attention with rotation (Katharopoulos et al. 2020; Su et al. 2021, RoFormer, eq. 19):
    y_i = sum_j (R_i phi(q_i)) . (R_j phi(k_j)) v_j / sum_j phi(q_i) . phi(k_j), phi = elu + 1.

    The divisor has no rotation R. The sums run over j <= i for sees "causal" and over all tokens
    for sees "both". State for "causal": sum_j (R_j phi(k_j)) v_j^T [B,H,D,D] and sum_j phi(k_j)
    [B,H,D], float32. The cost of a step does not depend on the position. A call of S tokens costs
    O(S^2) for "causal", so long inputs are best fed in chunks, and O(S) for "both", which has no
    state.

    Args:
        width: model width E.
        config: sizes and projection; kv_heads must equal heads, and scores have no settings.
        encoding: its `rotate` is applied. There are no scores for other hooks to act on.
    """

    def __init__(self, width: int, config: AttentionConfig, encoding: PositionEncoding) -> None:
        super().__init__(width, config, encoding)
        self.visibility = None  # a rule would be one of a mask, which is not read
        sees, names = config.sees["name"], ", ".join(spec["name"] for spec in config.encodings)
        heads, settings = f"{config.kv_heads} and {config.heads}", ("scale", "softcap", "sinks")
        unusable = ", ".join(name for name in settings if getattr(config, name))
        hooks = "encodings with hook embed or rotate, since there are no scores"
        for holds, rule, got in (
            (config.heads == config.kv_heads, "kv_heads equal to heads", heads),
            (sees in ("causal", "both"), "sees causal or both", sees),
            (not overrides(encoding, "bias", "rescore", "observe"), hooks, names),
            (not unusable, "no scale, softcap or sinks", unusable),
        ):
            if not holds:
                raise refusal("linear attention", rule, got, "change the config")

    def states(self) -> list[StateSpec]:
        """Return the states that are kept between calls, in the order of `forward`."""
        if not self.cached:
            return []
        summed = (self.heads, self.encoding.key_size(self.head_size), self.head_size)
        sizes = {"sum": summed, "divisor": (self.heads, self.head_size)}
        return [StateSpec(name, size, dtype="float32") for name, size in sizes.items()]

    def forward(
        self, x: Tensor, places: TokenPlaces, mask: Tensor, states: list[Tensor]
    ) -> tuple[Tensor, list[Tensor]]:
        """Shapes as Attention.forward. The mask is not used."""
        positions = places.positions
        q, k, v = self.projection(x)
        q, k = (_phi(ops.split_heads(part, self.heads).to(torch.float32)) for part in (q, k))
        valid = positions.ge(0).unsqueeze(2).unsqueeze(3)
        zero = torch.zeros([1], dtype=torch.float32, device=x.device)
        k = torch.where(valid, k, zero)
        values = ops.split_heads(v, self.heads).to(torch.float32).transpose(1, 2)  # [B,H,S,D]
        rotated_q, rotated_k = self.encoding.rotate(q, k, places.coordinates)
        rotated_k = torch.where(valid, rotated_k, zero)  # some encodings map 0 to another value
        # A factor of a query cancels. With its largest entry 1, products with small keys are not 0.
        least = 2.0**-126  # the smallest normal number of float32
        largest = q.amax(3, keepdim=True).clamp(min=least)
        q, rotated_q = q / largest, rotated_q / largest
        q, k = (part.transpose(1, 2) for part in (q, k))
        rotated_q, rotated_k = (part.transpose(1, 2) for part in (rotated_q, rotated_k))
        if self.cached:
            seen = positions.unsqueeze(1).le(positions.unsqueeze(2)).unsqueeze(1)
            weights = torch.where(seen, rotated_q @ rotated_k.transpose(2, 3), zero)
            divisor = torch.where(seen, q @ k.transpose(2, 3), zero).sum(-1, keepdim=True)
            divisor = divisor + q @ states[1].unsqueeze(3)
            total = weights @ values + rotated_q @ states[0]
            present = [states[0] + rotated_k.transpose(2, 3) @ values, states[1] + k.sum(2)]
        else:
            divisor, present = q @ k.sum(2).unsqueeze(3), states[:0]
            total = rotated_q @ (rotated_k.transpose(2, 3) @ values)
        y = total / divisor.clamp(min=least)  # phi is positive: 0 only in a row of padding
        return self.projection.output(y.transpose(1, 2).flatten(2).to(x.dtype)), present

    def exact(self, x: np.ndarray, positions: range, places: Sequence[Any]) -> np.ndarray:
        """One row x [n,E], positions and coordinates to [n,E], float64, in quadratic form."""
        oracle = self.encoding.oracle()
        q, k, v = self.projection.exact(x)
        q, k = (np.where(part > 0, part + 1, np.exp(np.minimum(part, 0))) for part in (q, k))
        rotated_q = np.stack([oracle.rotate_heads(*pair) for pair in zip(q, places, strict=True)])
        rotated_k = np.stack([oracle.rotate_key_heads(*p) for p in zip(k, places, strict=True)])
        seen = np.tril(np.ones((len(x), len(x)))) if self.cached else np.ones(1)
        pairs = ((rotated_q, rotated_k), (q, k))
        weights, products = (np.einsum("ihd,jhd->hij", *pair) * seen for pair in pairs)
        y = np.einsum("hij,jhd->ihd", weights / products.sum(2, keepdims=True), v)
        return float64.linear(self.projection.output, y.reshape(len(x), -1))


def _phi(x: Tensor) -> Tensor:
    """Return elu(x) + 1. The sum itself cancels for x below 0: at -17 nothing of exp(x) is left."""
    return torch.where(x > 0, x + 1, x.clamp(max=0.0).exp())


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
