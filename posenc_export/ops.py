"""The semantic operations of an attention block: eager references, and the nodes a lowering sees.

Inside `semantic.semantic_graph()` each function emits one node of the `posenc` domain, which export/ rewrites for its target; everywhere else,
TorchScript included, it computes its reference. References write caches in place and change nothing else.

Shapes: B batch, S new tokens, T slots of a cache, N heads of one kind, H query heads, K kv heads, D head size, M table rows, r rotary size.
"""

import math
from typing import List, Optional, Tuple

import torch
from torch import Tensor

from posenc_export.semantic import emitting
from posenc_export.semantic import node as _node


def split_heads(x: Tensor, heads: int) -> Tensor:
    """x [B,S,N*D] to [B,S,N,D]."""
    if not torch.jit.is_scripting():
        if emitting():
            return _node("Heads", [x], {"heads": float(heads)}, x, [x.size(0), x.size(1), heads, x.size(2) // heads])
    return x.view(x.size(0), x.size(1), heads, -1)


def rotate_pairs(x: Tensor, positions: Tensor, cos: Tensor, sin: Tensor, interleaved: bool, linear: bool = True) -> Tensor:
    """Rotate the first r entries of x [B,S,N,D] by rows of cos, sin [M,r/2] float32 at positions [B,S] int64, -1 read as 0; x's dtype out.

    linear: angles are proportional to the row, so that scores of two rotations depend on the difference of positions only, and S is at most M.
    """
    if not torch.jit.is_scripting():
        if emitting():
            attributes = {"interleaved": float(interleaved), "linear": float(linear)}
            return _node("Rotate", [x, positions, cos, sin], attributes, x, [x.size(0), x.size(1), x.size(2), x.size(3)])
    rows = positions.clamp(min=0)
    return turn_pairs(x, _of_tokens(rows, cos), _of_tokens(rows, sin), interleaved)


def rotate_both(q: Tensor, k: Tensor, positions: Tensor, cos: Tensor, sin: Tensor, interleaved: bool, linear: bool = True) -> Tuple[Tensor, Tensor]:
    """`rotate_pairs` of q [B,S,H,D] and of k [B,S,K,D], by the same rows."""
    if not torch.jit.is_scripting():
        if emitting():
            return rotate_pairs(q, positions, cos, sin, interleaved, linear), rotate_pairs(k, positions, cos, sin, interleaved, linear)
    rows = positions.clamp(min=0)
    c, s = _of_tokens(rows, cos), _of_tokens(rows, sin)
    return turn_pairs(q, c, s, interleaved), turn_pairs(k, c, s, interleaved)


def _of_tokens(rows: Tensor, table: Tensor) -> Tensor:
    """Rows [B,S] int64 of a table [M,r/2], for every head: [B,S,1,r/2]."""
    return torch.nn.functional.embedding(rows, table).unsqueeze(2)


def turn_pairs(x: Tensor, cos: Tensor, sin: Tensor, interleaved: bool) -> Tensor:
    """Rotate the first r entries of x [B,S,N,D] by angles given as cos, sin [B,S,1 or N,r/2] float32; x's dtype out."""
    half = cos.size(3)
    turned = x[..., : 2 * half].to(cos.dtype)
    if interleaved:
        first, second = turned[..., 0::2], turned[..., 1::2]
        turned = torch.stack((first * cos - second * sin, second * cos + first * sin), dim=-1).flatten(-2)
    else:
        first, second = turned[..., :half], turned[..., half:]
        turned = torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)
    turned = turned.to(x.dtype)
    return turned if 2 * half == x.size(3) else torch.cat((turned, x[..., 2 * half :]), dim=-1)


def select_tokens(x: Tensor, index: Tensor) -> Tensor:
    """x [B,S,E] at columns index [B,R] int64, 0 .. S - 1: [B,R,E]."""
    if not torch.jit.is_scripting():
        if emitting():
            return _node("SelectTokens", [x, index], {}, x, [x.size(0), index.size(1), x.size(2)])
    return x.gather(1, index.unsqueeze(2).expand(-1, -1, x.size(2)))


def write_index(held: Tensor, positions: Tensor) -> Tensor:
    """Slots of the tokens of positions [B,S] in a cache whose rows hold their first held [B] int64 slots: [B,S] int64.

    Only `append` and `append_positions` read it: in a semantic graph it is held itself.
    """
    if not torch.jit.is_scripting():
        if emitting():
            return held
    return torch.arange(positions.size(1), device=held.device) + held.unsqueeze(1)


def _rows(write_index: Tensor) -> Tensor:
    """The row of each token, to index a cache with: [B,1] int64."""
    return torch.arange(write_index.size(0), device=write_index.device).unsqueeze(1)


def append(past: Tensor, new: Tensor, write_index: Tensor) -> Tensor:
    """new [B,S,N,D] written into past [B,N,T,D] at write_index, and past itself; a growing target gives past with new behind it instead.

    A cache without slots, T = 0, is none: new alone [B,N,S,D], which gradients pass.
    """
    if not torch.jit.is_scripting():
        if emitting():
            return _node("Append", [past, new, write_index], {}, past, [past.size(0), past.size(1), past.size(2) + new.size(1), past.size(3)])
    if past.size(2) == 0:
        return new.transpose(1, 2)
    past.transpose(1, 2).index_put_((_rows(write_index), write_index), new)
    return past


def append_positions(past: Tensor, new: Tensor, write_index: Tensor) -> Tensor:
    """Key positions [B,T] int64: new [B,S] written into past [B,T] at write_index, and past itself; -1 is padding or a slot never written. As `append`."""
    if not torch.jit.is_scripting():
        if emitting():
            return _node("AppendPositions", [past, new, write_index], {}, past, [past.size(0), past.size(1) + new.size(1)])
    if past.size(1) == 0:
        return new
    past.index_put_((_rows(write_index), write_index), new)
    return past


def fit_positions(key_positions: Tensor, past: Tensor, new: Tensor) -> Tensor:
    """Key positions of the first slots, with -1 behind them for all slots of past [B,N,T,D]: [B,T]. As they are for a growing target, and without slots."""
    if not torch.jit.is_scripting():
        if emitting():
            return _node("FitPositions", [key_positions, past], {}, key_positions, [key_positions.size(0), past.size(2) + new.size(1)])
    if past.size(2) == 0:
        return key_positions
    return torch.nn.functional.pad(key_positions, [0, past.size(2) - key_positions.size(1)], value=-1.0)


def distances(q_positions: Tensor, k_positions: Tensor) -> Tensor:
    """Key minus query position [B,1,S,T] float32, from [B,S] and [B,T] int64; entries at padding mean nothing."""
    if not torch.jit.is_scripting():
        if emitting():
            shape = [q_positions.size(0), 1, q_positions.size(1), k_positions.size(1)]
            return _node("Distances", [q_positions, k_positions], {}, torch.empty(0, dtype=torch.float32), shape)
    return (k_positions[:, None, None] - q_positions[:, None, :, None]).to(torch.float32)


def attention_mask(positions: Tensor, key_positions: Tensor, bias: Optional[Tensor], like: Tensor, before: int = -1, after: int = 0, chunk: int = 0) -> Tensor:
    """Additive mask [B,1 or H,S,T] in like's dtype: bias where the query at i may see the key at j, -inf elsewhere.

    positions [B,S] and key_positions [B,T] int64. Key -1 is never seen. before, after: j is at most that far on either side of i, -1 for any distance;
    after=0 is causal attention. chunk: i and j lie in the same chunk of that many positions; 0 for none.
    """
    if not torch.jit.is_scripting():
        if emitting():
            shape = [positions.size(0), 1 if bias is None else bias.size(1), positions.size(1), key_positions.size(1)]
            attributes = {"before": float(before), "after": float(after), "chunk": float(chunk)}
            return _node("Mask", [positions, key_positions, bias, like], attributes, like, shape)
    keys, queries = key_positions.unsqueeze(1), positions.unsqueeze(2)
    visible = keys.ge(0)
    if after >= 0:
        visible = visible & keys.le(queries + after if after > 0 else queries)
    if before >= 0:
        visible = visible & keys.ge(queries - before)
    if chunk > 0:
        visible = visible & torch.div(keys, chunk, rounding_mode="floor").eq(torch.div(queries, chunk, rounding_mode="floor"))
    scores = torch.zeros([1], dtype=torch.float32, device=like.device) if bias is None else bias
    return torch.where(visible.unsqueeze(1), scores, float("-inf")).to(like.dtype)


def attend(
    q: Tensor, keys: Tensor, values: Tensor, mask: Tensor, content: Optional[Tensor], scale: float, softcap: float = 0.0, sinks: Optional[Tensor] = None
) -> Tensor:
    """softmax(cap(scale q k) + mask + content) v: q [B,S,H,D'], keys [B,K,T,D'], values [B,K,T,D], mask [B,1 or H,S,T], content [B,H,S,T] or none, to [B,S,H*D].

    cap(s) = softcap tanh(s / softcap), or s where softcap is 0. sinks [H]: a score for each head that takes its share of the softmax and brings no value.
    A row that sees nothing gives 0.
    """
    if not torch.jit.is_scripting():
        if emitting():
            attributes = {"heads": float(q.size(2)), "kv_heads": float(keys.size(1)), "scale": scale, "softcap": softcap}
            inputs: List[Optional[Tensor]] = [q, keys, values, mask, content, sinks]
            return _node("Attend", inputs, attributes, q, [q.size(0), q.size(1), q.size(2) * values.size(3)])
    dtype = q.dtype
    if content is not None:  # its scores may leave the range of float16
        q, keys, values, mask = q.to(torch.float32), keys.to(torch.float32), values.to(torch.float32), mask.to(torch.float32) + content
    if sinks is not None:  # a key and a value of zeros, seen with that score
        mask = torch.cat((sinks.to(mask.dtype).view(1, -1, 1, 1).expand(mask.size(0), -1, mask.size(2), 1), mask.expand(-1, q.size(2), -1, -1)), dim=3)
        keys, values = torch.nn.functional.pad(keys, [0, 0, 1, 0]), torch.nn.functional.pad(values, [0, 0, 1, 0])
    if softcap > 0:
        scores = softcap * torch.tanh(products(q, keys) * (scale / softcap))
        nothing = mask.amax(dim=-1, keepdim=True).eq(float("-inf"))
        return mix(shares(scores, mask).masked_fill(nothing, 0.0), values).to(dtype)
    y = torch.nn.functional.scaled_dot_product_attention(
        q.transpose(1, 2), keys, values, attn_mask=mask, scale=scale, enable_gqa=q.size(2) != keys.size(1)
    )
    return y.transpose(1, 2).flatten(2).to(dtype)


def attend_with_shares(q: Tensor, keys: Tensor, values: Tensor, mask: Tensor, content: Tensor, scale: float) -> Tuple[Tensor, Tensor]:
    """The output of `attend` and its softmax [B,H,S,T] float32, which is 0 for keys that a query does not see. For a query that sees no key, both have no meaning."""
    if not torch.jit.is_scripting():
        if emitting():
            y = attend(q, keys, values, mask, content, scale)
            return y, _node("Shares", [y], {}, content, [q.size(0), q.size(2), q.size(1), keys.size(2)])
    found = shares(scale * products(q, keys) + content, mask)
    return mix(found, values), found


def products(q: Tensor, keys: Tensor) -> Tensor:
    """q [B,S,H,D] times keys [B,K,T,D], unscaled: [B,H,S,T] float32."""
    if not torch.jit.is_scripting():
        if emitting():
            attributes = {"heads": float(q.size(2)), "kv_heads": float(keys.size(1))}
            return _node("Products", [q, keys], attributes, torch.empty(0, dtype=torch.float32), [q.size(0), q.size(2), q.size(1), keys.size(2)])
    grouped = q.to(torch.float32).transpose(1, 2).unflatten(1, [keys.size(1), -1])
    return (grouped @ keys.to(torch.float32).unsqueeze(2).transpose(3, 4)).flatten(1, 2)


def turned_products(q: Tensor, keys: Tensor, angles: Tensor, interleaved: bool) -> Tensor:
    """q [B,S,H,D] times keys [B,K,T,D] whose first r entries each query turns by angles of its own, [B,1,S,T,r/2] float32: [B,H,S,T] float32."""
    if not torch.jit.is_scripting():
        if emitting():
            shape = [q.size(0), q.size(2), q.size(1), keys.size(2)]
            attributes = {"heads": float(q.size(2)), "kv_heads": float(keys.size(1)), "interleaved": float(interleaved)}
            return _node("TurnedProducts", [q, keys, angles], attributes, torch.empty(0, dtype=torch.float32), shape)
    size, by_query = 2 * angles.size(4), q.to(torch.float32).transpose(1, 2).unsqueeze(3)
    by_key = keys.to(torch.float32).repeat_interleave(q.size(2) // keys.size(1), dim=1).unsqueeze(2)
    if interleaved:
        a, b, c, d = by_query[..., 0:size:2], by_query[..., 1:size:2], by_key[..., 0:size:2], by_key[..., 1:size:2]
    else:
        (a, b), (c, d) = by_query[..., :size].chunk(2, dim=-1), by_key[..., :size].chunk(2, dim=-1)
    scores = ((a * c + b * d) * angles.cos() + (b * c - a * d) * angles.sin()).sum(-1)
    return scores + products(q[..., size:], keys[..., size:]) if size < q.size(3) else scores


def wave_products(q: Tensor, key_positions: Tensor, waves: Tensor) -> Tensor:
    """q [B,H,S,E] times the rows cos(p w), sin(p w) of waves [M,E] float32 at key_positions p [B,T] int64: [B,H,S,T] float32; arbitrary where p is outside the table."""
    if not torch.jit.is_scripting():
        if emitting():
            return _node("WaveProducts", [q, key_positions, waves], {}, q, [q.size(0), q.size(1), q.size(2), key_positions.size(1)])
    rows = torch.nn.functional.embedding(key_positions.clamp(0, waves.size(0) - 1), waves)
    return (q.flatten(1, 2) @ rows.transpose(1, 2)).unflatten(1, [q.size(1), q.size(2)])


def shares(scores: Tensor, mask: Tensor) -> Tensor:
    """softmax(scores + mask) over keys, [B,H,S,T] float32; a row that sees nothing gives equal shares, which nobody reads."""
    # -1e30 stands for -inf: a softmax of nothing but -inf is not a number.
    return torch.softmax((scores + mask.to(torch.float32)).clamp(min=-1e30), dim=-1)


def mix(shares: Tensor, values: Tensor) -> Tensor:
    """shares [B,H,S,T] float32 of values [B,K,T,D] to [B,S,H*D] in values' dtype."""
    if not torch.jit.is_scripting():
        if emitting():
            attributes = {"heads": float(shares.size(1)), "kv_heads": float(values.size(1))}
            return _node("Mix", [shares, values], attributes, values, [shares.size(0), shares.size(2), shares.size(1) * values.size(3)])
    grouped = shares.unflatten(1, [values.size(1), -1])
    return (grouped @ values.to(torch.float32).unsqueeze(2)).flatten(1, 2).transpose(1, 2).flatten(2).to(values.dtype)


def pick(rows: Tensor, index: Tensor) -> Tensor:
    """rows [B,H,S,R] at index [B,1 or H,S,T] int64, 0 .. R - 1: [B,H,S,T]."""
    if not torch.jit.is_scripting():
        if emitting():
            return _node("Pick", [rows, index], {}, rows, [rows.size(0), rows.size(1), rows.size(2), index.size(3)])
    return rows.gather(-1, index.expand(-1, rows.size(1), -1, -1))


def collect_by_distance(shares: Tensor, positions: Tensor, key_positions: Tensor, left: int, right: int) -> Tensor:
    """Sums of shares [B,H,S,T] of `attend_with_shares` over the keys at each distance, clipped to -left .. right, for positions [B,S] and key_positions [B,T]
    int64: [B,H,S,left+right+1]."""
    if not torch.jit.is_scripting():
        if emitting():
            attributes, shape = {"left": float(left), "right": float(right)}, [*shares.shape[:3], left + right + 1]
            return _node("CollectByDistance", [shares, positions, key_positions], attributes, shares, shape)
    index = ((key_positions.unsqueeze(1) - positions.unsqueeze(2)).clamp(-left, right) + left).unsqueeze(1)
    empty = torch.zeros_like(shares[..., :1]).expand(-1, -1, -1, left + right + 1)
    return empty.scatter_add(-1, index.expand(-1, shares.size(1), -1, -1), shares)


def suffix_sum(x: Tensor, own: bool = True) -> Tensor:
    """Sum from each entry of the last axis to its end, with or without the entry itself; exact near the end, where sums are short."""
    if not torch.jit.is_scripting():
        if emitting():
            return _node("SuffixSum", [x], {"own": float(own)}, x, [x.size(0), x.size(1), x.size(2), x.size(3)])
    sums = x.flip(-1).cumsum(-1).flip(-1)
    return sums if own else sums - x


def rows_at_counts(q: Tensor, keys: Tensor, mask: Tensor, rows: Tensor) -> Tensor:
    """rows [B,H,S,R] at the count of each key, the sum of sigmoid(q k) over the visible keys from this one on, at most R - 1; interpolated: [B,H,S,T] float32.
    q [B,S,H,D], keys [B,K,T,D], mask [B,1 or H,S,T]."""
    if not torch.jit.is_scripting():
        if emitting():
            attributes = {"heads": float(q.size(2)), "kv_heads": float(keys.size(1))}
            return _node("RowsAtCounts", [q, keys, mask, rows], attributes, rows, [q.size(0), q.size(2), q.size(1), keys.size(2)])
    gates = torch.sigmoid(products(q, keys)) * mask.ge(0).to(torch.float32)
    # Kernels add float32 numbers in different orders; in float64 they agree on the row below a count and on the fraction above it.
    counts = suffix_sum(gates.to(torch.float64)).clamp(0.0, rows.size(3) - 1.0)
    below = counts.floor()
    # Clamped as integers: NaN gives no valid index, and an index out of range would fail the whole batch.
    index = below.to(torch.int64).clamp(0, rows.size(3) - 1)
    steps = torch.cat((rows[..., 1:], rows[..., -1:]), dim=-1) - rows  # from each row to the next
    return pick(rows, index) + (counts - below).to(torch.float32) * pick(steps, index)

def reduced_angle(radians: Tensor) -> Tensor:
    """Angles of any size, float64, less whole turns, in float32: exact where float32 radians would have lost their digits."""
    # 1 / (2 pi) in two parts that are float32 numbers each: the exporter of torch 2.13 rounds scalars of float64 expressions to float32.
    turns = radians * 0.15915493667125702 + radians * 6.4206384e-09
    return ((turns - turns.floor()) * (2 * math.pi)).to(torch.float32)
