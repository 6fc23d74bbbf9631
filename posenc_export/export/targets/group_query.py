"""Target `ort`: GroupQueryAttention, which writes keys and values in place and attends."""

from dataclasses import dataclass
from typing import Any, Dict, List, Optional, Sequence, Tuple

import onnx_ir as ir

from posenc_export.export.targets import ort_slots, standard
from posenc_export.export.targets.builder import FLOAT, MICROSOFT, Builder, size
from posenc_export.ops.graph import Append, Attend, Mask, Rotate

AFTER_SOFTMAX = 2  # value of the attribute qk_output


@dataclass(frozen=True)
class GroupQuery:
    """Inputs and attributes that the nodes in place of one Attend have in common.

    Args:
        past_value, new_value: cache [B,K,M,D] and new values [B,S,K,D'].
        wide: head size of caches and nodes.
        lengths: see `ort_slots.lengths`.
        bias: added to the scores [B,1 or H,S,T], or None.
        sinks: one score per head [H], or None.
        compact: rows are compact, so that a node can rotate by slot.
        attributes: of every node.
    """

    past_value: ir.Value
    new_value: ir.Value
    wide: int
    lengths: Tuple[ir.Value, ir.Value]
    bias: Optional[ir.Value]
    sinks: Optional[ir.Value]
    compact: bool
    attributes: Dict[str, Any]

    def emit(
        self, op: Builder, q: ir.Value, k: ir.Value, past_key: ir.Value, with_weights: bool = False
    ) -> Tuple[ir.Value, ...]:
        """Append a node for queries q [B,S,H,D] and new keys k [B,S,K,D], which it rotates if it
        can.

        Returns:
            Output [B,S,H*D], keys and values with the new ones, and with `with_weights` the
            softmax.
        """
        rotation = self.rotation(q, k)
        heads = [q, k, self.new_value]
        attributes = dict(self.attributes)
        tables: List[Optional[ir.Value]] = [None, None]
        if rotation is None:
            heads = [rotated(op, value) for value in heads]
        else:
            tables = [op.table(rotation.cos), op.table(rotation.sin)]
            heads = [rotate.x if (rotate := Rotate.of(value)) else value for value in heads]
            attributes |= {"do_rotary": 1, "rotary_interleaved": int(rotation.interleaved)}
        if with_weights:
            attributes["qk_output"] = AFTER_SOFTMAX
        inputs = [
            *projections(op, [padded(op, value, self.wide) for value in heads]),
            past_key,
            self.past_value,
            *self.lengths,
            *tables,
            None,
            self.bias,
            self.sinks,
        ]
        return op.several(
            4 if with_weights else 3, "GroupQueryAttention", *inputs, domain=MICROSOFT, **attributes
        )

    def rotation(self, q: ir.Value, k: ir.Value) -> Optional[Rotate]:
        """Return the Rotate node of q if a node rotates q and k by slot, otherwise None. Its
        kernel needs D to be a multiple of 16 and r/2 of 8.
        """
        of_q, of_k = Rotate.of(q), Rotate.of(k)
        if (
            not self.compact
            or of_q is None
            or of_k is None
            or of_q.node.inputs[1:] != of_k.node.inputs[1:]
        ):
            return None
        # A slot differs from the position by a constant, which matters unless the rotation is
        # linear.
        if of_q.linear and size(of_q.x, 3) % 16 == 0 and size(of_q.cos, 1) % 8 == 0:
            return of_q
        return None


def group_query(op: Builder, node: Attend, key: Append, value: Append) -> GroupQuery:
    """Return what the nodes in place of an Attend share; caches get their head size."""
    attention_mask, mask = ort_slots.by_columns(op), Mask.of(node.mask)
    assert mask is not None and not mask.after  # models with a cache are causal
    attributes: Dict[str, Any] = {"num_heads": node.heads, "kv_num_heads": node.kv_heads}
    attributes |= standard.scores_of(node)
    if attention_mask is None:
        lengths = ort_slots.lengths(op)
    else:
        lengths = ort_slots.lengths_of_mask(op, attention_mask)
    if attention_mask is not None or mask.chunk:
        bias = sum_of(op, node.mask, node.content)
    # The node itself leaves out later keys, and those before a window, which includes the query.
    else:
        bias = sum_of(op, mask.bias, node.content)
        bias = None if bias is None else standard.in_dtype(op, bias)
        attributes |= {} if mask.before < 0 else {"local_window_size": mask.before + 1}
    return GroupQuery(
        value.past,
        value.new,
        widened(key, value),
        lengths,
        bias,
        node.sinks,
        attention_mask is None,
        attributes,
    )


def rotated(op: Builder, value: ir.Value, positions: Optional[ir.Value] = None) -> ir.Value:
    """Rotate heads by their Rotate node, if there is one, at its or at other positions [B,S]."""
    node = Rotate.of(value)
    if node is None:
        return value
    return standard.rotate_at(op, node, node.positions if positions is None else positions)


def widened(key: Append, value: Append) -> int:
    """Widen both caches to one head size, a multiple of 8, and return it."""
    wide = -(-max(size(append.past, 3) for append in (key, value)) // 8) * 8
    for append in (key, value):
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
