"""Semantic nodes: a class names the inputs and attributes of a node, for emission and lowering.

Inside `semantic_graph()`, operations emit these nodes instead of computing.
"""

import contextlib
from contextvars import ContextVar
from typing import TYPE_CHECKING, Any, Generic, Iterator, Optional, Sequence, TypeVar

import torch
from torch import Tensor

if TYPE_CHECKING:
    import onnx_ir as ir

DOMAIN = "posenc"
# Not a global, so that models that run in other threads compute during an export.
_emitting = ContextVar("emitting", default=False)
K = TypeVar("K", int, bool, float, str)
N = TypeVar("N", bound="Node")


@contextlib.contextmanager
def semantic_graph() -> Iterator[None]:
    """Make operations emit nodes within the context, in this thread."""
    token = _emitting.set(True)
    try:
        yield
    finally:
        _emitting.reset(token)


@torch.jit.unused
def emitting() -> bool:
    """Return whether operations emit nodes in this thread."""
    return _emitting.get()


class OptionalInput:
    """An input that a node may lack. Inputs have the order in which a class names them."""

    def __set_name__(self, owner: type["Node"], name: str) -> None:
        self.index, owner.inputs = len(owner.inputs), (*owner.inputs, name)

    def __get__(self, view: "Node", owner: type["Node"]) -> Optional["ir.Value"]:
        return view.node.inputs[self.index] if self.index < len(view.node.inputs) else None


class Input(OptionalInput):
    """An input that every node of a class has."""

    def __get__(self, view: "Node", owner: type["Node"]) -> "ir.Value":
        return view.node.inputs[self.index]  # type: ignore[return-value]


class Attribute(Generic[K]):
    """An attribute of a node. Numbers are stored as floats."""

    def __init__(self, kind: type[K]) -> None:
        self.kind: type[K] = kind

    def __set_name__(self, owner: type["Node"], name: str) -> None:
        self.name, owner.attributes = name, (*owner.attributes, name)

    def __get__(self, view: "Node", owner: type["Node"]) -> K:
        return self.kind(view.node.attributes[self.name].value)


class Node:
    """A semantic node of an ONNX graph, whose operator has the name of the class.

    Attributes:
        inputs, attributes: names, in the order of the node.
    """

    inputs: tuple[str, ...] = ()
    attributes: tuple[str, ...] = ()

    def __init__(self, node: "ir.Node") -> None:
        self.node = node

    @classmethod
    def emit(cls, like: Tensor, shape: Sequence[int], /, *values: Any, **others: Any) -> Tensor:
        """Emit a node and return its output, with the dtype of `like`. values: inputs, then
        attributes, in their order; others: the rest by name.
        """
        names = (*cls.inputs, *cls.attributes)
        fields = {**dict(zip(names, values, strict=False)), **others}
        assert fields.keys() == set(names) and len(values) + len(others) == len(names), (
            f"{cls.__name__} got {', '.join(fields)}"
        )
        return torch.onnx.ops.symbolic(
            f"{DOMAIN}::{cls.__name__}",
            [fields[name] for name in cls.inputs],
            {name: float(fields[name]) for name in cls.attributes},
            dtype=like.dtype,
            shape=list(shape),
            version=1,
        )

    @classmethod
    def of(cls: type[N], value: Optional["ir.Value"]) -> N | None:
        """Return the node of this class that produces a value, or None."""
        node = None if value is None else value.producer()
        if node is None or node.domain != DOMAIN or node.op_type != cls.__name__:
            return None
        return cls(node)

    @property
    def output(self) -> "ir.Value":
        """The only output."""
        return self.node.outputs[0]

    def readers(self, kind: type[N]) -> list[N]:
        """Return the nodes of a class that read the output."""
        return [kind(user) for user, _ in self.output.uses() if user.op_type == kind.__name__]


class OnGrid(Node):
    """A rounded weight in a traced graph, with the name of its parameter (export/trace.py)."""

    weight = Input()
    name = Attribute(str)


class Scale(Node):
    x = Input()
    factor = Attribute(float)


class SplitHeads(Node):
    x = Input()
    heads = Attribute(int)


class Rotate(Node):
    x, positions, cos, sin = Input(), Input(), Input(), Input()
    interleaved, linear = Attribute(bool), Attribute(bool)


class SelectTokens(Node):
    x, index = Input(), Input()


class Append(Node):
    past, new, write_index = Input(), Input(), Input()


class AppendPositions(Node):
    past, new, write_index = Input(), Input(), Input()


class FitPositions(Node):
    key_positions, past = Input(), Input()


class RefuseGaps(Node):
    row = Input()


class Distances(Node):
    q_positions, k_positions = Input(), Input()


class Mask(Node):
    positions, key_positions, bias, like = Input(), Input(), OptionalInput(), Input()
    before, after, chunk = Attribute(int), Attribute(int), Attribute(int)


class Attend(Node):
    q, keys, values, mask = Input(), Input(), Input(), Input()
    content, sinks = OptionalInput(), OptionalInput()
    heads, kv_heads = Attribute(int), Attribute(int)
    scale, softcap = Attribute(float), Attribute(float)


class AttentionWeights(Node):
    """The softmax of an Attend."""

    attended = Input()


class Products(Node):
    q, keys = Input(), Input()
    heads, kv_heads = Attribute(int), Attribute(int)


class WaveProducts(Node):
    q, q_positions, k_positions, waves = Input(), Input(), Input(), Input()


class WeightedValues(Node):
    weights, values = Input(), Input()
    heads, kv_heads = Attribute(int), Attribute(int)


class LayersOfRatio(Node):
    numbers, divisors = Input(), Input()
    first, first_bias, second, second_bias = Input(), Input(), Input(), Input()


class Pick(Node):
    rows, index, key_rows = OptionalInput(), Input(), OptionalInput()
    factor = Attribute(float)


class CollectByDistance(Node):
    weights, positions, key_positions = Input(), Input(), Input()
    left, right = Attribute(int), Attribute(int)


class SuffixSum(Node):
    x = Input()
    own = Attribute(bool)


class SumsBetween(Node):
    numbers, distances = Input(), Input()


class RowsAtCounts(Node):
    q, keys, mask, rows = Input(), Input(), Input(), Input()
    heads, kv_heads, scale = Attribute(int), Attribute(int), Attribute(float)


class AttendTurnedKeys(Attend):
    """Attend with keys that are rotated further for each query."""

    positions, key_positions, first, second = Input(), Input(), Input(), Input()
    interleaved, first_turned = Attribute(bool), Attribute(int)


class Recur(Node):
    x, hidden, count = Input(), Input(), Input()
    weight, recurrent, bias, recurrent_bias = Input(), Input(), Input(), Input()
    width = Attribute(int)


class GatedDelta(Node):
    q, k, v, decay, rate = Input(), Input(), Input(), Input(), OptionalInput()
    state = Input()
    kv_heads, heads = Attribute(int), Attribute(int)


class LastHidden(Node):
    """The last hidden vectors of a Recur, or the last state of a GatedDelta."""

    outputs = Input()


class Experts(Node):
    """Experts with weights 0 for those not chosen; their unit is g sigmoid(alpha g) (u + beta),
    with g at most limit and u within -limit .. limit.

    x [B,S,E], weights of the experts [B,S,N], and constants: weights [N,E,H] and biases [N,H] of
    gates and of ups, weights [N,H,E] and biases [N,E] of downs.
    """

    x, weights = Input(), Input()
    gates, gates_bias = Input(), OptionalInput()
    ups, ups_bias = Input(), OptionalInput()
    downs, downs_bias = Input(), OptionalInput()
    chosen = Attribute(int)
    alpha, beta, limit = Attribute(float), Attribute(float), Attribute(float)
