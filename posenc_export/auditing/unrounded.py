"""The float32 form of a graph that rounds: the same graph with the numbers that its codes stand
for, computed in float32.

Sources: the definitions of the operators in onnx/docs/Operators.md and in ONNX Runtime's
docs/ContribOperators.md.
"""

import math
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Callable, Iterator, Mapping, NamedTuple

import numpy as np
import onnx_ir as ir
from onnx_ir.passes.common import (
    InlinePass,
    LiftConstantsToInitializersPass,
    LiftSubgraphInitializersToMainGraphPass,
)

from posenc_export.auditing.inputs import NotUnrounded
from posenc_export.runtime.graphs import onnx_nodes, onnx_parts
from posenc_export.runtime.graphs.onnx_nodes import Node, Nodes
from posenc_export.runtime.verification.constants import MICROSOFT, READERS
from posenc_export.runtime.verification.float32_form import FLOAT, HALF, widened

Origins = dict[str, tuple[str, str]]  # by name of a constant, Weight.format and Weight.source
LARGEST = (1 << 31) - (1 << 20)  # bytes of a model in one message of protobuf
STORED = 1 << 20  # numbers of a constant that the solver may need
BITS = {"int8": 8, "uint8": 8, "int4": 4, "uint4": 4}
LEAST = 64  # numbers of a constant of codes; fewer are zero points or axes
PRODUCTS = ("MatMul", "Gemm")
UNKNOWN = ("QMoE", "QAttention", "ConvInteger", "QLinearConv", "QGemm", "DynamicQuantizeLSTM")


class Weight(NamedTuple):
    """A constant of a form whose numbers were rounded."""

    format: str  # "float16", "bfloat16", or "8 bits" and the like
    source: str  # name of the codes or numbers in the graph
    role: str  # "product", "rows" of a table, or "other"


def read(model: Any, whole: bool = False) -> Nodes:
    """Return the graph of a model of onnx_ir, without functions, and whose constants are
    initializers. Those of more than STORED numbers have a shape alone, unless `whole`.
    """
    lifted = LiftConstantsToInitializersPass(lift_all_constants=True, size_limit=0)
    for change in (InlinePass(), lifted, LiftSubgraphInitializersToMainGraphPass()):
        model = change(model).model
    for name, value in model.graph.initializers.items():
        stored: Any = value.const_value
        if stored.size > STORED and not whole:
            shape = stored.shape
            value.const_value = ir.ExternalTensor("", 0, 0, stored.dtype, shape=shape, name=name)
        else:
            value.const_value = ir.tensor(stored.numpy().copy(), stored.dtype, name)
    for node in model.graph.all_nodes():
        for name, attribute in list(node.attributes.items()):
            if attribute.type == ir.AttributeType.TENSOR:
                tensor = ir.tensor(attribute.value.numpy(), attribute.value.dtype)
                node.attributes[name] = ir.AttrTensor(name, tensor)
    graph = onnx_nodes.parsed(ir.to_proto(model).SerializeToString())
    kept = {name: kind for name, kind in graph.inputs.items() if name not in graph.constants}
    return replace(graph, inputs=kept)


def rounds(graph: Nodes) -> str:
    """Return in what the weights of a graph are rounded, such as "8 bits"; "" if they are not."""
    sizes: dict[str, int] = {}
    for name, (kind, _) in _origins(graph).items():
        sizes[kind] = sizes.get(kind, 0) + math.prod(graph.constants[name].shape)
    return max(sizes, key=lambda kind: sizes[kind], default="")


def unrounded(path: Path) -> tuple[Nodes, bytes, dict[str, Weight]]:
    """Return the float32 form of a graph, the same serialised, and the constants whose numbers were
    rounded. Raise NotUnrounded if it is not known.
    """
    graph = read(ir.load(path), whole=True)
    if unknown := sorted({node.operator for node in graph.walk()} & {*UNKNOWN}):
        raise NotUnrounded(f"{', '.join(unknown)} are not read in float32")
    graph = widened(graph, graph.inputs)
    origins = _origins(graph)
    _fold(graph, origins)
    graph.nodes = list(_rewritten(graph, graph, origins))
    _fold(graph, origins)
    _scale_products(graph, origins)
    used = {name for node in graph.nodes for name in onnx_parts.reads(node)} | {*graph.outputs}
    graph.constants = {name: value for name, value in graph.constants.items() if name in used}
    size = sum(len(value.content) for value in graph.constants.values())
    if size > LARGEST:
        raise NotUnrounded(f"in float32 it takes {size / 1e9:.1f} GB, more than one model holds")
    rounded = [n for n, c in graph.constants.items() if n in origins and c.element == "float"]
    weights = {name: Weight(*origins[name], _role(graph, name)) for name in rounded}
    content = onnx_parts.serialised(graph, graph.nodes, graph.outputs, list(graph.inputs))
    return graph, content, weights


def _origins(graph: Nodes) -> Origins:
    """Return the formats of rounded constants, and their names. Several codes may stand in a
    byte.
    """
    nodes = [node for node in graph.walk() if "bits" in node.attributes]
    stated = {name: node.attributes["bits"] for node in nodes for name in node.inputs}
    origins: Origins = {}
    for name, value in graph.constants.items():
        if value.element in HALF:
            origins[name] = value.element, name.removesuffix(".half")
        elif value.element in BITS and math.prod(value.shape) >= LEAST:
            origins[name] = f"{stated.get(name, BITS[value.element])} bits", name
    return origins


def _numbers(graph: Nodes, name: str) -> np.ndarray:
    """Return the numbers of a constant. Raise NotUnrounded for a value that is computed."""
    if name not in graph.constants:
        raise NotUnrounded("codes of weights that are computed are not read in float32")
    return graph.constants[name].array(Path())


def _fold(graph: Nodes, origins: Origins) -> None:
    """Compute what depends on constants alone, and note what is made of rounded numbers."""
    drawn = [node for node in graph.nodes if not node.operator.startswith("Random")]
    computed = onnx_parts.constant_nodes(replace(graph, nodes=drawn))
    for node in computed:
        if formats := [origins[name] for name in node.inputs if name in origins]:
            origins.update(dict.fromkeys(node.outputs, formats[0]))
    made = {name for node in computed for name in node.outputs if name}
    graph.nodes = [node for node in graph.nodes if made.isdisjoint(node.outputs)]
    read = {name for node in graph.nodes for name in onnx_parts.reads(node)} | {*graph.outputs}
    kept = sorted(made & read)
    if kept:
        session = onnx_parts.opened(onnx_parts.serialised(graph, computed, kept), Path())
        for name, numbers in zip(kept, session.run(None, {}), strict=True):
            graph.constants[name] = onnx_parts.constant(name, np.asarray(numbers))


@dataclass
class _Writer:
    """Collects the nodes that replace one."""

    node: Node
    graph: Nodes  # the whole one, which gets new constants
    makers: Mapping[str, Node]  # of the values beside the node
    origins: Origins
    nodes: list[Node] = field(default_factory=list)

    def __call__(self, operator: str, *inputs: str, **attributes: Any) -> str:
        name = f"{self.node.outputs[0]}.{len(self.nodes)}.float32"
        self.nodes.append(onnx_parts.new_node(operator, inputs, [name], attributes))
        return name

    def constant(self, numbers: Any, name: str) -> str:
        self.graph.constants[name] = onnx_parts.constant(name, np.asarray(numbers, np.float32))
        return name

    def weight(self, codes: str, *others: str) -> str:
        """Add the weight of an operator of com.microsoft, which these inputs are codes of: that of
        a product turned, as MatMul reads it.
        """
        reader, ((_, *_),) = READERS[(MICROSOFT, self.node.operator)]
        parts = [_numbers(self.graph, name) if name else None for name in (codes, *others)]
        numbers, rows = reader(self.node, *parts), self.node.operator == "GatherBlockQuantized"
        name = f"{self.node.outputs[0]}.weight"
        bits = self.node.attributes.get("bits", 4 if rows else 8)
        self.origins[name] = f"{bits} bits", codes
        return self.constant(numbers if rows else numbers.T, name)

    def without(self, value: str, zero: str) -> str:
        """Return codes less their zero points, as float32."""
        wide = self("Cast", value, to=FLOAT)
        return self("Sub", wide, self("Cast", zero, to=FLOAT)) if zero else wide

    def scaled(self, value: str, scale: str, zero: str) -> str:
        """Return the numbers that codes stand for."""
        return self("Mul", self.without(value, zero), scale)

    def plus(self, value: str, bias: str) -> str:
        """Return a product with its bias, if it has one."""
        return self("Add", value, bias) if bias else value

    def coded(self, value: str, scale: str, zero: str) -> str:
        """Return numbers in units of their scale, which are not rounded."""
        self.check_one(scale)
        return self.plus(self("Div", value, scale), zero and self("Cast", zero, to=FLOAT))

    def check_one(self, scale: str) -> None:
        """Raise NotUnrounded unless a scale is one known number."""
        stored = self.graph.constants.get(scale)
        if stored is None or math.prod(stored.shape) != 1:
            raise NotUnrounded("activations with scales of channels are not read in float32")


def _rewritten(graph: Nodes, whole: Nodes, origins: Origins) -> Iterator[Node]:
    """Yield nodes of a graph in float32, in place of those that round, or that compute with codes.
    Codes of activations become numbers that were not rounded, of the same scale.
    """
    makers = {name: node for node in graph.nodes for name in node.outputs}
    for node in graph.nodes:
        for name, body in node.attributes.items():
            if isinstance(body, Nodes):
                inner = replace(body, nodes=list(_rewritten(body, whole, origins)))
                node = onnx_parts.with_attribute(node, name, inner)
        result = ""
        if node.operator in REWRITTEN:
            write = _Writer(node, whole, makers, origins)
            inputs = [*node.inputs, *[""] * (12 - len(node.inputs))]
            result = REWRITTEN[node.operator](write, inputs)
            yield from write.nodes
        yield onnx_parts.new_node("Identity", [result], node.outputs[:1]) if result else node


def _block_rows(write: _Writer, x: list[str]) -> str:
    table, axis = write.weight(x[0], x[2], x[3]), write.node.attributes.get("gather_axis", 0)
    return write("Gather", table, x[1], axis=axis)


def _dynamic(write: _Writer, x: list[str]) -> str:
    for number, name in zip((1, 0), write.node.outputs[1:], strict=False):
        write.constant(number, name)  # scale and zero point
    return x[0]


def _dequantize(write: _Writer, x: list[str]) -> str:
    write.check_one(x[1])
    source = write.makers.get(x[0], Node())
    if source.operator != "Gather" or source.inputs[0] not in write.graph.constants:
        return write.scaled(*x[:3])
    table, axis = write.scaled(source.inputs[0], x[1], x[2]), source.attributes.get("axis", 0)
    return write("Gather", table, source.inputs[1], axis=axis)


# By operator: a function of the writer and the inputs that returns the name of the first output.
Rewriting = Callable[[_Writer, list[str]], str]
REWRITTEN: Mapping[str, Rewriting] = {
    "MatMulNBits": lambda write, x: write.plus(write("MatMul", x[0], write.weight(*x[1:5])), x[5]),
    "GatherBlockQuantized": _block_rows,
    "DynamicQuantizeLinear": _dynamic,
    "MatMulInteger": lambda write, x: write(
        "MatMul", write.without(x[0], x[2]), write.without(x[1], x[3])
    ),
    "MatMulIntegerToFloat": lambda write, x: write.plus(
        write("MatMul", write.scaled(x[0], x[2], x[4]), write.scaled(x[1], x[3], x[5])), x[6]
    ),
    "DynamicQuantizeMatMul": lambda write, x: write.plus(
        write("MatMul", x[0], write.scaled(*x[1:4])), x[4]
    ),
    "QLinearMatMul": lambda write, x: write.coded(
        write("MatMul", write.scaled(*x[:3]), write.scaled(*x[3:6])), x[6], x[7]
    ),
    "QuantizeLinear": lambda write, x: write.coded(*x[:3]),
    "DequantizeLinear": _dequantize,
}


def _scale_products(graph: Nodes, origins: Origins) -> None:
    """Multiply the weight of a product with the scales by which its outputs are multiplied."""
    readers: dict[str, list[Node]] = {name: [Node()] for name in graph.outputs}
    for node in graph.nodes:
        for name in onnx_parts.reads(node):
            readers.setdefault(name, []).append(node)

    def only(name: str) -> Node | None:
        return readers[name][0] if len(readers.get(name, ())) == 1 else None

    for node in graph.nodes:
        weight = node.inputs[1] if node.operator == "MatMul" else ""
        if weight not in origins or weight not in graph.constants:
            continue
        numbers, value = _numbers(graph, weight), node.outputs[0]
        if (numbers % 1).any():
            continue  # no codes
        while (after := only(value)) and after.operator in ("Cast", "Identity"):
            value = after.outputs[0]
        scales = [name for name in after.inputs if name != value] if after else []
        if after and after.operator == "Mul" and scales and scales[0] in graph.constants:
            name = f"{node.outputs[0]}.scaled"
            numbers = numbers * _numbers(graph, scales[0]).reshape(-1)
            graph.constants[name] = onnx_parts.constant(name, numbers.astype(np.float32))
            origins[name] = origins[weight]
            node.inputs[1] = name
            after.operator, after.inputs = "Identity", [value]


def _role(graph: Nodes, weight: str) -> str:
    nodes = [node for node in graph.walk() if weight in node.inputs]
    uses = {(node.operator, node.inputs.index(weight)) for node in nodes}
    if any(operator in PRODUCTS and at < 2 for operator, at in uses):
        return "product"
    return "rows" if ("Gather", 0) in uses else "other"
