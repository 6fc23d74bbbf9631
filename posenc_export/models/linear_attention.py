"""Linear attention with rotation (Katharopoulos et al. 2020, Transformers are RNNs; Su et al. 2021, RoFormer, eq. 19)."""

from typing import List, Tuple

import torch
from torch import Tensor

from posenc_export import ops
from posenc_export.encodings.base import Carried, PositionEncoding
from posenc_export.models.config import AttentionConfig


class LinearAttention(torch.nn.Module):
    """y_i = sum_j (R_i phi(q_i)) . (R_j phi(k_j)) v_j / sum_j phi(q_i) . phi(k_j), j up to i, phi = elu + 1; the rotation R stays out of the divisor.

    State: S = sum_j (R_j phi(k_j)) v_j^T [B,H,D,D] and z = sum_j phi(k_j) [B,H,D], float32: a step costs the same at every position.
    A call of S tokens is quadratic in S, which the chunk bounds.

    Args:
        config: sizes and biases; as many kv heads as heads, causal.
        encoding: its `rotate` acts; one that acts on scores has nothing to act on.

    Raises:
        ValueError: grouped kv heads, a bidirectional block, an encoding with a bias or content scores.
    """

    def __init__(self, config: AttentionConfig, encoding: PositionEncoding) -> None:
        super().__init__()
        if config.heads != config.kv_heads or not config.causal:
            raise ValueError(f"linear attention: causal, kv_heads equal to heads, got causal={config.causal}, {config.kv_heads} and {config.heads}; change the config")
        overridden = [hook for hook in ("bias", "rescore", "observe") if getattr(type(encoding), hook) is not getattr(PositionEncoding, hook)]
        if overridden:
            raise ValueError(f"linear attention: it has no scores, got {config.encoding['name']}, which acts on them; choose an encoding of hook embed or rotate")
        self.heads, self.head_size, self.encoding = config.heads, config.head_size, encoding
        self.inner = config.heads * config.head_size
        self.qkv = torch.nn.Linear(config.width, 3 * self.inner, bias=config.qkv_bias)
        self.output = torch.nn.Linear(self.inner, config.width, bias=config.output_bias)

    @torch.jit.unused
    def states(self) -> List[Carried]:
        """What this attention carries from call to call, in the order `forward` takes."""
        summed = (self.heads, self.encoding.key_size(self.head_size), self.head_size)
        return [Carried("sum", summed, dtype="float32"), Carried("divisor", (self.heads, self.head_size), dtype="float32")]

    def forward(
        self, x: Tensor, positions: Tensor, coordinates: Tensor, key_positions: Tensor, mask: Tensor, write_index: Tensor, states: List[Tensor]
    ) -> Tuple[Tensor, List[Tensor]]:
        """Shapes as Attention.forward; key_positions, mask and write_index are of a cache, and not read."""
        q, k, v = self.qkv(x).split(self.inner, dim=-1)
        q, k = (torch.nn.functional.elu(ops.split_heads(part, self.heads).to(torch.float32)) + 1 for part in (q, k))
        valid = positions.ge(0).unsqueeze(2).unsqueeze(3)
        k, values = torch.where(valid, k, 0.0), ops.split_heads(v, self.heads).to(torch.float32).transpose(1, 2)
        turned_q, turned_k = self.encoding.rotate(q, k, coordinates)
        q, k, turned_q, turned_k = q.transpose(1, 2), k.transpose(1, 2), turned_q.transpose(1, 2), turned_k.transpose(1, 2)
        seen = positions.unsqueeze(1).le(positions.unsqueeze(2)).unsqueeze(1)
        zero = torch.zeros([1], dtype=torch.float32, device=x.device)
        shares = torch.where(seen, turned_q @ turned_k.transpose(2, 3), zero)
        divisor = torch.where(seen, q @ k.transpose(2, 3), zero).sum(-1, keepdim=True) + q @ states[1].unsqueeze(3)
        y = (shares @ values + turned_q @ states[0]) / divisor.clamp(min=1e-30)  # phi is positive: only a row of padding has a divisor of 0
        present = [states[0] + turned_k.transpose(2, 3) @ values, states[1] + k.sum(2)]
        return self.output(y.transpose(1, 2).flatten(2).to(x.dtype)), present
