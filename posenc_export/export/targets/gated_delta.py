"""Lowerings of the gated delta rule: standard operators in chunks, and ONNX Runtime's own."""

from typing import List, Sequence, Tuple

import numpy as np
import onnx_ir as ir

from posenc_export.export.targets.builder import DOUBLE, FLOAT, MICROSOFT, Builder, size
from posenc_export.ops import graph
from posenc_export.ops.graph import LastHidden

CHUNK = 32  # tokens whose triangular system is solved at once
WIDTHS = [1 << level for level in range(CHUNK.bit_length() - 1)]  # 1, 2, .. CHUNK / 2
LAST_SWAPPED = [0, 1, 2, 4, 3]


def fused(op: Builder, node: graph.GatedDelta) -> ir.Value:
    """Emit LinearAttention, which takes fewer heads of queries and keys than of values."""
    heads = [op.merge_heads(part) for part in (node.q, node.k, node.v)]
    y, state = op.several(
        2,
        "LinearAttention",
        *(*heads, node.state, node.decay, node.rate),
        domain=MICROSOFT,
        q_num_heads=node.kv_heads,
        kv_num_heads=node.heads,
        update_rule="gated_delta" if node.rate else "gated",
        scale=1.0,
    )
    _keep(node, state)
    return op.split_heads(y, node.heads)


def standard(op: Builder, node: graph.GatedDelta) -> ir.Value:
    """A token alone takes a few products, and more tokens chunks of CHUNK."""
    count = op.Shape(node.v, start=1, end=2)
    alone = op.Squeeze(op.Equal(count, op.constant([1])), [0])
    y, state = op.choose_several(
        alone, lambda inside: _token(inside, node), lambda inside: _chunks(inside, node)
    )
    _keep(node, state)
    return y


def _keep(node: graph.GatedDelta, state: ir.Value) -> None:
    for reader in node.readers(LastHidden):
        reader.output.replace_all_uses_with(state, replace_graph_outputs=True)


def _rows(op: Builder, node: graph.GatedDelta, value: ir.Value) -> ir.Value:
    """Repeat heads [...,K,D] of queries or keys for the heads of values: [...,H,D]."""
    if node.heads == node.kv_heads:
        return value
    index = np.repeat(np.arange(node.kv_heads), node.heads // node.kv_heads)
    return op.Gather(value, index, axis=2)


def _token(op: Builder, node: graph.GatedDelta) -> Tuple[ir.Value, ir.Value]:
    """The recurrence for one token."""
    # [B,H,1,D], [B,H,1,D], [B,H,1,V]
    sources = (_rows(op, node, node.q), _rows(op, node, node.k), node.v)
    q, k, v = (op.Transpose(part, perm=[0, 2, 1, 3]) for part in sources)
    decay, *rate = (  # [B,H,1 or D,1], [B,H,1,1]
        op.Transpose(op.Reshape(part, [0, 0, node.heads, -1]), perm=[0, 2, 3, 1])
        for part in (node.decay, node.rate)
        if part
    )
    state = op.Mul(node.state, op.Exp(decay))
    written = op.Mul(rate[0], op.Sub(v, op.MatMul(k, state))) if rate else v
    state = op.Add(state, op.Mul(op.Transpose(k, perm=[0, 1, 3, 2]), written))
    return op.Transpose(op.MatMul(q, state), perm=[0, 2, 1, 3]), state


def _chunks(op: Builder, node: graph.GatedDelta) -> Tuple[ir.Value, ir.Value]:
    """Compute chunks of C = min(S, CHUNK) tokens; a Scan carries the state between them."""
    count = op.Shape(node.v, start=1, end=2)
    length = op.Min(count, op.constant([CHUNK]))
    chunks = op.Div(op.Sub(op.Add(count, length), op.constant([1])), length)
    padding = op.Sub(op.Mul(chunks, length), count)

    def chunked(value: ir.Value, axes: int) -> ir.Value:
        """[B,S,H,...] to [N,B,H,C,...], with zeros at the end."""
        ends = op.Concat(op.constant([0]), padding, axis=0)
        padded = op.Pad(value, ends, op.constant(0, "float32"), op.constant([1]))
        shape = op.Concat([0], chunks, length, op.Shape(value, start=2), axis=0)
        return op.Transpose(op.Reshape(padded, shape), perm=[1, 0, 3, 2, 4][: axes + 1])

    q, k = (chunked(_rows(op, node, part), 4) for part in (node.q, node.k))
    v = chunked(node.v, 4)
    given = [part for part in (node.decay, node.rate) if part]
    decay, *rate = (chunked(op.Reshape(part, [0, 0, node.heads, -1]), 4) for part in given)
    # In float64, so that the difference of two long sums is exact in float32.
    sums = op.CumSum(op.Cast(decay, to=DOUBLE), op.constant(3))  # [N,B,H,C,1 or D]
    passed = _exponential(op, sums)
    total = op.Slice(sums, [-1], [1 << 60], [3])  # [N,B,H,1,1 or D]
    remaining = _exponential(op, op.Sub(total, sums))
    products = _products if size(node.decay, 2) == node.heads else _products_by_entry
    of_queries, *of_keys = products(op, length, (q, k)[: 1 + len(rate)], k, sums)
    sources = {"values": v}
    if rate:
        sources = {
            "inverse": _inverse(op, length, op.Mul(_lower(op, length, of_keys[0], -1), rate[0])),
            "values": op.Mul(rate[0], v),
            "keys": op.Mul(rate[0], op.Mul(passed, k)),
        }
    sources |= {
        "queries": op.Mul(passed, q),
        "products": of_queries,
        "columns": op.Transpose(op.Mul(remaining, k), perm=LAST_SWAPPED),
        "total": op.Transpose(_exponential(op, total), perm=LAST_SWAPPED),
    }
    body, parts = _body(op, list(sources)), len(sources)
    scanned = (node.state, *sources.values())
    state, y = op.several(2, "Scan", *scanned, body=body, num_scan_inputs=parts)
    by_token = op.Transpose(y, perm=[1, 0, 3, 2, 4])  # [B,N,C,H,V]
    shape = op.Concat([0, -1], op.Shape(node.v, start=2), axis=0)
    return op.Slice(op.Reshape(by_token, shape), [0], count, [1]), state


def _exponential(op: Builder, exponent: ir.Value) -> ir.Value:
    return op.Exp(op.Cast(exponent, to=FLOAT))


def _products(
    op: Builder, length: ir.Value, rows: Sequence[ir.Value], k: ir.Value, sums: ir.Value
) -> List[ir.Value]:
    """Return row_i . (e^(s_i - s_j) k_j) for j <= i and 0 for others, for each of `rows`; all
    [N,B,H,C,D], sums s [N,B,H,C,1].
    """
    between = op.Sub(sums, op.Transpose(sums, perm=LAST_SWAPPED))
    decays = _lower(op, length, _exponential(op, between), 0)
    keys = op.Transpose(k, perm=LAST_SWAPPED)
    return [op.Mul(op.MatMul(row, keys), decays) for row in rows]


def _products_by_entry(
    op: Builder, length: ir.Value, rows: Sequence[ir.Value], k: ir.Value, sums: ir.Value
) -> List[ir.Value]:
    """As _products with sums [N,B,H,C,D]. Rows in the upper and keys in the lower half of a block
    take their decays from and to the last token of the lower half, so that no exponent is above 0.
    """
    zero = op.constant(0, "float32")
    diagonal = _corner(op, np.eye(CHUNK, dtype=bool), length)
    results = [
        op.Where(diagonal, op.ReduceSum(op.Mul(row, k), op.constant([-1]), keepdims=1), zero)
        for row in rows
    ]
    last, index = op.Sub(length, op.constant([1])), np.arange(CHUNK)
    for width in WIDTHS:
        middle = op.constant(index // (2 * width) * (2 * width) + width - 1)
        middle = op.Min(op.Slice(middle, [0], length, [0]), last)
        distance = op.Abs(op.Sub(sums, op.Gather(sums, middle, axis=3)))
        decays = _exponential(op, op.Neg(distance))
        keys = op.Transpose(op.Mul(k, decays), perm=LAST_SWAPPED)
        inside = _corner(op, _quarters(width), length)
        results = [
            op.Where(inside, op.MatMul(op.Mul(row, decays), keys), total)
            for row, total in zip(rows, results, strict=True)
        ]
    return results


def _body(op: Builder, names: Sequence[str]) -> ir.Graph:
    """One chunk, from the state [B,H,D,V] and parts of it [B,H,...] to the next state and y."""
    state, *parts = (op.named(name) for name in ("state", *names))
    part, inside = dict(zip(names, parts, strict=True)), op.empty()
    written = part["values"]
    if "inverse" in part:
        known = inside.Sub(written, inside.MatMul(part["keys"], state))
        written = inside.MatMul(part["inverse"], known)
    read = inside.MatMul(part["queries"], state)
    y = inside.Add(read, inside.MatMul(part["products"], written))
    added = inside.MatMul(part["columns"], written)
    last = inside.Add(inside.Mul(state, part["total"]), added)
    return inside.graph_of("chunk", [state, *parts], [last, y])


def _lower(op: Builder, length: ir.Value, value: ir.Value, diagonal: int) -> ir.Value:
    """Replace the entries above a diagonal by 0."""
    kept = _corner(op, np.tri(CHUNK, k=diagonal, dtype=bool), length)
    return op.Where(kept, value, op.constant(0, "float32"))


def _corner(op: Builder, square: np.ndarray, length: ir.Value) -> ir.Value:
    """Return the first `length` rows and columns of a constant."""
    both = op.Concat(length, length, axis=0)
    return op.Slice(op.constant(square, square.dtype), [0, 0], both, [0, 1])


def _inverse(op: Builder, length: ir.Value, lower: ir.Value) -> ir.Value:
    """Invert I + lower [...,C,C], strictly lower triangular, by doubling blocks on the diagonal.

    With inverses X of blocks of size n on the diagonal, those of size 2n are X - X L X, where L
    has the entries of `lower` in the lower left quarter of each. All of these are parts of the
    inverse: unlike with powers of `lower`, nothing large cancels.
    """
    inverse = None
    for width in WIDTHS:
        inside = _corner(op, _quarters(width), length)
        joined = op.Where(inside, lower, op.constant(0, "float32"))
        if inverse is None:
            identity = op.Cast(_corner(op, np.eye(CHUNK, dtype=bool), length), to=FLOAT)
            inverse = op.Sub(identity, joined)
        else:
            inverse = op.Sub(inverse, op.MatMul(op.MatMul(inverse, joined), inverse))
    assert inverse is not None
    return inverse


def _quarters(width: int) -> np.ndarray:
    """Return where rows are in the upper and columns in the lower half of a block of 2 width."""
    index = np.arange(CHUNK)
    same = index[:, None] // (2 * width) == index // (2 * width)
    return same & (index[:, None] // width != index // width) & np.tri(CHUNK, dtype=bool)
