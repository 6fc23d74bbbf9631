"""Attention over cached keys as one operator, which writes keys and values in place, attends, and
rotates if it can: GroupQueryAttention where that is exact, and with the library of packages/kernels
CachedAttention, which has the first inputs and attributes of GroupQueryAttention, and also adds
biases by distance and hides keys of other chunks.
"""

from typing import Any, Mapping, NamedTuple, Optional, Sequence

import onnx_ir as ir

from posenc_export.export.targets import by_distance, content, ort_slots, standard
from posenc_export.export.targets.builder import FLOAT, MICROSOFT, Builder, size
from posenc_export.export.targets.by_distance import Inputs
from posenc_export.ops.graph import (
    Append,
    Attend,
    AttendTurnedKeys,
    AttentionWeights,
    Mask,
    Pick,
    Rotate,
)
from posenc_export.runtime.graphs.kernel_library import DOMAIN, OPERATOR
from posenc_export.runtime.session.caches import WINDOW_ROOM
from posenc_export.runtime.verification.conformance.attention import INPUTS

AFTER_SOFTMAX = 2  # value of the attribute qk_output
# A rotation: tables of queries, tables of keys, and the rows of tokens; None if they are the slots.
Rotation = tuple[Rotate, Rotate, ir.Value | None]


class Cached(NamedTuple):
    """An Attend, and the nodes that append its keys and values, which no other node reads."""

    node: Attend
    key: Append
    value: Append
    mask: Mask

    @classmethod
    def of(cls, node: Attend) -> Optional["Cached"]:
        """Return a node with what it reads, or None if others read its keys or values."""
        appended, mask = standard.appended_here(node), Mask.of(node.mask)
        return None if appended is None or mask is None else cls(node, *appended, mask)

    @property
    def with_scores(self) -> bool:
        """Whether the node is given, or gives, scores of all tokens."""
        others = self.mask.bias is not None or self.node.content is not None
        return others or bool(self.node.readers(AttentionWeights))

    def slides(self, op: Builder, whole: bool) -> bool:
        """Let both caches begin at a later token than the first if the mask shows a query the last
        tokens only, and a session has a shorter cache for them than the range of positions. Return
        whether they may. whole: the operator reads all tokens anyway.
        """
        window = self.mask.before + 1 or self.mask.chunk
        short = window + 2 * WINDOW_ROOM < op.max_positions and ort_slots.by_columns(op) is None
        if whole or not window or not short:
            return False
        op.windows |= {str(append.past.name): window for append in (self.key, self.value)}
        return True


def attend(op: Builder, node: Attend) -> ir.Value:
    """Emit GroupQueryAttention if no other node reads the appended keys and values, otherwise
    standard attention over the valid slots.

    The operator hides later keys, and those before a window, which includes the query; other masks
    are a bias. In float16, content scores may exceed the range of its bias. On CUDA it refuses
    sinks beside a bias.
    """
    cached, of_content = Cached.of(node), node.content is not None
    if cached is None or (of_content and op.dtype != "float32"):
        return standard.attend(op, node)
    mask, weights = cached.mask, node.readers(AttentionWeights)
    if op.on_device and node.sinks is not None and (of_content or mask.bias or mask.chunk):
        return standard.attend(op, node)
    compact = ort_slots.by_columns(op) is None
    slides = cached.slides(op, cached.with_scores or op.dtype != "float32" or op.on_device)
    wide, by_slot = widened(cached.key, cached.value), rotation_by_slot(op, cached)
    lengths, longest = ort_slots.lengths(op, slides)
    inputs: Inputs = _heads(op, cached, (wide, wide), by_slot is not None)
    inputs |= {"lengths": lengths, "longest": longest}
    if by_slot is not None:
        inputs |= {"cos": op.table(by_slot.cos), "sin": op.table(by_slot.sin)}
        inputs["positions"] = ort_slots.cache_position(op) if slides else None
    hides = compact and not mask.chunk
    bias = _sum(op, mask.bias if hides else node.mask, node.content)
    if mask.chunk and slides:
        bias = standard.mask_of_keys(op, mask, ort_slots.key_positions(op, slides))
    inputs["bias"] = standard.in_dtype(op, bias) if hides and bias is not None else bias
    attributes = _attributes(cached, by_slot, hides)
    attributes |= {"qk_output": AFTER_SOFTMAX} if weights else {}
    outputs = op.several(
        4 if weights else 3,
        "GroupQueryAttention",
        *(inputs.get(name) for name in INPUTS),
        domain=MICROSOFT,
        **attributes,
    )
    # The node leaves weights of hidden keys past a row's end unwritten.
    for reader in weights:
        seen = op.Greater(node.mask, op.constant(standard.LEAST, "float32"))
        known = op.Where(seen, outputs[3], op.constant(0, "float32"))
        reader.output.replace_all_uses_with(known)
    y = _finished(op, cached, outputs[:3], wide)
    if compact:
        return y
    token = op.GreaterOrEqual(op.Unsqueeze(mask.positions, [2]), 0)
    return op.Where(token, y, op.constant(0, op.dtype))  # padding sees no key and has NaN there


def attend_natively(op: Builder, node: Attend) -> ir.Value:
    """Emit CachedAttention if it can represent a node, otherwise the nodes of `ort`."""
    inside = _inside(op, node, {})
    return attend(op, node) if inside is None else inside


def attend_turned_keys(op: Builder, node: AttendTurnedKeys) -> ir.Value:
    """As `attend_natively`."""
    inside = _inside(op, node, content.digits(op, node))
    return content.attend_turned_keys(op, node) if inside is None else inside


def _inside(op: Builder, node: Attend, turns: Mapping[str, ir.Value]) -> ir.Value | None:
    """Emit CachedAttention, or return None if another node than sums by distance reads the softmax,
    or any other the appended keys and values. turns: content.digits.
    """
    cached = Cached.of(node)
    if cached is None or op.dtype != "float32" or ort_slots.by_columns(op) is not None:
        return None
    key, mask = cached.key, cached.mask
    table = None if mask.bias is None else by_distance.table_of(op, mask, node.heads)
    of_content = by_distance.keys_of(op, node, mask, wide_size(key))
    of_content = of_content or by_distance.picked(op, node, mask)
    sums = by_distance.collected(node, mask, of_content)
    if sums is None and node.readers(AttentionWeights):
        return None
    pieces = {} if table else by_distance.pieces_of(op, mask)
    of_mask = None if table or pieces else mask.bias
    bias = _sum(op, of_mask, None if of_content else node.content)
    # GroupQueryAttention reads chunks from a bias, which such scores need anyway.
    if mask.chunk and bias is not None:
        return None
    slides = cached.slides(op, bool(bias or of_content or pieces or sums))
    rotation, widths = _rotation(op, cached, slides), (widened(key), widened(cached.value))
    inputs: Inputs = {**_heads(op, cached, widths, rotation is not None), **of_content, **pieces}
    inputs |= {**turns, "lengths": ort_slots.lengths(op, slides)[0], "bias": bias}
    inputs |= {"distances": table, "slots": ort_slots.cache_position(op, slides)}
    inputs["positions"] = mask.positions if mask.chunk else None
    if rotation is not None:
        of_q, of_k, rows = rotation
        inputs |= {"cos": of_q.cos, "sin": of_q.sin}
        if (of_q.cos, of_q.sin) != (of_k.cos, of_k.sin):
            inputs |= {"key_cos": of_k.cos, "key_sin": of_k.sin}
        inputs |= {} if rows is None else {"positions": rows}
    attributes, pick = _attributes(cached, rotation and rotation[0], True), Pick.of(node.content)
    attributes |= {"key_row_scale": pick.factor} if pick and "key_rows" in inputs else {}
    outputs = op.several(
        4 if sums else 3,
        OPERATOR,
        *(inputs.get(name) for name in INPUTS),
        domain=DOMAIN,
        **attributes,
    )
    for total in sums or ():
        total.replace_all_uses_with(outputs[3])
    return _finished(op, cached, outputs[:3], widths[1])


def _attributes(cached: Cached, rotate: Rotate | None, hides: bool) -> dict[str, Any]:
    """Return the attributes of an operator, which rotates, and which hides keys itself."""
    node, mask = cached.node, cached.mask
    assert not mask.after  # models with a cache are causal
    attributes = {"num_heads": node.heads, "kv_num_heads": node.kv_heads}
    attributes |= standard.scores_of(node)
    if hides and mask.before >= 0:
        attributes["local_window_size"] = mask.before + 1
    if hides and mask.chunk:
        attributes["chunk_size"] = mask.chunk
    if rotate is not None:
        attributes |= {"do_rotary": 1, "rotary_interleaved": int(rotate.interleaved)}
    elif isinstance(node, AttendTurnedKeys):
        attributes |= {"rotary_interleaved": int(node.interleaved)}
    return attributes


def rotation_by_slot(op: Builder, cached: Cached) -> Rotate | None:
    """Return the Rotate node of queries if GroupQueryAttention rotates queries and keys by slot,
    otherwise None. Its kernel needs whole tables, and D to be a multiple of 16 and r/2 of 8.

    A slot differs from the position by a constant, which matters unless the rotation is linear.
    """
    rotation = _rotation(op, cached, False)
    if rotation is None or rotation[2] is not None or ort_slots.by_columns(op) is not None:
        return None
    of_q = rotation[0]
    return of_q if size(of_q.x, 3) % 16 == 0 and size(of_q.cos, 1) % 8 == 0 else None


def _rotation(op: Builder, cached: Cached, slides: bool) -> Rotation | None:
    """Return the rotations of queries and keys if CachedAttention can rotate both: with whole
    tables, the same numbers of a head, by the same positions, which are those of the mask if that
    has chunks.

    Linear rotations by slot differ from those by position by the same turn of queries and keys,
    unless the cache may begin at a later token (slides).
    """
    of_q, of_k, mask = Rotate.of(cached.node.q), Rotate.of(cached.key.new), cached.mask
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


def _heads(op: Builder, cached: Cached, widths: Sequence[int], rotates: bool) -> Inputs:
    """Return the inputs of heads, caches and sinks: queries, keys and values as [B,S,N*D], or one
    packed input for parts of one projection.

    Args:
        widths: head sizes of the caches of keys and values, to which heads are padded.
        rotates: the operator rotates queries and keys.
    """
    parts = []
    heads = (cached.node.q, cached.key.new, cached.value.new)
    for part, wide in zip(heads, (widths[0], *widths), strict=True):
        rotate = Rotate.of(part)
        if rotate is not None:
            part = rotate.x if rotates else standard.rotate(op, rotate)
        parts.append(op.merge_heads(_padded(op, part, wide)))
    split = parts[0].producer()
    if split is not None and split.op_type == "Split" and list(split.outputs) == parts:
        inputs: Inputs = {"q": split.inputs[0]}
    else:
        inputs = dict(zip(("q", "k", "v"), parts, strict=True))
    inputs |= {"past_k": cached.key.past, "past_v": cached.value.past}
    return {**inputs, "sinks": cached.node.sinks}


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


def _padded(op: Builder, value: ir.Value, wide: int) -> ir.Value:
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


def _sum(op: Builder, *scores: ir.Value | None) -> ir.Value | None:
    """Add the scores that are not None."""
    terms = [value for value in scores if value is not None]
    return op.Add(*terms) if len(terms) > 1 else next(iter(terms), None)


def _finished(op: Builder, cached: Cached, outputs: Sequence[ir.Value], wide: int) -> ir.Value:
    """Return y [B,S,H*D] from output, keys and values with heads of size `wide`, which replace the
    outputs of the Append nodes.
    """
    y, *presents = outputs
    for append, present in zip((cached.key, cached.value), presents, strict=True):
        append.output.replace_all_uses_with(present, replace_graph_outputs=True)
    values = size(cached.value.new, 3)
    if values < wide:
        by_head = op.Reshape(y, [0, 0, cached.node.heads, -1])
        y = op.merge_heads(op.Slice(by_head, [0], [values], [3]))
    return y
