"""Semantic operations of attention: heads, factors, masks, products, softmax, mixed values."""

import torch
from torch import Tensor

from posenc_export.ops import graph
from posenc_export.ops.graph import emitting


def split_heads(x: Tensor, heads: int) -> Tensor:
    """Split x [B,S,N*D] into heads [B,S,N,D]."""
    if not torch.jit.is_scripting() and emitting():
        shape = [x.size(0), x.size(1), heads, x.size(2) // heads]
        return graph.SplitHeads.emit(x, shape, x, heads)
    return x.view(x.size(0), x.size(1), heads, -1)


def scale(x: Tensor, factor: float) -> Tensor:
    """Multiply x of any shape by a constant. In half precision, a graph stores the factor in
    float32, so that its float32 form reads it exactly.
    """
    if factor == 1.0:
        return x
    if not torch.jit.is_scripting() and emitting():
        return graph.Scale.emit(x, x.shape, x, factor)
    return x * factor


def select_tokens(x: Tensor, index: Tensor) -> Tensor:
    """Select columns index [B,R] int64, 0 .. S - 1, of x [B,S,E]: [B,R,E]."""
    if not torch.jit.is_scripting() and emitting():
        return graph.SelectTokens.emit(x, [x.size(0), index.size(1), x.size(2)], x, index)
    return x.gather(1, index.unsqueeze(2).expand(-1, -1, x.size(2)))


def attention_mask(
    positions: Tensor,
    key_positions: Tensor,
    bias: Tensor | None,
    like: Tensor,
    before: int = -1,
    after: int = 0,
    chunk: int = 0,
) -> Tensor:
    """Return an additive mask [B,1 or H,S,T] in the dtype of `like`: the bias, or 0, for keys that
    a query sees, -inf for the others.

    positions [B,S] of queries and key_positions [B,T] are int64; keys at -1 are never seen. before,
    after: how far before and after the query a key may be; -1 for any distance. after=0 is causal
    attention. chunk: keys must be in the same chunk of this many positions as the query; 0 for no
    chunks.
    """
    if not torch.jit.is_scripting() and emitting():
        heads = 1 if bias is None else bias.size(1)
        shape = [positions.size(0), heads, positions.size(1), key_positions.size(1)]
        of = (positions, key_positions, bias, like)
        return graph.Mask.emit(like, shape, *of, before, after, chunk)
    keys, queries = key_positions.unsqueeze(1), positions.unsqueeze(2)  # [B,1,T], [B,S,1]
    visible = keys.ge(0)
    if after >= 0:
        visible = visible & keys.le(queries + after if after > 0 else queries)
    if before >= 0:
        visible = visible & keys.ge(queries - before)
    if chunk > 0:
        visible = visible & torch.div(keys, chunk, rounding_mode="floor").eq(
            torch.div(queries, chunk, rounding_mode="floor")
        )
    mask = (
        torch.where(visible.unsqueeze(1), 0.0, float("-inf"))
        if bias is None
        else torch.where(visible.unsqueeze(1), bias, float("-inf"))
    )
    return mask if mask.dtype == like.dtype else mask.to(like.dtype)


def attend(
    q: Tensor,
    keys: Tensor,
    values: Tensor,
    mask: Tensor,
    content: Tensor | None,
    scale: float,
    softcap: float = 0.0,
    sinks: Tensor | None = None,
) -> Tensor:
    """Return softmax(cap(scale q k) + mask + content) v, [B,S,H*D]. It is 0 for queries that see no
    key.

    Shapes: q [B,S,H,D'], keys [B,K,T,D'], values [B,K,T,D], mask [B,1 or H,S,T], content [B,H,S,T]
    float32. softcap: cap(s) = softcap tanh(s / softcap); 0 for cap(s) = s. sinks: one score per
    head [H] that takes part in the softmax but has no value.
    """
    if not torch.jit.is_scripting() and emitting():
        shape, sizes = [q.size(0), q.size(1), q.size(2) * values.size(3)], (q.size(2), keys.size(1))
        inputs = (q, keys, values, mask, content, sinks)
        return graph.Attend.emit(q, shape, *inputs, *sizes, scale, softcap)
    dtype = q.dtype
    if content is not None:  # content scores may exceed the range of float16
        q, keys, values = q.to(torch.float32), keys.to(torch.float32), values.to(torch.float32)
        mask = mask.to(torch.float32) + content
    if sinks is not None:  # a key and a value of zeros, with the sink as score
        sink = sinks.to(mask.dtype).view(1, -1, 1, 1).expand(mask.size(0), -1, mask.size(2), 1)
        mask = torch.cat((sink, mask.expand(-1, q.size(2), -1, -1)), dim=3)  # [B,H,S,1+T]
        keys = torch.nn.functional.pad(keys, [0, 0, 1, 0])
        values = torch.nn.functional.pad(values, [0, 0, 1, 0])
    # torch.export cannot trace the fused operator with a key more and values of another size.
    apart = sinks is not None and keys.size(3) != values.size(3)
    if softcap > 0 or apart:
        scores = products(q, keys) * (scale / softcap if softcap > 0 else scale)
        scores = softcap * torch.tanh(scores) if softcap > 0 else scores
        nothing = mask.amax(dim=-1, keepdim=True).eq(float("-inf"))
        weights = attention_weights(scores, mask).masked_fill(nothing, 0.0)
        return weighted_values(weights, values).to(dtype)
    y = torch.nn.functional.scaled_dot_product_attention(
        q.transpose(1, 2),
        keys,
        values,
        attn_mask=mask,
        scale=scale,
        enable_gqa=q.size(2) != keys.size(1),
    )
    y = y.transpose(1, 2).flatten(2)
    return y if content is None else y.to(dtype)


def attend_with_weights(
    q: Tensor, keys: Tensor, values: Tensor, mask: Tensor, content: Tensor, scale: float
) -> tuple[Tensor, Tensor]:
    """Return the output of `attend` and its softmax [B,H,S,T] float32, which is 0 for keys that
    a query does not see. For queries that see no key, both are undefined.
    """
    if not torch.jit.is_scripting() and emitting():
        y = attend(q, keys, values, mask, content, scale)
        shape = [q.size(0), q.size(2), q.size(1), keys.size(2)]
        return y, graph.AttentionWeights.emit(content, shape, y)
    weights = attention_weights(scale * products(q, keys) + content, mask)
    return weighted_values(weights, values), weights


def products(q: Tensor, keys: Tensor) -> Tensor:
    """Return the products of q [B,S,H,D] and keys [B,K,T,D], without scaling: [B,H,S,T] float32."""
    if not torch.jit.is_scripting() and emitting():
        shape = [q.size(0), q.size(2), q.size(1), keys.size(2)]
        like = torch.empty(0, dtype=torch.float32)
        return graph.Products.emit(like, shape, q, keys, q.size(2), keys.size(1))
    grouped = q.to(torch.float32).transpose(1, 2).unflatten(1, [keys.size(1), -1])  # [B,K,H/K,S,D]
    return (grouped @ keys.to(torch.float32).unsqueeze(2).transpose(3, 4)).flatten(1, 2)


def attention_weights(scores: Tensor, mask: Tensor) -> Tensor:
    """Return softmax(scores + mask), [B,H,S,T] float32; equal without visible keys."""
    # -1e30 replaces -inf, because a softmax over -inf only gives NaN.
    return torch.softmax((scores + mask.to(torch.float32)).clamp(min=-1e30), dim=-1)


def weighted_values(weights: Tensor, values: Tensor) -> Tensor:
    """Sum values [B,K,T,D] weighted by [B,H,S,T] float32: [B,S,H*D] like values."""
    if not torch.jit.is_scripting() and emitting():
        shape = [weights.size(0), weights.size(2), weights.size(1) * values.size(3)]
        sizes = (weights.size(1), values.size(1))
        return graph.WeightedValues.emit(values, shape, weights, values, *sizes)
    grouped = weights.unflatten(1, [values.size(1), -1])  # [B,K,H/K,S,T]
    mixed = (grouped @ values.to(torch.float32).unsqueeze(2)).flatten(1, 2)  # [B,H,S,D]
    return mixed.transpose(1, 2).flatten(2).to(values.dtype)
