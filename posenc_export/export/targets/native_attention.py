"""Target `ort-native`: attention over cached keys and values as CachedAttention (packages/kernels),
which rotates, adds biases by distance and hides keys itself.
"""

from typing import Any, Dict, List, Optional, Sequence, Tuple

import onnx_ir as ir

from posenc_export.export.targets import (
    bias_pieces,
    by_query,
    distance_keys,
    distance_tables,
    ort_attention,
    ort_slots,
    picked_rows,
    standard,
)
from posenc_export.export.targets.builder import Builder, size
from posenc_export.ops.graph import (
    Append,
    Attend,
    AttendTurnedKeys,
    AttentionWeights,
    Mask,
    Rotate,
)
from posenc_export.runtime.graphs.kernel_library import DOMAIN, OPERATOR

# A rotation: tables of queries, tables of keys, and the rows of tokens; None if they are the slots.
Rotation = Tuple[Rotate, Rotate, Optional[ir.Value]]


def attend(op: Builder, node: Attend) -> ir.Value:
    """Emit CachedAttention if it can represent a node, otherwise the nodes of `ort`."""
    inside = _inside(op, node, [])
    return ort_attention.attend(op, node) if inside is None else inside


def attend_turned_keys(op: Builder, node: AttendTurnedKeys) -> ir.Value:
    """As `attend`."""
    inside = _inside(op, node, by_query.digits(op, node))
    return by_query.attend_turned_keys(op, node) if inside is None else inside


def _inside(op: Builder, node: Attend, turns: List[ir.Value]) -> Optional[ir.Value]:
    """Emit CachedAttention, or return None if another node than sums by distance reads the softmax,
    or any other the appended keys and values. turns: by_query.digits.
    """
    appended, mask = standard.appended_here(node), Mask.of(node.mask)
    if appended is None or mask is None or op.dtype != "float32":
        return None
    if ort_slots.by_columns(op) is not None:
        return None
    by_distance = None if mask.bias is None else distance_tables.table_of(op, mask, node.heads)
    key, value = appended
    keys = distance_keys.keys_of(op, node, mask, ort_attention.wide_size(key))
    picked = None if keys else picked_rows.picked(op, node, mask)
    sums = picked_rows.collected(node, mask, picked)
    if sums is None and node.readers(AttentionWeights):
        return None
    pieces = None if by_distance else bias_pieces.pieces_of(op, mask)
    others = None if by_distance or pieces else mask.bias
    content = None if keys or picked else node.content
    bias = ort_attention.sum_of(op, others, content)
    # GroupQueryAttention reads chunks from a bias, which such scores need anyway.
    if mask.chunk and bias is not None:
        return None
    window = 0 if bias or picked or pieces or sums or keys else ort_attention.window_of(op, mask)
    op.windows |= {str(append.past.name): window for append in appended if window}
    rotation = _rotation(op, node, key, mask, bool(window))
    of_keys, of_values = (ort_attention.widened(append) for append in appended)
    outputs = op.several(
        4 if sums else 3,
        OPERATOR,
        *_heads(op, (node.q, key.new, value.new), (of_keys, of_keys, of_values), rotation),
        *_inputs(op, node, appended, rotation, [by_distance, bias]),
        *(picked.inputs if picked else [None] * picked_rows.INPUTS),
        *(pieces or [None] * bias_pieces.INPUTS),
        *(keys or [None] * distance_keys.INPUTS),
        *turns,
        domain=DOMAIN,
        **_attributes(node, mask, rotation),
        **({"key_row_scale": picked.factor} if picked and picked.key_rows else {}),
    )
    for total in sums or ():
        total.replace_all_uses_with(outputs[3])
    return ort_attention.finished(op, node, appended, outputs[:3], of_values)


def _heads(
    op: Builder, heads: Sequence[ir.Value], sizes: Sequence[int], rotation: Optional[Rotation]
) -> Sequence[Optional[ir.Value]]:
    """Return queries, keys and values of these sizes, rotated unless the operator rotates them."""
    if rotation is None:
        heads = [ort_attention.rotated(op, part) for part in heads]
    else:
        heads = [rotate.x if (rotate := Rotate.of(part)) else part for part in heads]
    padded = [ort_attention.padded(op, x, size) for x, size in zip(heads, sizes, strict=True)]
    return ort_attention.projections(op, padded)


def _inputs(
    op: Builder,
    node: Attend,
    appended: Tuple[Append, Append],
    rotation: Optional[Rotation],
    biases: Sequence[Optional[ir.Value]],
) -> List[Optional[ir.Value]]:
    """Return the inputs after queries, keys and values up to the rotation of keys
    (packages/kernels/README.md). biases: by distance [H,range], and of queries and keys [B,H,S,T].
    """
    slides = str(appended[0].past.name) in op.windows
    mask = Mask.of(node.mask)
    assert mask is not None
    tables: List[Optional[ir.Value]] = [None, None, None, None]
    positions = mask.positions if mask.chunk else None
    if rotation is not None:
        of_q, of_k, rows = rotation
        tables = [of_q.cos, of_q.sin, None, None]
        if (of_q.cos, of_q.sin) != (of_k.cos, of_k.sin):
            tables[2:] = [of_k.cos, of_k.sin]
        positions = positions if rows is None else rows
    return [
        *(append.past for append in appended),
        (ort_slots.lengths_in_windows if slides else ort_slots.lengths)(op)[0],
        None,  # the length of the longest row
        *tables[:2],
        positions,
        biases[1],
        node.sinks,
        *(None, None),  # scales of a cache of 8 bits (small_caches.py)
        biases[0],
        ort_slots.position_in_windows(op) if slides else ort_slots.cache_position(op),
        *tables[2:],
    ]


def _attributes(node: Attend, mask: Mask, rotation: Optional[Rotation]) -> Dict[str, Any]:
    assert not mask.after  # models with a cache are causal
    attributes = {"num_heads": node.heads, "kv_num_heads": node.kv_heads}
    attributes |= standard.scores_of(node)
    attributes |= {} if mask.before < 0 else {"local_window_size": mask.before + 1}
    attributes |= {"chunk_size": mask.chunk} if mask.chunk else {}
    if rotation is not None:
        attributes |= {"do_rotary": 1, "rotary_interleaved": int(rotation[0].interleaved)}
    elif isinstance(node, AttendTurnedKeys):
        attributes |= {"rotary_interleaved": int(node.interleaved)}
    return attributes


def _rotation(
    op: Builder, node: Attend, key: Append, mask: Mask, slides: bool
) -> Optional[Rotation]:
    """Return the rotations of queries and keys if the operator can rotate both: with whole tables,
    the same numbers of a head, by the same positions, which are those of the mask if that has
    chunks.

    Linear rotations by slot differ from those by position by the same turn of queries and keys,
    unless the cache may begin at a later token (slides).
    """
    of_q, of_k = Rotate.of(node.q), Rotate.of(key.new)
    if of_q is None or of_k is None or of_q.cos.name in op.levels:
        return None
    shapes = [[size(table, axis) for axis in (0, 1)] for table in (of_q.cos, of_k.cos)]
    constant = all(table.const_value for table in (of_q.cos, of_q.sin, of_k.cos, of_k.sin))
    if of_q.positions is not of_k.positions or not constant or shapes[0] != shapes[1]:
        return None
    if of_q.interleaved != of_k.interleaved:
        return None
    linear = of_q.linear and of_k.linear and not slides
    if linear and (of_q.cos, of_q.sin) == (of_k.cos, of_k.sin):
        return of_q, of_k, None
    if mask.chunk and of_q.positions is not mask.positions:
        return None
    return of_q, of_k, of_q.positions
