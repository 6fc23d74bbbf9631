"""Scores by content that CachedAttention computes (packages/kernels): entries of rows picked by
distance, and sums of the numbers of keys.

A query, or a key, has a row of numbers [R], such as its products with the rows of a table. A term
of a score is the entry at the index that the distance of query and key has. Another term is the sum
of the numbers that the keys after a key have, up to the query's own.
"""

from dataclasses import dataclass
from typing import Iterator, List, Optional, Sequence, Tuple

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
    SuffixSum,
)

INPUTS = 5  # of the operator, for scores by content
KEYS_AND_QUERIES = [0, 1, 3, 2]  # permutation of axes that swaps them


@dataclass(frozen=True)
class Picked:
    """Terms of the content of an Attend, of which one index picks those of rows.

    Args:
        query_rows: rows of queries [B,H,S,R], or None.
        key_rows: appended rows of keys [B,H*R,T,1], or None, and the factor of their term.
        row_of_distance: see distance_tables.rows_of; None without rows.
        decays: appended numbers of keys [B,H,T,1], or None.
        counts: rows of queries that are read at counts of keys [B,H,S,R], or None.
        rest: the other scores [B,H,S,T], or None.
    """

    query_rows: Optional[ir.Value]
    key_rows: Optional[ir.Value]
    factor: float
    row_of_distance: Optional[ir.Value]
    decays: Optional[ir.Value]
    counts: Optional[ir.Value]
    rest: Optional[ir.Value]

    @property
    def inputs(self) -> List[Optional[ir.Value]]:
        """The inputs of the operator."""
        return [self.query_rows, self.key_rows, self.row_of_distance, self.decays, self.counts]


@dataclass(frozen=True)
class _Term:
    """A part of a sum: its value, or the node that picks it, times a factor."""

    value: ir.Value
    factor: float
    pick: Optional[Pick] = None
    index: Optional[ir.Value] = None
    of_keys: bool = False


def picked(op: Builder, node: Attend, mask: Mask) -> Optional[Picked]:
    """Return the terms of a node's content, or None if CachedAttention computes none of them."""
    if node.content is None:
        return None
    queries: List[_Term] = []
    keys: List[_Term] = []
    rest: List[_Term] = []
    rows: Optional[ir.Value] = None
    index: Optional[ir.Value] = None
    decays: Optional[ir.Value] = None
    counted = RowsAtCounts.of(node.content)
    if counted is not None:
        return Picked(None, None, 1.0, None, None, counted.rows, None)
    for term in _terms(node.content, 1.0):
        summed = _sums_between(term.value, mask) if term.factor == 1 and decays is None else None
        if summed is not None:
            decays = summed
            continue
        if term.index is not None and term.index is not index and rows is None:
            index, rows = term.index, distance_tables.rows_of(op, mask, term.index)
        fits = rows is not None and term.index is index and _fits(term, [*queries, *keys])
        if fits and term.of_keys and not keys and _appended_alone(term.pick):
            keys.append(term)
        elif fits and not term.of_keys:
            queries.append(term)
        else:
            rest.append(term)
    if rows is None and decays is None:
        return None
    return Picked(
        _sum(op, [(term.pick.rows, term.factor) for term in queries if term.pick]),
        next((_by_row(op, term.pick.rows) for term in keys if term.pick), None),
        keys[0].factor if keys else 1.0,
        rows,
        decays,
        None,
        _sum(op, [(term.value, term.factor) for term in rest]),
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
    product = node.q.producer()
    operands = [] if product is None or product.op_type != "Mul" else list(product.inputs)
    factors = [v for v in operands if v is not None and v is not attend.q]
    constant = factors[0].const_value if len(factors) == 1 and attend.q in operands else None
    return constant is not None and bool(np.all(constant.numpy() == np.float32(attend.scale)))


def _appended_alone(pick: Optional[Pick]) -> bool:
    """Return whether a node picks from rows that are cached, and nothing else reads them."""
    append = None if pick is None else Append.of(pick.rows)
    return append is not None and len(append.output.uses()) == 1


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


def _sums_between(value: ir.Value, mask: Mask) -> Optional[ir.Value]:
    """Return the appended numbers [B,H,T,1] of which a value [B,H,S,T] has the sums after each key
    up to the query: what follows the key, less the numbers at distances above 0.
    """
    difference = _read(value, ("Cast", ()))
    node = None if difference is None else difference.producer()
    if node is None or node.domain or node.op_type != "Sub":
        return None
    after_key, after_query = SuffixSum.of(node.inputs[0]), _read(node.inputs[1], ("Unsqueeze", [3]))
    product = None if after_query is None else after_query.producer()
    if after_key is None or after_key.own or product is None or product.op_type != "MatMul":
        return None
    numbers = _read(after_key.x, ("Unsqueeze", [2]))
    is_after = _read(product.inputs[1], ("Transpose", (0, 2, 1)), ("Squeeze", [1]), ("Cast", ()))
    compared = None if is_after is None else is_after.producer()
    if numbers is not product.inputs[0] or compared is None or compared.op_type != "Greater":
        return None
    distances = Distances.of(compared.inputs[0])
    if distances is None or (distances.q_positions, distances.k_positions) != (
        mask.positions,
        mask.key_positions,
    ):
        return None
    appended = _read(numbers, ("Squeeze", [3]), ("Cast", ()))
    zero = compared.inputs[1]
    above_0 = zero is not None and zero.const_value is not None and not numbers_of(zero).any()
    return appended if above_0 and Append.of(appended) else None


def _read(value: Optional[ir.Value], *operators: Tuple[str, Sequence[int]]) -> Optional[ir.Value]:
    """Return what the first of consecutive nodes reads, from the last one back; None if there are
    others. operators: their names, with the axes of those that change the order or number of axes.
    """
    for operator, axes in operators:
        node = None if value is None else value.producer()
        if node is None or node.domain or node.op_type != operator:
            return None
        own = node.attributes["perm"].value if operator == "Transpose" else ()
        if operator in ("Squeeze", "Unsqueeze"):
            own = numbers_of(node.inputs[1])  # type: ignore[arg-type]
        if list(own) != list(axes):
            return None
        value = node.inputs[0]
    return value


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
