"""Target `ort`: slots of new tokens and numbers of valid slots, as values of the graph.

With position_ids, rows are compact: the tokens of a row fill its first slots. With attention_mask, a slot is a column of the mask.
"""

from typing import Optional, Tuple

import onnx_ir as ir

from posenc_export.export.targets.rewriter import Rewriter

INT32, INT64 = ir.DataType.INT32, ir.DataType.INT64


def by_columns(rewriter: Rewriter) -> Optional[ir.Value]:
    """Return the input attention_mask if slots are columns, or None if rows are compact."""
    return next((value for value in rewriter.graph.inputs if value.name == "attention_mask"), None)


def lengths(rewriter: Rewriter) -> Tuple[ir.Value, ir.Value]:
    """Return the inputs seqlens_k [B] int32, valid tokens of each row minus 1, and total_sequence_length [] int32, valid tokens of the longest row."""
    return rewriter.input("seqlens_k", INT32, ["batch_size"]), rewriter.input("total_sequence_length", INT32, [])


def lengths_of_mask(rewriter: Rewriter, attention_mask: ir.Value) -> Tuple[ir.Value, ir.Value]:
    """Return the two values of `lengths` for an attention_mask, of which every column is a slot."""
    total = rewriter.emit("Cast", [rewriter.emit("Shape", [attention_mask], attributes={"start": 1, "end": 2})], attributes={"to": int(INT32)})
    last = rewriter.emit("Sub", [total, rewriter.constant([1], "int32")])
    rows = rewriter.emit("Expand", [last, rewriter.emit("Shape", [attention_mask], attributes={"start": 0, "end": 1})])
    return rows, rewriter.emit("Squeeze", [total])


def cache_position(rewriter: Rewriter) -> ir.Value:
    """Return the input cache_position [B,S] int64: the slot of each new token, in compact rows."""
    return rewriter.input("cache_position", INT64, ["batch_size", "sequence_length"])


def total(rewriter: Rewriter) -> ir.Value:
    """Return the number of valid slots of the longest compact row, [] int64."""
    return rewriter.emit("Cast", [lengths(rewriter)[1]], attributes={"to": int(INT64)})


def first_position(rewriter: Rewriter) -> ir.Value:
    """Return the position in slot 0 of each compact row [B,1]."""
    return rewriter.input("first_position", INT64, ["batch_size", 1])


def of_call(rewriter: Rewriter, key_positions: Optional[ir.Value]) -> bool:
    """Return whether the keys are not in slots of compact rows: with attention_mask, or without a cache."""
    return by_columns(rewriter) is not None or (key_positions is not None and key_positions.is_graph_input())


def in_slots(rewriter: Rewriter, key_positions: Optional[ir.Value]) -> bool:
    """Return whether a lowering may find keys by slot instead of by position. Float16 was not measured."""
    return rewriter.dtype == "float32" and not of_call(rewriter, key_positions)


def written(rewriter: Rewriter, append: ir.Node) -> Tuple[ir.Value, ir.Value]:
    """Return the slot of the first new token of each row [B], and the number of valid slots of the longest row [1], int64."""
    attention_mask, first = by_columns(rewriter), append.inputs[2]
    if attention_mask is None:
        first = rewriter.emit("Gather", [cache_position(rewriter), rewriter.constant(0)], attributes={"axis": 1})
    assert first is not None
    longest = lengths(rewriter)[1] if attention_mask is None else lengths_of_mask(rewriter, attention_mask)[1]
    return first, rewriter.emit("Unsqueeze", [rewriter.emit("Cast", [longest], attributes={"to": int(INT64)}), rewriter.constant([0])])
