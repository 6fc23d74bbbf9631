"""Biases that are a function of head and distance, as tables [H,range] for CachedAttention, and
indices of rows that are one of the distance.

A value is one if the distance of query and key is all that its nodes compute with: each of them
computes every entry of its output from the same entry of its inputs, or only moves axes.
"""

from pathlib import Path
from typing import Any, Dict, Optional, Sequence, Set

import numpy as np
import onnx_ir as ir

from posenc_export.export.expected_numbers import BY_DISTANCE
from posenc_export.export.targets.builder import Builder
from posenc_export.ops.graph import DOMAIN, Distances, Mask
from posenc_export.runtime.graphs.onnx_parts import opened
from posenc_export.shared.refusal import refusal

BY_ENTRY = set(
    "Abs Add And Cast Ceil Clip Cos Div Elu Equal Erf Exp Floor Gelu Greater GreaterOrEqual "
    "Identity LeakyRelu Less LessOrEqual Log Max Min Mod Mul Neg Not Or Pow Reciprocal Relu Round "
    "Sigmoid Sign Sin Softplus Sqrt Sub Tanh Where Xor".split()
)
AXES = {"Expand", "Reshape", "Squeeze", "Transpose", "Unsqueeze"}
# With a constant operand: rows of it by an index, and products with it.
WITH_CONSTANT = {"Gather": 0, "MatMul": 1, "Gemm": 1}
MOST = 1 << 24  # numbers of a table: 64 MB
OPSET = 23
PROBE = np.array([[3, 1, 0], [9, 2, 1]])  # distances [S,T] that must have the same biases


def table_of(op: Builder, mask: Mask, heads: int) -> Optional[ir.Value]:
    """Return the table of the bias of a mask, or None if it is no function of head and distance.

    Larger distances than those of the table have the last entry.
    """
    bias, distances = mask.bias, _Distances(mask)
    assert bias is not None
    if heads * op.max_positions > MOST or not distances.decide(bias):
        return None
    return op.weight(
        f"{bias.name}{BY_DISTANCE}", lambda: _biases(op, bias, heads, distances.sources)
    )


def rows_of(op: Builder, mask: Mask, index: ir.Value) -> Optional[ir.Value]:
    """Return the rows [range] int32 that an index [B,1,S,T] takes by distance, or None if it
    depends on something else. Larger distances have the last one.
    """
    distances = _Distances(mask)
    if op.max_positions > MOST or not distances.decide(index):
        return None
    rows = _table(op, index, 1, distances.sources)
    if rows is None:
        return None
    return op.weight(f"{index.name}.row_of_distance", lambda: rows[0].astype(np.int32))


def at_distances(op: Builder, mask: Mask, value: ir.Value) -> Optional[ir.Value]:
    """Emit nodes that compute a value [B,1,S,T] at every distance [range], from constants alone, or
    return None if it depends on something else.
    """
    distances = _Distances(mask)
    if op.max_positions > MOST or not distances.decide(value):
        return None
    copies: Dict[ir.Value, ir.Value] = {}
    for source, sign in distances.sources.items():
        counted = op.Range(op.constant(0), op.constant(sign * op.max_positions), op.constant(sign))
        copies[source] = op.Unsqueeze(op.Cast(counted, to=int(_element(source))), [0, 1, 2])

    def copied(value: Optional[ir.Value]) -> Optional[ir.Value]:
        if value is None or value.const_value is not None:
            return value
        node = value.producer()
        if value not in copies and node is not None:
            operands = [copied(source) for source in node.inputs]
            attributes: Any = dict(node.attributes)
            copies[value] = op.node(node.op_type, *operands, **attributes)
        return copies[value]

    return op.Reshape(copied(value), [-1])


class _Distances:
    """Finds the distances that a value is computed from.

    Args:
        mask: whose positions of queries and keys are subtracted.

    Attributes:
        sources: distances, and whether they count back from the query to the key (1) or ahead (-1).
    """

    def __init__(self, mask: Mask) -> None:
        self.mask = mask
        self.sources: Dict[ir.Value, int] = {}

    def decide(self, value: ir.Value) -> bool:
        """Return whether distances alone decide a value."""
        return self._by_distance(value, set()) and bool(self.sources)

    def _by_distance(self, value: Optional[ir.Value], seen: Set[ir.Value]) -> bool:
        if value is None or value.const_value is not None or value in seen:
            return True
        sign = self._sign(value)
        if sign:
            self.sources[value] = sign
            return True
        node = value.producer()
        if node is None or node.domain or not self._by_entry(node):
            return False
        seen.add(value)
        return all(self._by_distance(source, seen) for source in node.inputs)

    def _by_entry(self, node: ir.Node) -> bool:
        constant = WITH_CONSTANT.get(node.op_type)
        if constant is not None:
            operand = node.inputs[constant]
            return operand is not None and operand.const_value is not None
        if node.op_type in AXES:  # to a shape that is known
            return all(value is None or value.const_value for value in node.inputs[1:])
        return node.op_type in BY_ENTRY

    def _sign(self, value: ir.Value) -> int:
        """Return 1 for the distance from a query back to a key, -1 for its negative, else 0."""
        node = value.producer()
        if node is None:
            return 0
        if node.domain == DOMAIN and node.op_type == Distances.__name__:
            distances = Distances(node)
            own = (distances.q_positions, distances.k_positions)
            return -1 if own == (self.mask.positions, self.mask.key_positions) else 0
        if node.op_type != "Sub" or node.domain:
            return 0
        ends = tuple(_source(operand) for operand in node.inputs)
        both = (self.mask.positions, self.mask.key_positions)
        return 1 if ends == both else -1 if ends == both[::-1] else 0


def _source(value: Optional[ir.Value]) -> Optional[ir.Value]:
    """Return the value that another one repeats with further axes."""
    node = None if value is None else value.producer()
    while node is not None and not node.domain and node.op_type == "Unsqueeze":
        value = node.inputs[0]
        node = None if value is None else value.producer()
    return value


def _biases(op: Builder, bias: ir.Value, heads: int, sources: Dict[ir.Value, int]) -> np.ndarray:
    """Return the table of a bias [H,range]."""
    table = _table(op, bias, heads, sources)
    if table is None:
        rule = f"the bias {bias.name} to depend on distances alone"
        raise refusal("export", rule, "another for the same distance", "choose target ort")
    return np.ascontiguousarray(table, np.float32)


def _table(
    op: Builder, value: ir.Value, heads: int, sources: Dict[ir.Value, int]
) -> Optional[np.ndarray]:
    """Evaluate a value at every distance [H,range], without the last columns if they are equal.
    None if it has another result for the same distance.
    """
    evaluate = opened(_model(value, list(sources)), Path(".")).run

    def results(distances: np.ndarray) -> np.ndarray:  # [S,T] to [H,S,T]
        feeds = {
            f"distance_{number}": (sign * distances).astype(_element(source).numpy())[None, None]
            for number, (source, sign) in enumerate(sources.items())
        }
        return np.broadcast_to(evaluate(None, feeds)[0], (1, heads, *distances.shape))[0]

    table = results(np.arange(op.max_positions)[None])[:, 0]
    probe = np.minimum(PROBE, op.max_positions - 1)
    if not np.array_equal(results(probe), table[:, probe], equal_nan=True):
        return None
    changes = np.flatnonzero((table[:, 1:] != table[:, :-1]).any(0))
    last = int(changes[-1]) + 1 if len(changes) else 0
    return table[:, : last + 1]


def _element(source: ir.Value) -> ir.DataType:
    """Return the element type of a distance: int64 for a difference of positions."""
    integers = source.dtype == ir.DataType.INT64
    return ir.DataType.INT64 if integers else ir.DataType.FLOAT


def _model(value: ir.Value, sources: Sequence[ir.Value]) -> bytes:
    """Return a model of the nodes that compute a value from distances."""
    assert value.graph is not None
    part = ir.convenience.extract(value.graph, sources, [value])
    for number, (copied, source) in enumerate(zip(part.inputs, sources, strict=True)):
        copied.name, copied.shape = f"distance_{number}", None
        copied.type = ir.TensorType(_element(source))
    part.outputs[0].type = ir.TensorType(value.dtype or ir.DataType.FLOAT)
    for node in part:
        node.outputs[0].shape = None  # that of a call
    part.opset_imports.clear()
    part.opset_imports[""] = OPSET
    return ir.to_proto(ir.Model(part, ir_version=10)).SerializeToString()
