"""Scores that are entries of rows picked by distance, for CachedAttention (packages/kernels).

A query, or a key, has a row of numbers [R], such as its products with the rows of a table. A term
of a score is the entry at the index that the distance of query and key has.
"""

from dataclasses import dataclass
from typing import Iterator, List, Optional, Tuple

import numpy as np
import onnx_ir as ir

from posenc_export.export.targets import distance_tables
from posenc_export.export.targets.builder import Builder, numbers_of, size
from posenc_export.ops.graph import (
    Append,
    Attend,
    AttentionWeights,
    CollectByDistance,
    Mask,
    Pick,
)

KEYS_AND_QUERIES = [0, 1, 3, 2]  # permutation of axes that swaps them


@dataclass(frozen=True)
class Picked:
    """Terms of the content of an Attend that one index picks.

    Args:
        query_rows: rows of queries [B,H,S,R], or None.
        key_rows: appended rows of keys [B,H,T,R], or None, and the factor of their term.
        row_of_distance: see distance_tables.rows_of.
        rest: the other scores [B,H,S,T], or None.
    """

    query_rows: Optional[ir.Value]
    key_rows: Optional[ir.Value]
    factor: float
    row_of_distance: ir.Value
    rest: Optional[ir.Value]

    @property
    def inputs(self) -> List[Optional[ir.Value]]:
        """The inputs of the operator."""
        return [self.query_rows, self.key_rows, self.row_of_distance]


@dataclass(frozen=True)
class _Term:
    """A part of a sum: its value, or the node that picks it, times a factor."""

    value: ir.Value
    factor: float
    pick: Optional[Pick] = None
    index: Optional[ir.Value] = None
    of_keys: bool = False


def picked(op: Builder, node: Attend, mask: Mask) -> Optional[Picked]:
    """Return the terms of a node's content that CachedAttention picks by distance; None if there
    are none.
    """
    if node.content is None:
        return None
    queries: List[_Term] = []
    keys: List[_Term] = []
    rest: List[_Term] = []
    rows: Optional[ir.Value] = None
    index: Optional[ir.Value] = None
    for term in _terms(node.content, 1.0):
        if term.index is not None and term.index is not index and rows is None:
            index, rows = term.index, distance_tables.rows_of(op, mask, term.index)
        fits = rows is not None and term.index is index and _fits(term, [*queries, *keys])
        if fits and term.of_keys and not keys and term.pick and Append.of(term.pick.rows):
            keys.append(term)
        elif fits and not term.of_keys:
            queries.append(term)
        else:
            rest.append(term)
    if rows is None:
        return None
    return Picked(
        _sum(op, [(term.pick.rows, term.factor) for term in queries if term.pick]),
        next((term.pick.rows for term in keys if term.pick), None),
        keys[0].factor if keys else 1.0,
        rows,
        _sum(op, [(term.value, term.factor) for term in rest]),
    )


def _fits(term: _Term, others: List[_Term]) -> bool:
    """Return whether a term has as many rows as other ones."""
    sizes = {size(t.pick.rows, 3) for t in (term, *others) if t.pick is not None}
    return len(sizes) == 1


def _terms(value: ir.Value, factor: float) -> Iterator[_Term]:
    """Yield the parts of a sum with their factors."""
    node, pick = value.producer(), Pick.of(value)
    if pick is not None:
        yield _Term(value, factor, pick, pick.index)
        return
    operands = [] if node is None or node.domain else [v for v in node.inputs if v is not None]
    if node is not None and node.op_type == "Add" and len(operands) == 2:
        for operand in operands:
            yield from _terms(operand, factor)
        return
    if node is not None and node.op_type == "Mul" and len(operands) == 2:
        for number, other in (operands, operands[::-1]):
            if number.const_value is not None and number.const_value.size == 1:
                yield from _terms(other, factor * float(numbers_of(number).reshape(())))
                return
    turned = _turned(value)
    pick = Pick.of(turned)
    index = None if pick is None else _turned(pick.index)
    yield _Term(value, factor, pick if index is not None else None, index, index is not None)


def _turned(value: Optional[ir.Value]) -> Optional[ir.Value]:
    """Return the value [..,T,S] of which another one [..,S,T] is the transpose."""
    node = None if value is None else value.producer()
    if node is None or node.domain or node.op_type != "Transpose":
        return None
    return node.inputs[0] if list(node.attributes["perm"].value) == KEYS_AND_QUERIES else None


def _sum(op: Builder, terms: List[Tuple[ir.Value, float]]) -> Optional[ir.Value]:
    total: Optional[ir.Value] = None
    for value, factor in terms:
        term = value if factor == 1 else op.Mul(value, op.constant(factor, "float32"))
        total = term if total is None else op.Add(total, term)
    return total


def collected(node: Attend, mask: Mask, parts: Optional[Picked]) -> Optional[List[ir.Value]]:
    """Return the sums of an Attend's weights by distance [B,H,S,R], if all readers of its weights
    sum them by the rows that its scores pick; None if one does not.
    """
    if parts is None or parts.query_rows is None:
        return None
    rows, sums = numbers_of(parts.row_of_distance), []
    for weights in node.readers(AttentionWeights):
        readers = weights.readers(CollectByDistance)
        if len(readers) < len(weights.output.uses()):
            return None
        for reader in readers:
            own = (reader.positions, reader.key_positions) == (mask.positions, mask.key_positions)
            clipped = reader.left - np.minimum(np.arange(len(rows)), reader.left)
            same = len(rows) == reader.left + 1 and np.array_equal(rows, clipped)
            if not own or not same or size(parts.query_rows, 3) != reader.left + reader.right + 1:
                return None
            sums.append(reader.output)
    return sums
