"""Semantic operations of models: each has an eager reference and emits a node for the lowerings.

Inside `graph.semantic_graph()`, each function emits one node of the `posenc` domain, which export/
rewrites for the target. Everywhere else, TorchScript included, it computes its reference.
References write caches in place and modify no other argument.

Shapes: B batch, S new tokens, T slots of a cache, N heads (H or K), H query heads, K kv heads, D
head size, M table rows, r rotary size.
"""

from typing import Optional, Tuple

import torch
from torch import Tensor

from posenc_export.ops import graph
from posenc_export.ops.graph import emitting


def split_heads(x: Tensor, heads: int) -> Tensor:
    """Split x [B,S,N*D] into heads [B,S,N,D]."""
    if not torch.jit.is_scripting():
        if emitting():
            return graph.SplitHeads.emit(
                x, [x.size(0), x.size(1), heads, x.size(2) // heads], x=x, heads=heads
            )
    return x.view(x.size(0), x.size(1), heads, -1)


def rotate_pairs(
    x: Tensor, positions: Tensor, cos: Tensor, sin: Tensor, interleaved: bool, linear: bool = True
) -> Tensor:
    """Rotate the first r entries of x [B,S,N,D] by the rows positions [B,S] int64 (-1 reads row 0)
    of cos and sin [M,r/2] float32. The result has the dtype of x.

    interleaved: rotate the pairs (0, 1), (2, 3), ..., otherwise (0, r/2), (1, r/2 + 1), ... linear:
    angles are proportional to the row, so that scores depend only on differences of positions, and
    S is at most M.
    """
    if not torch.jit.is_scripting():
        if emitting():
            return graph.Rotate.emit(
                x,
                x.shape,
                x=x,
                positions=positions,
                cos=cos,
                sin=sin,
                interleaved=interleaved,
                linear=linear,
            )
    c, s = _of_tokens(positions, cos, sin)
    return apply_rotation(x, c, s, interleaved)


def rotate_both(
    q: Tensor,
    k: Tensor,
    positions: Tensor,
    cos: Tensor,
    sin: Tensor,
    interleaved: bool,
    linear: bool = True,
) -> Tuple[Tensor, Tensor]:
    """Apply `rotate_pairs` to q [B,S,H,D] and k [B,S,K,D] with the same positions and tables."""
    if not torch.jit.is_scripting():
        if emitting():
            return rotate_pairs(q, positions, cos, sin, interleaved, linear), rotate_pairs(
                k, positions, cos, sin, interleaved, linear
            )
    c, s = _of_tokens(positions, cos, sin)
    q, k = apply_rotation(torch.cat((q, k), dim=2), c, s, interleaved).split(
        [q.size(2), k.size(2)], dim=2
    )
    return q, k


def _of_tokens(positions: Tensor, cos: Tensor, sin: Tensor) -> Tuple[Tensor, Tensor]:
    """Look up rows positions [B,S] int64 (-1 reads row 0) of tables [M,r/2]: [B,S,1,r/2] each,
    with an axis that broadcasts over heads.
    """
    rows = positions.clamp(min=0).unsqueeze(2)
    return torch.nn.functional.embedding(rows, cos), torch.nn.functional.embedding(rows, sin)


def apply_rotation(x: Tensor, cos: Tensor, sin: Tensor, interleaved: bool) -> Tensor:
    """Rotate the first r entries of x [B,S,N,D] by angles given as cos, sin [B,S,1 or N,r/2]
    float32. The result has the dtype of x.
    """
    size = 2 * cos.size(3)
    turned = x if size == x.size(3) else x[..., :size]
    turned = turned if x.dtype == cos.dtype else turned.to(cos.dtype)
    if interleaved:
        first, second = turned[..., 0::2], turned[..., 1::2]
        turned = torch.stack(
            (first * cos - second * sin, second * cos + first * sin), dim=-1
        ).flatten(-2)
    else:
        first, second = turned.chunk(2, dim=-1)
        turned = torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)
    turned = turned if x.dtype == cos.dtype else turned.to(x.dtype)
    return turned if size == x.size(3) else torch.cat((turned, x[..., size:]), dim=-1)


def select_tokens(x: Tensor, index: Tensor) -> Tensor:
    """Select columns index [B,R] int64, 0 .. S - 1, of x [B,S,E]: [B,R,E]."""
    if not torch.jit.is_scripting():
        if emitting():
            return graph.SelectTokens.emit(
                x, [x.size(0), index.size(1), x.size(2)], x=x, index=index
            )
    return x.gather(1, index.unsqueeze(2).expand(-1, -1, x.size(2)))


def write_index(held: Tensor, positions: Tensor) -> Tensor:
    """Return the cache slots [B,S] int64 of new tokens with positions [B,S], for rows in which the
    first `held` [B] int64 slots are in use.

    The result is only for `append` and `append_positions`. In a semantic graph it is `held`.
    """
    if not torch.jit.is_scripting():
        if emitting():
            return held
    if (
        torch.jit.is_scripting() and positions.size(1) == 1
    ):  # fewer operations; torch.export cannot branch on sizes
        return held.unsqueeze(1)
    return torch.arange(positions.size(1), device=held.device) + held.unsqueeze(1)


def _write(past: Tensor, new: Tensor, write_index: Tensor) -> None:
    """Write new [B,S,*] into past [B,T,*] at slots write_index [B,S]."""
    if (
        torch.jit.is_scripting() and write_index.size(0) == 1
    ):  # fewer operations; torch.export cannot branch on sizes
        past.index_copy_(1, write_index[0], new)
    else:
        past.index_put_(
            (
                torch.arange(write_index.size(0), device=write_index.device).unsqueeze(1),
                write_index,
            ),
            new,
        )


def append(past: Tensor, new: Tensor, write_index: Tensor) -> Tensor:
    """Write new [B,S,N,D] into past [B,N,T,D] at write_index and return past. Targets with growing
    caches return the concatenation of past and new instead.

    T = 0 means that there is no cache: the result is new [B,N,S,D], through which gradients flow.
    """
    if not torch.jit.is_scripting():
        if emitting():
            shape = [past.size(0), past.size(1), past.size(2) + new.size(1), past.size(3)]
            return graph.Append.emit(past, shape, past=past, new=new, write_index=write_index)
    if past.size(2) == 0:
        return new.transpose(1, 2)
    _write(past.transpose(1, 2), new, write_index)
    return past


def append_positions(past: Tensor, new: Tensor, write_index: Tensor) -> Tensor:
    """Write new key positions [B,S] int64 into past [B,T] and return past, in the same way as
    `append`. -1 marks padding and slots that were never written.
    """
    if not torch.jit.is_scripting():
        if emitting():
            return graph.AppendPositions.emit(
                past,
                [past.size(0), past.size(1) + new.size(1)],
                past=past,
                new=new,
                write_index=write_index,
            )
    if past.size(1) == 0:
        return new
    _write(past, new, write_index)
    return past


def fit_positions(key_positions: Tensor, past: Tensor, new: Tensor) -> Tensor:
    """Pad key positions of the first slots with -1 to the slots of past [B,N,T,D]: [B,T].
    Targets with growing caches, and T = 0, leave them unchanged.
    """
    if not torch.jit.is_scripting():
        if emitting():
            return graph.FitPositions.emit(
                key_positions,
                [key_positions.size(0), past.size(2) + new.size(1)],
                key_positions=key_positions,
                past=past,
            )
    if past.size(2) == 0:
        return key_positions
    return torch.nn.functional.pad(
        key_positions, [0, past.size(2) - key_positions.size(1)], value=-1.0
    )


def distances(q_positions: Tensor, k_positions: Tensor) -> Tensor:
    """Subtract query positions [B,S] int64 from key positions [B,T] int64: [B,1,S,T] float32.
    Entries of padding are undefined.
    """
    if not torch.jit.is_scripting():
        if emitting():
            shape = [q_positions.size(0), 1, q_positions.size(1), k_positions.size(1)]
            return graph.Distances.emit(
                torch.empty(0, dtype=torch.float32),
                shape,
                q_positions=q_positions,
                k_positions=k_positions,
            )
    return (k_positions[:, None, None] - q_positions[:, None, :, None]).to(torch.float32)


def attention_mask(
    positions: Tensor,
    key_positions: Tensor,
    bias: Optional[Tensor],
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
    if not torch.jit.is_scripting():
        if emitting():
            shape = [
                positions.size(0),
                1 if bias is None else bias.size(1),
                positions.size(1),
                key_positions.size(1),
            ]
            return graph.Mask.emit(
                like,
                shape,
                positions=positions,
                key_positions=key_positions,
                bias=bias,
                like=like,
                before=before,
                after=after,
                chunk=chunk,
            )
    keys, queries = key_positions.unsqueeze(1), positions.unsqueeze(2)
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
    content: Optional[Tensor],
    scale: float,
    softcap: float = 0.0,
    sinks: Optional[Tensor] = None,
) -> Tensor:
    """Return softmax(cap(scale q k) + mask + content) v, [B,S,H*D]. It is 0 for queries that see no
    key.

    Shapes: q [B,S,H,D'], keys [B,K,T,D'], values [B,K,T,D], mask [B,1 or H,S,T], content [B,H,S,T]
    float32. softcap: cap(s) = softcap tanh(s / softcap); 0 for cap(s) = s. sinks: one score per
    head [H] that takes part in the softmax but has no value.
    """
    if not torch.jit.is_scripting():
        if emitting():
            shape = [q.size(0), q.size(1), q.size(2) * values.size(3)]
            return graph.Attend.emit(
                q,
                shape,
                q=q,
                keys=keys,
                values=values,
                mask=mask,
                content=content,
                sinks=sinks,
                heads=q.size(2),
                kv_heads=keys.size(1),
                scale=scale,
                softcap=softcap,
            )
    dtype = q.dtype
    if content is not None:  # content scores may exceed the range of float16
        q, keys, values, mask = (
            q.to(torch.float32),
            keys.to(torch.float32),
            values.to(torch.float32),
            mask.to(torch.float32) + content,
        )
    if sinks is not None:  # a key and a value of zeros, with the sink as score
        mask = torch.cat(
            (
                sinks.to(mask.dtype).view(1, -1, 1, 1).expand(mask.size(0), -1, mask.size(2), 1),
                mask.expand(-1, q.size(2), -1, -1),
            ),
            dim=3,
        )
        keys, values = (
            torch.nn.functional.pad(keys, [0, 0, 1, 0]),
            torch.nn.functional.pad(values, [0, 0, 1, 0]),
        )
    if softcap > 0:
        scores = softcap * torch.tanh(products(q, keys) * (scale / softcap))
        nothing = mask.amax(dim=-1, keepdim=True).eq(float("-inf"))
        return weighted_values(
            attention_weights(scores, mask).masked_fill(nothing, 0.0), values
        ).to(dtype)
    y = (
        torch.nn.functional.scaled_dot_product_attention(
            q.transpose(1, 2),
            keys,
            values,
            attn_mask=mask,
            scale=scale,
            enable_gqa=q.size(2) != keys.size(1),
        )
        .transpose(1, 2)
        .flatten(2)
    )
    return y if content is None else y.to(dtype)


def attend_with_weights(
    q: Tensor, keys: Tensor, values: Tensor, mask: Tensor, content: Tensor, scale: float
) -> Tuple[Tensor, Tensor]:
    """Return the output of `attend` and its softmax [B,H,S,T] float32, which is 0 for keys that
    a query does not see. For queries that see no key, both are undefined.
    """
    if not torch.jit.is_scripting():
        if emitting():
            y = attend(q, keys, values, mask, content, scale)
            return y, graph.AttentionWeights.emit(
                content, [q.size(0), q.size(2), q.size(1), keys.size(2)], attended=y
            )
    found = attention_weights(scale * products(q, keys) + content, mask)
    return weighted_values(found, values), found


def products(q: Tensor, keys: Tensor) -> Tensor:
    """Return the products of q [B,S,H,D] and keys [B,K,T,D], without scaling: [B,H,S,T] float32."""
    if not torch.jit.is_scripting():
        if emitting():
            shape = [q.size(0), q.size(2), q.size(1), keys.size(2)]
            return graph.Products.emit(
                torch.empty(0, dtype=torch.float32),
                shape,
                q=q,
                keys=keys,
                heads=q.size(2),
                kv_heads=keys.size(1),
            )
    grouped = q.to(torch.float32).transpose(1, 2).unflatten(1, [keys.size(1), -1])
    return (grouped @ keys.to(torch.float32).unsqueeze(2).transpose(3, 4)).flatten(1, 2)


def wave_products(q: Tensor, key_positions: Tensor, waves: Tensor) -> Tensor:
    """Multiply q [B,H,S,E] with rows cos(p w), sin(p w) of waves [M,E] float32 at key_positions
    p [B,T] int64: [B,H,S,T], arbitrary for p outside the table.
    """
    if not torch.jit.is_scripting():
        if emitting():
            return graph.WaveProducts.emit(
                q,
                [*q.shape[:3], key_positions.size(1)],
                q=q,
                key_positions=key_positions,
                waves=waves,
            )
    rows = torch.nn.functional.embedding(key_positions.clamp(0, waves.size(0) - 1), waves)
    return (q.flatten(1, 2) @ rows.transpose(1, 2)).unflatten(1, [q.size(1), q.size(2)])


def attention_weights(scores: Tensor, mask: Tensor) -> Tensor:
    """Return softmax(scores + mask) over keys, [B,H,S,T] float32. For queries that see no key,
    all weights are equal and have no meaning.
    """
    # -1e30 replaces -inf, because a softmax over -inf only gives NaN.
    return torch.softmax((scores + mask.to(torch.float32)).clamp(min=-1e30), dim=-1)


def weighted_values(weights: Tensor, values: Tensor) -> Tensor:
    """Sum values [B,K,T,D] weighted by weights [B,H,S,T] float32: [B,S,H*D] in the dtype of
    values.
    """
    if not torch.jit.is_scripting():
        if emitting():
            shape = [weights.size(0), weights.size(2), weights.size(1) * values.size(3)]
            return graph.WeightedValues.emit(
                values,
                shape,
                weights=weights,
                values=values,
                heads=weights.size(1),
                kv_heads=values.size(1),
            )
    grouped = weights.unflatten(1, [values.size(1), -1])
    return (
        (grouped @ values.to(torch.float32).unsqueeze(2))
        .flatten(1, 2)
        .transpose(1, 2)
        .flatten(2)
        .to(values.dtype)
    )


def pick(rows: Tensor, index: Tensor) -> Tensor:
    """Gather entries index [B,1 or H,S,T] int64, 0 .. R - 1, of the last axis of rows [B,H,S,R]:
    [B,H,S,T].
    """
    if not torch.jit.is_scripting():
        if emitting():
            return graph.Pick.emit(rows, [*rows.shape[:3], index.size(3)], rows=rows, index=index)
    return rows.gather(-1, index.expand(-1, rows.size(1), -1, -1))


def collect_by_distance(
    weights: Tensor, positions: Tensor, key_positions: Tensor, left: int, right: int
) -> Tensor:
    """Sum weights [B,H,S,T] by distance, key_positions [B,T] minus positions [B,S] int64,
    clipped to -left .. right: [B,H,S,left+right+1].
    """
    if not torch.jit.is_scripting():
        if emitting():
            return graph.CollectByDistance.emit(
                weights,
                [*weights.shape[:3], left + right + 1],
                weights=weights,
                positions=positions,
                key_positions=key_positions,
                left=left,
                right=right,
            )
    index = (
        (key_positions.unsqueeze(1) - positions.unsqueeze(2)).clamp(-left, right) + left
    ).unsqueeze(1)
    return (
        torch.zeros_like(weights[..., :1])
        .expand(-1, -1, -1, left + right + 1)
        .scatter_add(-1, index.expand(-1, weights.size(1), -1, -1), weights)
    )


def suffix_sum(x: Tensor, own: bool = True) -> Tensor:
    """Sum the entries of the last axis that follow each entry, and the entry itself if `own`.
    Sums are formed from the end, so that rounding errors are small there.
    """
    if not torch.jit.is_scripting():
        if emitting():
            return graph.SuffixSum.emit(x, x.shape, x=x, own=own)
    sums = x.flip(-1).cumsum(-1).flip(-1)
    return sums if own else sums - x


def rows_at_counts(q: Tensor, keys: Tensor, mask: Tensor, rows: Tensor) -> Tensor:
    """Interpolate rows [B,H,S,R] at the count of each key, which is the sum of sigmoid(q k) over
    this and all later visible keys, at most R - 1: [B,H,S,T] float32. q [B,S,H,D], keys [B,K,T,D],
    mask [B,1 or H,S,T].
    """
    if not torch.jit.is_scripting():
        if emitting():
            return graph.RowsAtCounts.emit(
                rows,
                [*rows.shape[:3], keys.size(2)],
                q=q,
                keys=keys,
                mask=mask,
                rows=rows,
                heads=q.size(2),
                kv_heads=keys.size(1),
            )
    gates = torch.sigmoid(products(q, keys)) * mask.ge(0).to(torch.float32)
    # Kernels add float32 numbers in different orders; in float64 they agree on the row below a
    # count and on the fraction above it.
    counts = suffix_sum(gates.to(torch.float64)).clamp(0.0, rows.size(3) - 1.0)
    below = counts.floor()
    # Clamped as integers: NaN gives no valid index, and an index out of range would fail the whole
    # batch.
    index = below.to(torch.int64).clamp(0, rows.size(3) - 1)
    return pick(rows, index) + (counts - below).to(torch.float32) * pick(
        rows.diff(dim=3, append=rows[..., -1:]), index
    )
