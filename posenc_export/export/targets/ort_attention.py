"""Target `ort`: attention over cached keys as GroupQueryAttention where that is exact. It writes
keys and values in place, attends, and rotates if it can.
"""

from typing import Any, Dict, List, Optional, Sequence, Tuple

import onnx_ir as ir

from posenc_export.export.targets import ort_slots, standard
from posenc_export.export.targets.builder import FLOAT, MICROSOFT, Builder, size
from posenc_export.ops.graph import (
    Append,
    Attend,
    AttentionWeights,
    Mask,
    Rotate,
)
from posenc_export.runtime.session.caches import WINDOW_ROOM

AFTER_SOFTMAX = 2  # value of the attribute qk_output


def attend(op: Builder, node: Attend) -> ir.Value:
    """Emit GroupQueryAttention if no other node reads the appended keys and values, otherwise
    standard attention over the valid slots.

    In float16, content scores may exceed the range of its bias.
    """
    appended = standard.appended_here(node)
    if appended is None or (node.content is not None and op.dtype != "float32"):
        return standard.attend(op, node)
    wide, compact = widened(*appended), ort_slots.by_columns(op) is None
    window = _window(op, node)
    op.windows |= {str(append.past.name): window for append in appended if window}
    outputs = _group_query(op, node, appended, wide, bool(window))
    for reader in node.readers(AttentionWeights):
        reader.output.replace_all_uses_with(_where_seen(op, outputs[3], node.mask))
    y = finished(op, node, appended, outputs[:3], wide)
    return y if compact else _at_tokens(op, y, node.mask)


def _group_query(
    op: Builder, node: Attend, appended: Tuple[Append, Append], wide: int, slides: bool
) -> Tuple[ir.Value, ...]:
    """Return output [B,S,H*D], keys and values with the new ones, and the softmax if it is read.
    slides: lengths count from the first token in the caches.
    """
    key, value = appended
    lengths = ort_slots.lengths_in_windows(op) if slides else ort_slots.lengths(op)
    bias, window = _bias_and_window(op, node, slides)
    attributes = {"num_heads": node.heads, "kv_num_heads": node.kv_heads}
    attributes |= standard.scores_of(node) | window
    heads = [node.q, key.new, value.new]
    tables: List[Optional[ir.Value]] = [None, None, None]
    rotation = rotation_by_slot(op, node.q, key.new)
    if rotation is None:
        heads = [rotated(op, part) for part in heads]
    else:
        heads = [rotate.x if (rotate := Rotate.of(part)) else part for part in heads]
        places = ort_slots.cache_position(op) if slides else None
        tables = [op.table(rotation.cos), op.table(rotation.sin), places]
        attributes |= {"do_rotary": 1, "rotary_interleaved": int(rotation.interleaved)}
    with_weights = bool(node.readers(AttentionWeights))
    attributes |= {"qk_output": AFTER_SOFTMAX} if with_weights else {}
    heads = [padded(op, part, wide) for part in heads]
    caches = (key.past, value.past)
    inputs = [*projections(op, heads), *caches, *lengths, *tables, bias, node.sinks]
    count, domain = 4 if with_weights else 3, MICROSOFT
    return op.several(count, "GroupQueryAttention", *inputs, domain=domain, **attributes)


def _bias_and_window(
    op: Builder, node: Attend, slides: bool
) -> Tuple[Optional[ir.Value], Dict[str, Any]]:
    """Return what is added to scores, [B,1 or H,S,T] or None, and the attribute of a window. The
    node itself hides later keys, and those before a window, which includes the query.
    """
    mask = Mask.of(node.mask)
    assert mask is not None and not mask.after  # models with a cache are causal
    if mask.chunk and slides:
        return standard.mask_of_keys(op, mask, ort_slots.key_positions_in_windows(op)), {}
    if ort_slots.by_columns(op) is not None or mask.chunk:
        return sum_of(op, node.mask, node.content), {}
    bias = sum_of(op, mask.bias, node.content)
    bias = None if bias is None else standard.in_dtype(op, bias)
    return bias, {} if mask.before < 0 else {"local_window_size": mask.before + 1}


def _window(op: Builder, node: Attend) -> int:
    """Return `window_of` the mask of a node; 0 if it is given scores of all tokens."""
    mask = Mask.of(node.mask)
    assert mask is not None
    whole = op.dtype != "float32" or op.on_device or with_scores(node, mask)
    return 0 if whole else window_of(op, mask)


def with_scores(node: Attend, mask: Mask) -> bool:
    """Return whether a node is given, or gives, scores of all tokens."""
    others = mask.bias is not None or node.content is not None
    return others or bool(node.readers(AttentionWeights))


def window_of(op: Builder, mask: Mask) -> int:
    """Return the most last tokens that a mask shows a query, with its own; 0 if it shows others, or
    if a session has no shorter cache for the range of positions.
    """
    window = mask.before + 1 or mask.chunk
    short = window + 2 * WINDOW_ROOM < op.max_positions
    return window if short and ort_slots.by_columns(op) is None else 0


def rotation_by_slot(op: Builder, q: ir.Value, k: ir.Value) -> Optional[Rotate]:
    """Return the Rotate node of q if GroupQueryAttention rotates q and k by slot, otherwise None.
    Its kernel needs whole tables, and D to be a multiple of 16 and r/2 of 8.

    A slot differs from the position by a constant, which matters unless the rotation is linear.
    """
    of_q, of_k = Rotate.of(q), Rotate.of(k)
    if ort_slots.by_columns(op) is not None or of_q is None or of_k is None:
        return None
    if of_q.node.inputs[1:] != of_k.node.inputs[1:] or not of_q.linear:
        return None
    if of_q.cos.name in op.levels:
        return None
    return of_q if size(of_q.x, 3) % 16 == 0 and size(of_q.cos, 1) % 8 == 0 else None


def rotated(op: Builder, value: ir.Value) -> ir.Value:
    """Rotate heads by their Rotate node, if there is one."""
    node = Rotate.of(value)
    return value if node is None else standard.rotate(op, node)


def wide_size(*appended: Append) -> int:
    """Return the least multiple of 8 that is no smaller than the head sizes of caches."""
    return -(-max(size(append.past, 3) for append in appended) // 8) * 8


def widened(*appended: Append) -> int:
    """Widen caches to one head size, `wide_size`, and return it."""
    wide = wide_size(*appended)
    for append in appended:
        assert append.past.shape is not None
        append.past.shape = ir.Shape([*append.past.shape[:3], wide])
    return wide


def padded(op: Builder, value: ir.Value, wide: int) -> ir.Value:
    """Pad heads [B,S,N,D] with zeros to [B,S,N,wide]."""
    missing = wide - size(value, 3)
    if value.shape is None or not missing:
        return value
    if op.dtype == "bfloat16":  # CUDA pads no bfloat16
        inputs = [op.Cast(value, to=FLOAT), op.constant([0, missing]), op.constant(0, "float32")]
        wider = standard.in_dtype(op, op.Pad(*inputs, [3]))
    else:
        wider = op.Pad(value, op.constant([0, missing]), op.constant(0, op.dtype), [3])
    wider.shape = ir.Shape([*value.shape[:3], wide])
    return wider


def sum_of(op: Builder, *scores: Optional[ir.Value]) -> Optional[ir.Value]:
    """Add the scores that are not None."""
    terms = [value for value in scores if value is not None]
    return op.Add(*terms) if len(terms) > 1 else next(iter(terms), None)


def projections(op: Builder, heads: Sequence[ir.Value]) -> List[Optional[ir.Value]]:
    """Return q, k and v as [B,S,N*D], or one packed input for parts of one projection."""
    parts = [op.merge_heads(value) for value in heads]
    split = parts[0].producer()
    if split is not None and split.op_type == "Split" and list(split.outputs) == parts:
        return [split.inputs[0], None, None]
    return list(parts)


def finished(
    op: Builder,
    node: Attend,
    appended: Tuple[Append, Append],
    outputs: Sequence[ir.Value],
    wide: int,
) -> ir.Value:
    """Return y [B,S,H*D] from output, keys and values with heads of size `wide`, which replace the
    outputs of the Append nodes.
    """
    y, *presents = outputs
    for append, present in zip(appended, presents, strict=True):
        append.output.replace_all_uses_with(present, replace_graph_outputs=True)
    values = size(appended[1].new, 3)
    if values < wide:
        by_head = op.Reshape(y, [0, 0, node.heads, -1])
        y = op.merge_heads(op.Slice(by_head, [0], [values], [3]))
    return y


def _where_seen(op: Builder, weights: ir.Value, mask: ir.Value) -> ir.Value:
    """Set weights of hidden keys to 0; the node leaves those past a row's end unwritten."""
    seen = op.Greater(mask, op.constant(standard.LEAST, "float32"))
    return op.Where(seen, weights, op.constant(0, "float32"))


def _at_tokens(op: Builder, y: ir.Value, mask: ir.Value) -> ir.Value:
    """Set y [B,S,H*D] to 0 at padding, which sees no key and has NaN there."""
    semantic_mask = Mask.of(mask)
    assert semantic_mask is not None
    token = op.GreaterOrEqual(op.Unsqueeze(semantic_mask.positions, [2]), 0)
    return op.Where(token, y, op.constant(0, op.dtype))
