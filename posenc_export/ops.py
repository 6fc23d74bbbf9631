"""The semantic operations of an attention block: eager references, and the nodes a lowering sees.

Inside `semantic_graph()` each function emits one node of the `posenc` domain, which export/ rewrites for its target; everywhere else,
TorchScript included, it computes its reference. References are functional and grow their caches: past in, present out.

Shapes: B batch, S new tokens, P past, T = P + S, N heads of one kind, H query heads, K kv heads, D head size, M table rows, r rotary size.
"""

import contextlib
from typing import Dict, Iterator, List, Optional

import torch
from torch import Tensor

DOMAIN = "posenc"
_emitting = [False]


@contextlib.contextmanager
def semantic_graph() -> Iterator[None]:
    """While open, the operations below emit `posenc` nodes instead of computing."""
    _emitting[0] = True
    try:
        yield
    finally:
        _emitting[0] = False


@torch.jit.unused
def emitting() -> bool:
    return _emitting[0]


@torch.jit.unused
def _node(name: str, inputs: List[Optional[Tensor]], attributes: Dict[str, float], like: Tensor, shape: List[int]) -> Tensor:
    return torch.onnx.ops.symbolic(f"{DOMAIN}::{name}", inputs, {**attributes}, dtype=like.dtype, shape=shape, version=1)


def split_heads(x: Tensor, heads: int) -> Tensor:
    """x [B,S,N*D] to [B,S,N,D]."""
    if not torch.jit.is_scripting():
        if emitting():
            return _node("Heads", [x], {"heads": float(heads)}, x, [x.size(0), x.size(1), heads, x.size(2) // heads])
    return x.view(x.size(0), x.size(1), heads, -1)


def rotate_pairs(x: Tensor, positions: Tensor, cos: Tensor, sin: Tensor, interleaved: bool) -> Tensor:
    """Rotate the first r entries of x [B,S,N,D] by rows of cos, sin [M,r/2] float32 at positions [B,S] int64, -1 read as 0; x's dtype out."""
    if not torch.jit.is_scripting():
        if emitting():
            return _node("Rotate", [x, positions, cos, sin], {"interleaved": float(interleaved)}, x, [x.size(0), x.size(1), x.size(2), x.size(3)])
    rows = positions.clamp(min=0)
    c = torch.nn.functional.embedding(rows, cos).unsqueeze(2)
    s = torch.nn.functional.embedding(rows, sin).unsqueeze(2)
    half = cos.size(1)
    turned = x[..., : 2 * half].to(c.dtype)
    if interleaved:
        first, second = turned[..., 0::2], turned[..., 1::2]
        turned = torch.stack((first * c - second * s, second * c + first * s), dim=-1).flatten(-2)
    else:
        first, second = turned[..., :half], turned[..., half:]
        turned = torch.cat((first * c - second * s, second * c + first * s), dim=-1)
    return torch.cat((turned.to(x.dtype), x[..., 2 * half :]), dim=-1)


def append(past: Tensor, new: Tensor, write_index: Tensor) -> Tensor:
    """past [B,N,P,D] with new [B,S,N,D] behind it: [B,N,T,D]. A fixed-capacity target writes at slot write_index [B] int64 instead."""
    if not torch.jit.is_scripting():
        if emitting():
            return _node("Append", [past, new, write_index], {}, past, [past.size(0), past.size(1), past.size(2) + new.size(1), past.size(3)])
    return torch.cat((past, new.transpose(1, 2)), dim=2)


def append_positions(past: Tensor, new: Tensor, write_index: Tensor) -> Tensor:
    """Key positions [B,T] int64 from past [B,P] and new [B,S]; -1 is padding or a slot never written."""
    if not torch.jit.is_scripting():
        if emitting():
            return _node("AppendPositions", [past, new, write_index], {}, past, [past.size(0), past.size(1) + new.size(1)])
    return torch.cat((past, new), dim=1)


def fit_positions(key_positions: Tensor, past: Tensor, new: Tensor) -> Tensor:
    """Key positions [B,T] as they are; a fixed-capacity target pads them with -1 to the slots of past [B,N,P,D]."""
    if not torch.jit.is_scripting():
        if emitting():
            return _node("FitPositions", [key_positions, past], {}, key_positions, [key_positions.size(0), past.size(2) + new.size(1)])
    return key_positions


def distances(q_positions: Tensor, k_positions: Tensor) -> Tensor:
    """Key minus query position [B,1,S,T] float32, from [B,S] and [B,T] int64; entries at padding mean nothing."""
    if not torch.jit.is_scripting():
        if emitting():
            shape = [q_positions.size(0), 1, q_positions.size(1), k_positions.size(1)]
            return _node("Distances", [q_positions, k_positions], {}, torch.empty(0, dtype=torch.float32), shape)
    return (k_positions[:, None, None] - q_positions[:, None, :, None]).to(torch.float32)


def attention_mask(positions: Tensor, key_positions: Tensor, bias: Optional[Tensor], causal: bool, like: Tensor) -> Tensor:
    """Additive mask [B,1 or H,S,T] in like's dtype: bias where key j may be seen from query i, -inf elsewhere.

    positions [B,S] and key_positions [B,T] int64. Key -1 is never seen; causal: only keys at or before the query are.
    """
    if not torch.jit.is_scripting():
        if emitting():
            shape = [positions.size(0), 1 if bias is None else bias.size(1), positions.size(1), key_positions.size(1)]
            return _node("Mask", [positions, key_positions, bias, like], {"causal": float(causal)}, like, shape)
    visible = key_positions.unsqueeze(1).ge(0)
    if causal:
        visible = visible & key_positions.unsqueeze(1).le(positions.unsqueeze(2))
    scores = torch.zeros([1], dtype=torch.float32, device=like.device) if bias is None else bias
    return torch.where(visible.unsqueeze(1), scores, float("-inf")).to(like.dtype)


def attend(q: Tensor, keys: Tensor, values: Tensor, mask: Tensor, scale: float) -> Tensor:
    """softmax(scale q k + mask) v: q [B,S,H,D], keys and values [B,K,T,D], mask [B,1 or H,S,T], to [B,S,H*D]. A row that sees nothing gives 0."""
    if not torch.jit.is_scripting():
        if emitting():
            attributes = {"heads": float(q.size(2)), "kv_heads": float(keys.size(1)), "scale": scale}
            return _node("Attend", [q, keys, values, mask], attributes, q, [q.size(0), q.size(1), q.size(2) * q.size(3)])
    y = torch.nn.functional.scaled_dot_product_attention(
        q.transpose(1, 2), keys, values, attn_mask=mask, scale=scale, enable_gqa=q.size(2) != keys.size(1)
    )
    return y.transpose(1, 2).flatten(2)
