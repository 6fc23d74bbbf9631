"""Target `ort`: nodes of com.microsoft GroupQueryAttention, which write new keys and values into their buffers and attend over the valid slots."""

from dataclasses import dataclass
from typing import Any, Dict, List, Optional, Tuple

import onnx_ir as ir

from posenc_export.export.targets import ort_slots, standard
from posenc_export.export.targets.rewriter import Rewriter, number, producer, size

DOMAIN = "com.microsoft"
AFTER_SOFTMAX = 2  # value of the attribute qk_output


@dataclass(frozen=True)
class GroupQuery:
    """Inputs and attributes that the nodes in place of one Attend have in common.

    Args:
        rewriter: inserts the nodes.
        past_value, new_value: cache [B,K,M,D] and new values [B,S,K,D'].
        wide: head size of caches and nodes.
        lengths: see `ort_slots.lengths`.
        bias: added to the scores [B,1 or H,S,T], or None.
        sinks: one score per head [H], or None.
        compact: rows are compact, so that a node can rotate by slot.
        attributes: of every node.
    """

    rewriter: Rewriter
    past_value: Optional[ir.Value]
    new_value: Optional[ir.Value]
    wide: int
    lengths: Tuple[ir.Value, ir.Value]
    bias: Optional[ir.Value]
    sinks: Optional[ir.Value]
    compact: bool
    attributes: Dict[str, Any]

    def emit(self, q: Optional[ir.Value], k: Optional[ir.Value], past_key: Optional[ir.Value], with_shares: bool = False) -> Tuple[ir.Value, ...]:
        """Insert a node for queries q [B,S,H,D] and new keys k [B,S,K,D], which it rotates if it can.

        Returns:
            Output [B,S,H*D], keys and values with the new ones, and with `with_shares` the softmax.
        """
        sources, tables, turned = self._turned([q, k, self.new_value])
        heads = _projections(self.rewriter, [padded(self.rewriter, value, self.wide) for value in sources])
        inputs = [*heads, past_key, self.past_value, *self.lengths, *tables, None, self.bias, self.sinks]
        attributes = {**self.attributes, **turned, **({"qk_output": AFTER_SOFTMAX} if with_shares else {})}
        return self.rewriter.emit_all("GroupQueryAttention", inputs, 4 if with_shares else 3, DOMAIN, attributes)

    def rotation(self, q: Optional[ir.Value], k: Optional[ir.Value]) -> Optional[ir.Node]:
        """Return the Rotate node of q if a node rotates q and k by slot, otherwise None. Its kernel needs D to be a multiple of 16 and r/2 of 8."""
        of_q, of_k = producer(q, "Rotate"), producer(k, "Rotate")
        if not self.compact or of_q is None or of_k is None or of_q.inputs[1:] != of_k.inputs[1:]:
            return None
        if not number(of_q, "linear"):  # a slot differs from the position by a constant
            return None
        taken = size(of_q.inputs[0], 3) % 16 == 0 and size(of_q.inputs[2], 1) % 8 == 0
        return of_q if taken else None

    def _turned(self, sources: List[Optional[ir.Value]]) -> Tuple[List[Optional[ir.Value]], List[Optional[ir.Value]], Dict[str, Any]]:
        """Return queries, keys and values, tables of cos and sin, and attributes of rotation. Heads that the node does not rotate are rotated before it."""
        rotation = self.rotation(*sources[:2])
        if rotation is None:
            return [rotated(self.rewriter, value) for value in sources], [None, None], {}
        tables = [self.rewriter.table(rotation.inputs[2]), self.rewriter.table(rotation.inputs[3])]  # type: ignore[arg-type]
        unturned = [turned.inputs[0] if (turned := producer(value, "Rotate")) else value for value in sources]
        return unturned, list(tables), {"do_rotary": 1, "rotary_interleaved": number(rotation, "interleaved")}


def group_query(rewriter: Rewriter, node: ir.Node, append_key: ir.Node, append_value: ir.Node) -> GroupQuery:
    """Return what the nodes in place of an Attend have in common. The caches are widened to their head size.

    Args:
        append_key, append_value: Append nodes of the keys and values that the Attend reads.
    """
    attention_mask, semantic_mask, content = ort_slots.by_columns(rewriter), producer(node.inputs[3], "Mask"), standard.content_of(node)
    assert semantic_mask is not None and not number(semantic_mask, "after")  # models with a cache are causal
    if attention_mask is not None:
        lengths, seen = ort_slots.lengths_of_mask(rewriter, attention_mask), None
    else:
        lengths, seen = ort_slots.lengths(rewriter), _seen(semantic_mask)
    if seen is None:
        bias = _sum(rewriter, node.inputs[3], content)
    else:
        bias = _sum(rewriter, semantic_mask.inputs[2], content)
        bias = None if bias is None else standard.in_dtype(rewriter, bias)
    attributes = {"num_heads": number(node, "heads"), "kv_num_heads": number(node, "kv_heads"), **standard.scores_of(node), **(seen or {})}
    past_value, new_value = append_value.inputs[:2]
    wide = _widened(append_key, append_value)
    return GroupQuery(rewriter, past_value, new_value, wide, lengths, bias, standard.sinks_of(node), attention_mask is None, attributes)


def rotated(rewriter: Rewriter, value: Optional[ir.Value], positions: Optional[ir.Value] = None) -> Optional[ir.Value]:
    """Rotate heads before GroupQueryAttention if a Rotate node produces them, by the rows of that node or by other positions [B,S]."""
    node = producer(value, "Rotate")
    if node is None:
        return value
    return standard.rotate_at(rewriter, node, node.inputs[1] if positions is None else positions)


def _widened(append_key: ir.Node, append_value: ir.Node) -> int:
    """Widen both caches to the head size of GroupQueryAttention, and return it. It is a multiple of 8, and the same for keys and values."""
    caches = [append_key.inputs[0], append_value.inputs[0]]
    wide = -(-max(size(past, 3) for past in caches) // 8) * 8
    for past in caches:
        assert past is not None and past.shape is not None
        past.shape = ir.Shape([*past.shape[:3], wide])
    return wide


def padded(rewriter: Rewriter, value: Optional[ir.Value], wide: int) -> Optional[ir.Value]:
    """Pad heads [B,S,N,D] with zeros to [B,S,N,wide]."""
    missing = wide - size(value, 3)
    if value is None or value.shape is None or not missing:
        return value
    made = rewriter.emit("Pad", [value, rewriter.constant([0, missing]), rewriter.constant(0, rewriter.dtype), rewriter.constant([3])])
    made.shape = ir.Shape([*value.shape[:3], wide])
    return made


def _seen(mask: ir.Node) -> Optional[Dict[str, int]]:
    """Return the attributes of GroupQueryAttention that replace the mask for compact rows, or None if it needs the mask. A window includes the query itself."""
    before = number(mask, "before")
    if number(mask, "chunk"):
        return None
    return {} if before < 0 else {"local_window_size": before + 1}


def _sum(rewriter: Rewriter, *scores: Optional[ir.Value]) -> Optional[ir.Value]:
    """Add the scores that are not None."""
    there = [value for value in scores if value is not None]
    if not there:
        return None
    return there[0] if len(there) == 1 else rewriter.emit("Add", there)


def _projections(rewriter: Rewriter, sources: List[Optional[ir.Value]]) -> List[Optional[ir.Value]]:
    """Return q, k and v as [B,S,N*D], or a single packed input if they are the three parts of one projection."""
    parts = [rewriter.packed(value) for value in sources if value is not None]
    split = parts[0].producer()
    if split is not None and split.op_type == "Split" and list(split.outputs) == parts:
        return [split.inputs[0], None, None]
    return list(parts)
