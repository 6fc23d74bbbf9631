"""Lowerings of the gated delta rule: its recurrence in a Scan, and ONNX Runtime's own operator."""

from typing import Any

import numpy as np
import onnx_ir as ir

from posenc_export.export.targets.builder import MICROSOFT, Builder
from posenc_export.ops import graph
from posenc_export.ops.graph import LastHidden


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
    """Scan the tokens of a call, with the state between them."""
    sources = (_rows(op, node, node.q), _rows(op, node, node.k), node.v)
    q, k, v = (op.Unsqueeze(part, [3]) for part in sources)  # [B,S,H,1,D or V]
    decay, *rate = (  # [B,S,H,1 or D,1], [B,S,H,1,1]
        op.Unsqueeze(op.Reshape(part, [0, 0, node.heads, -1]), [4])
        for part in (node.decay, node.rate)
        if part
    )
    parts = (q, k, op.Transpose(k, perm=[0, 1, 2, 4, 3]), v, op.Exp(decay), *rate)
    over: Any = {"num_scan_inputs": len(parts), "scan_input_axes": [1] * len(parts)}
    body = _body(op, len(parts))
    state, y = op.several(2, "Scan", node.state, *parts, body=body, scan_output_axes=[1], **over)
    _keep(node, state)
    return op.Squeeze(y, [3])


def _body(op: Builder, count: int) -> ir.Graph:
    """The recurrence for one token, from the state [B,H,D,V] and `count` parts of the token."""
    state, *parts = (op.named() for _ in range(1 + count))
    q, k, column, v, decay, *rate = parts
    inside = op.empty()
    last = inside.Mul(state, decay)
    written = inside.Mul(rate[0], inside.Sub(v, inside.MatMul(k, last))) if rate else v
    last = inside.Add(last, inside.Mul(column, written))
    return inside.graph_of("token", [state, *parts], [last, inside.MatMul(q, last)])


def _keep(node: graph.GatedDelta, state: ir.Value) -> None:
    for reader in node.readers(LastHidden):
        reader.output.replace_all_uses_with(state, replace_graph_outputs=True)


def _rows(op: Builder, node: graph.GatedDelta, value: ir.Value) -> ir.Value:
    """Repeat heads [...,K,D] of queries or keys for the heads of values: [...,H,D]."""
    if node.heads == node.kv_heads:
        return value
    index = np.repeat(np.arange(node.kv_heads), node.heads // node.kv_heads)
    return op.Gather(value, index, axis=2)
