"""Linear attention with rotation (Katharopoulos et al. 2020; Su et al. 2021, RoFormer, eq. 19)."""

from typing import Any, List, Sequence, Tuple

import numpy as np
import torch
from torch import Tensor

from posenc_export import ops
from posenc_export.encodings.shared.base import PositionEncoding, StateSpec
from posenc_export.encodings.shared.combined import overrides
from posenc_export.models.config import AttentionConfig
from posenc_export.models.parts import build, float64
from posenc_export.ops import TokenPlaces
from posenc_export.shared.refusal import refusal


class LinearAttention(torch.nn.Module):
    """y_i = sum_j (R_i phi(q_i)) . (R_j phi(k_j)) v_j / sum_j phi(q_i) . phi(k_j), phi = elu + 1.

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
        super().__init__()
        if config.heads != config.kv_heads:
            got = f"{config.kv_heads} and {config.heads}"
            raise refusal("linear attention", "kv_heads equal to heads", got, "change the config")
        _check_plain(config, encoding)
        self.heads, self.head_size = config.heads, config.head_size
        self.encoding, self.cached = encoding, config.causal
        self.projection = build(
            "projection", config.projection, width, config.heads, config.kv_heads, config.head_size
        )

    @torch.jit.unused
    def states(self) -> List[StateSpec]:
        """Return the states that are kept between calls, in the order of `forward`."""
        if not self.cached:
            return []
        summed = (self.heads, self.encoding.key_size(self.head_size), self.head_size)
        sizes = {"sum": summed, "divisor": (self.heads, self.head_size)}
        return [StateSpec(name, size, dtype="float32") for name, size in sizes.items()]

    def forward(
        self,
        x: Tensor,
        places: TokenPlaces,
        mask: Tensor,
        states: List[Tensor],
    ) -> Tuple[Tensor, List[Tensor]]:
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
        q = q.transpose(1, 2)
        k = k.transpose(1, 2)
        rotated_q = rotated_q.transpose(1, 2)
        rotated_k = rotated_k.transpose(1, 2)
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
        weighted_values = np.zeros_like(q)
        for head in range(self.heads):
            for i in range(len(q)):
                seen = range(i + 1 if self.cached else len(q))
                weights = np.array([rotated_q[i, head] @ rotated_k[j, head] for j in seen])
                divisor = sum(float(q[i, head] @ k[j, head]) for j in seen)
                weighted_values[i, head] = weights @ v[: len(seen), head] / divisor
        return float64.linear(self.projection.output, weighted_values.reshape(len(x), -1))


def _check_plain(config: AttentionConfig, encoding: PositionEncoding) -> None:
    """Raise ValueError for settings of scores, which linear attention does not compute."""
    where, sees = "linear attention", config.sees["name"]
    if sees not in ("causal", "both"):
        raise refusal(where, "sees causal or both", sees, "change the config")
    if overrides(encoding, "bias", "rescore", "observe"):
        names = ", ".join(spec["name"] for spec in config.encodings)
        rule = "encodings with hook embed or rotate, since there are no scores"
        raise refusal(where, rule, names, "choose another encoding")
    settings = ("scale", "softcap", "sinks")
    unusable = [name for name in settings if getattr(config, name)]
    if unusable:
        rule = "no scale, softcap or sinks"
        raise refusal(where, rule, ", ".join(unusable), "leave it out")


def _phi(x: Tensor) -> Tensor:
    """Return elu(x) + 1. The sum itself cancels for x below 0: at -17 nothing of exp(x) is left."""
    return torch.where(x > 0, x + 1, x.clamp(max=0.0).exp())
