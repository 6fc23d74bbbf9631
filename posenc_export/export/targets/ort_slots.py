"""Targets `ort`, `ort-native`, `ort-cuda`: slots of new tokens and numbers of valid slots.

With position_ids, rows are compact: the tokens of a row fill its first slots. With attention_mask,
a slot is a column of the mask. Caches of windows may begin at a later token than the first: with
`slides`, values are counted from the first token in them.
"""

import onnx_ir as ir

from posenc_export.export.targets.builder import INT32, INT64, Builder
from posenc_export.ops.graph import Append


def by_columns(op: Builder) -> ir.Value | None:
    """Return the input attention_mask if slots are columns, or None if rows are compact."""
    return next((value for value in op.graph.inputs if value.name == "attention_mask"), None)


def lengths(op: Builder, slides: bool = False) -> tuple[ir.Value, ir.Value]:
    """Return seqlens_k [B], a row's tokens minus 1, and total_sequence_length [], both int32: two
    inputs, or computed from an attention_mask, of which every column is a slot.
    """
    attention_mask = by_columns(op)
    if slides:
        last = op.Sub(op.input("seqlens_k"), op.input("window_start"))
        return last, op.Add(op.ReduceMax(last, keepdims=0), op.constant(1, "int32"))
    if attention_mask is None:
        return op.input("seqlens_k"), op.input("total_sequence_length")
    columns = op.Cast(op.Shape(attention_mask, start=1, end=2), to=INT32)
    last = op.Sub(columns, op.constant([1], "int32"))
    rows = op.Expand(last, op.Shape(attention_mask, start=0, end=1))
    return rows, op.Squeeze(columns)


def window_start(op: Builder) -> ir.Value:
    """Return the first token of each row in the caches of windows, [B,1] int64."""
    return op.Cast(op.Unsqueeze(op.input("window_start"), [1]), to=INT64)


def cache_position(op: Builder, slides: bool = False) -> ir.Value:
    """Return the slot of each new token in compact rows, [B,S] int64."""
    places = op.input("cache_position")
    return op.Sub(places, window_start(op)) if slides else places


def total(op: Builder, slides: bool = False) -> ir.Value:
    """Return the number of valid slots of the longest row, [] int64."""
    return op.Cast(lengths(op, slides)[1], to=INT64)


def slots(op: Builder) -> ir.Value:
    """Return the slots of compact rows [T] int64, at least to the last one of the longest row."""
    return op.input("slots") if op.on_device else op.Range(op.constant(0), total(op), 1)


def key_positions(op: Builder, slides: bool = False) -> ir.Value:
    """Return the positions [B,T] of the slots of compact rows: that in slot 0 plus the slot. Free
    slots of a row can lie past the range of positions; they get -1, as padding.
    """
    tokens = slots(op) if not slides else op.Range(op.constant(0), total(op, slides), 1)
    tokens = op.Add(window_start(op), tokens) if slides else tokens
    positions = op.Add(op.input("first_position"), tokens)
    return op.Where(op.Less(positions, op.constant(op.max_positions)), positions, op.constant(-1))


def of_call(op: Builder, key_positions: ir.Value) -> bool:
    """Return whether keys are those of the call's columns: attention_mask, or no cache."""
    return by_columns(op) is not None or key_positions.is_graph_input()


def in_slots(op: Builder, key_positions: ir.Value) -> bool:
    """Return whether keys may be found by slot. Float16 was not measured."""
    return op.dtype == "float32" and not of_call(op, key_positions)


def written(op: Builder, append: Append) -> tuple[ir.Value, ir.Value]:
    """Return the first new slot of each row [B], and the slots to read of the longest row [1]."""
    first = append.write_index
    if by_columns(op) is None:
        first = op.Gather(cache_position(op), 0, axis=1)
    return first, op.Shape(slots(op)) if op.on_device else op.Unsqueeze(total(op), [0])
