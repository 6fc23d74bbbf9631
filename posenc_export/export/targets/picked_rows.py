"""Scores by content that CachedAttention computes (packages/kernels): entries of rows picked by
distance, rows at counts of keys, and sums of the numbers of keys.

A query, or a key, has a row of numbers [R], such as its products with the rows of a table. A score
is the sum of the entries at the index that the distance of query and key has. Or it is the sum of
the numbers that the keys after a key have, up to the query's own.
"""

from dataclasses import dataclass
from typing import List, Optional

import numpy as np
import onnx_ir as ir

from posenc_export.export.targets import distance_tables, ort_slots
from posenc_export.export.targets.builder import Builder, numbers_of, size
from posenc_export.ops.graph import (
    Append,
    Attend,
    AttentionWeights,
    CollectByDistance,
    Distances,
    Mask,
    Pick,
    RowsAtCounts,
    SumsBetween,
)

INPUTS = 5  # of the operator, for scores by content


@dataclass(frozen=True, kw_only=True)
class Picked:
    """The content of an Attend.

    Args:
        query_rows: rows of queries [B,H,S,R], or None.
        key_rows: appended rows of keys [B,H*R,T,1], or None, and the factor of their term.
        row_of_distance: see distance_tables.rows_of; None without rows.
        decays: appended numbers of keys [B,H,T,1], or None.
        counts: rows of queries that are read at counts of keys [B,H,S,R], or None.
    """

    query_rows: Optional[ir.Value] = None
    key_rows: Optional[ir.Value] = None
    factor: float = 1.0
    row_of_distance: Optional[ir.Value] = None
    decays: Optional[ir.Value] = None
    counts: Optional[ir.Value] = None

    @property
    def inputs(self) -> List[Optional[ir.Value]]:
        """The inputs of the operator."""
        return [self.query_rows, self.key_rows, self.row_of_distance, self.decays, self.counts]


def picked(op: Builder, node: Attend, mask: Mask) -> Optional[Picked]:
    """Return the content of a node, or None if CachedAttention does not compute it."""
    counted, sums = RowsAtCounts.of(node.content), SumsBetween.of(node.content)
    if counted is not None:
        return Picked(counts=counted.rows)
    if sums is not None:
        distances, appended = Distances.of(sums.distances), Append.of(sums.numbers)
        own = (mask.positions, mask.key_positions)
        if distances is None or (distances.q_positions, distances.k_positions) != own:
            return None
        return Picked(decays=sums.numbers) if appended is not None else None
    pick = Pick.of(node.content)
    if pick is None or (pick.key_rows is not None and not _appended_alone(pick.key_rows)):
        return None
    rows = distance_tables.rows_of(op, mask, pick.index)
    if rows is None:
        return None
    return Picked(
        query_rows=pick.rows,
        key_rows=None if pick.key_rows is None else _by_row(op, pick.key_rows),
        factor=pick.factor,
        row_of_distance=rows,
    )


def counts_inside(op: Builder, node: RowsAtCounts) -> bool:
    """Return whether CachedAttention can count keys for a node: it has the products of the only
    Attend that reads its output, which has no other content and no bias.
    """
    users = [user for user, _ in node.output.uses()]
    if [user.op_type for user in users] != ["Attend"]:
        return False
    attend, mask = Attend(users[0]), Mask.of(node.mask)
    same = attend.content is node.output and attend.mask is node.mask and attend.keys is node.keys
    if not same or mask is None or mask.bias is not None or attend.softcap:
        return False
    readers = {user for user, _ in node.keys.uses()}
    values = [user for user, _ in attend.values.uses()]
    if readers != {attend.node, node.node} or values != [attend.node]:
        return False
    cached = Append.of(node.keys) and Append.of(attend.values) and ort_slots.by_columns(op) is None
    if not cached or op.dtype != "float32" or attend.readers(AttentionWeights):
        return False
    return node.q is attend.q and node.scale == attend.scale


def _appended_alone(rows: ir.Value) -> bool:
    """Return whether rows are cached, and nothing else reads them."""
    return Append.of(rows) is not None and len(rows.uses()) == 1


def _by_row(op: Builder, rows: ir.Value) -> ir.Value:
    """Cache rows of keys [B,H,T,R] as [B,H*R,T,1], so that distant keys, which share a row, have
    neighbouring numbers.
    """
    append = Append.of(rows)
    assert append is not None and append.past.shape is not None
    batch, heads, slots, count = append.past.shape
    append.node.replace_input_with(1, op.Reshape(append.new, [0, 0, -1, 1]))
    append.past.shape = ir.Shape([batch, heads * count, slots, 1])  # type: ignore[operator]
    return rows


def collected(node: Attend, mask: Mask, parts: Optional[Picked]) -> Optional[List[ir.Value]]:
    """Return the sums of an Attend's weights by distance [B,H,S,R], if all readers of its weights
    sum them by the rows that its scores pick; None if one does not.
    """
    if parts is None or parts.query_rows is None or parts.row_of_distance is None:
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
