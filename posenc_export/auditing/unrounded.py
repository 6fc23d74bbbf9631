"""The float32 form of a graph that rounds: the same graph with the numbers that its codes stand
for, computed in float32.

Sources: the definitions of the operators in onnx/docs/Operators.md and in ONNX Runtime's
docs/ContribOperators.md.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Any, Callable, Dict, List, Mapping, NamedTuple, Optional, Sequence, Set, Tuple

import numpy as np
import onnx_ir as ir
from onnx_ir.passes.common import InlinePass, LiftConstantsToInitializersPass

from posenc_export.auditing.inputs import NotUnrounded
from posenc_export.runtime.graphs.onnx_nodes import Node
from posenc_export.runtime.verification.constants import READERS

Origins = Dict[str, Tuple[str, str]]  # by name of a constant, Weight.format and Weight.source
MICROSOFT = "com.microsoft"
LARGEST = (1 << 31) - (1 << 20)  # bytes of a model in one message of protobuf
HALVES = {ir.DataType.FLOAT16: "float16", ir.DataType.BFLOAT16: "bfloat16"}
BITS = {ir.DataType.INT8: 8, ir.DataType.UINT8: 8, ir.DataType.INT4: 4, ir.DataType.UINT4: 4}
BITS |= {ir.DataType.INT2: 2, ir.DataType.UINT2: 2}
LEAST = 64  # numbers of a constant of codes; fewer are zero points or axes
FLOAT = ir.DataType.FLOAT
PRODUCTS = ("MatMul", "Gemm")
UNKNOWN = ("QMoE", "QAttention", "ConvInteger", "QLinearConv", "QGemm", "DynamicQuantizeLSTM")


class Weight(NamedTuple):
    """A constant of a form whose numbers were rounded."""

    format: str  # "float16", "bfloat16", or "8 bits" and the like
    source: str  # name of the codes or numbers in the graph
    role: str  # "product", "rows" of a table, or "other"


@dataclass
class Form:
    """A float32 form: the model, of onnx_ir and serialised, and the constants whose numbers were
    rounded.
    """

    model: Any
    content: bytes
    weights: Dict[str, Weight]
    numbers: Dict[str, np.ndarray]


def rounds(model: Any) -> str:
    """Return in what the weights of a model are rounded, such as "8 bits"; "" if they are not."""
    sizes: Dict[str, int] = {}
    for graph in _graphs(model):
        for value in graph.initializers.values():
            size = value.const_value.size if value.const_value is not None else 0
            kind = HALVES.get(value.dtype) or _bits(value, size)
            if kind:
                sizes[kind] = sizes.get(kind, 0) + size
    return max(sizes, key=lambda kind: sizes[kind], default="")


def _bits(value: Any, size: int) -> str:
    """Return the format of a constant of codes. Several codes may stand in a byte."""
    if value.dtype not in BITS or size < LEAST:
        return ""
    nodes = [use.node for use in value.uses()]
    stated = [n.attributes["bits"].value for n in nodes if "bits" in n.attributes]
    return f"{max(stated, default=BITS[value.dtype])} bits"


def read(path: Path) -> Any:
    """Return the model of a file, without functions, and whose constants are initializers."""
    model = InlinePass()(ir.load(path)).model
    return LiftConstantsToInitializersPass(lift_all_constants=True, size_limit=0)(model).model


def unrounded(path: Path) -> Form:
    """Return the float32 form of a graph. Raise NotUnrounded if it is not known."""
    model = read(path)
    for value in model.graph.initializers.values():
        if isinstance(value.const_value, ir.ExternalTensor):
            value.const_value = ir.tensor(value.const_value.numpy().copy(), name=value.name)
    nodes = list(model.graph.all_nodes())
    if unknown := sorted({node.op_type for node in nodes} & {*UNKNOWN}):
        raise NotUnrounded(f"{', '.join(unknown)} are not read in float32")
    origins = _origins(model.graph)
    _widen(model)
    for node in nodes:
        if node.op_type in REWRITTEN:
            _rewrite(node, origins)
    _fold(model, origins)
    _scale_products(model.graph, origins)
    weights, numbers = dict[str, Weight](), dict[str, np.ndarray]()
    initializers: Dict[str, Any] = {**model.graph.initializers}
    for name, value in initializers.items():
        if not value.uses() and not value.is_graph_output():
            del model.graph.initializers[name]
        elif name in origins and value.dtype == FLOAT:
            weights[name] = Weight(*origins[name], _role(value))
            numbers[name] = value.const_value.numpy()
    size = sum(initializers[name].const_value.nbytes for name in model.graph.initializers)
    if size > LARGEST:
        raise NotUnrounded(f"in float32 it takes {size / 1e9:.1f} GB, more than one model holds")
    return Form(model, ir.to_proto(model).SerializeToString(), weights, numbers)


def _graphs(model: Any) -> List[Any]:
    """Return the graph of a model and all graphs inside its nodes."""
    inner = [graph for node in model.graph.all_nodes() for graph in _bodies(node)]
    return [model.graph, *inner]


def _bodies(node: Any) -> List[Any]:
    kinds = {ir.AttributeType.GRAPH: lambda v: [v], ir.AttributeType.GRAPHS: list}
    return [g for a in node.attributes.values() if a.type in kinds for g in kinds[a.type](a.value)]


def _origins(graph: Any) -> Origins:
    """Return the formats of rounded constants, and their names."""
    origins: Origins = {}
    for name, value in graph.initializers.items():
        size = value.const_value.size if value.const_value is not None else 0
        if kind := HALVES.get(value.dtype) or _bits(value, size):
            origins[name] = kind, name
    return origins


def _widen(model: Any) -> None:
    """Compute in float32 what was in half precision."""
    for graph in _graphs(model):
        for value in graph.initializers.values():
            if value.dtype in HALVES:
                numbers = value.const_value.numpy().astype(np.float32)
                value.const_value = ir.tensor(numbers, name=value.name)
                value.dtype = FLOAT
        for value in (*graph.inputs, *graph.outputs):
            if value.dtype in HALVES:
                value.dtype = FLOAT
    for node in model.graph.all_nodes():
        for output in node.outputs:
            if not output.is_graph_output():
                output.type = output.shape = None  # those of codes become others
        for name, attribute in list(node.attributes.items()):
            if attribute.type == ir.AttributeType.TENSOR and attribute.value.dtype in HALVES:
                wide = ir.tensor(attribute.value.numpy().astype(np.float32))
                node.attributes[name] = ir.AttrTensor(name, wide)
            elif name in ("to", "dtype", "stash_type", "output_dtype"):
                if attribute.value in [int(half) for half in HALVES]:
                    node.attributes[name] = ir.AttrInt64(name, int(FLOAT))


class _Writer:
    """Collects the nodes that replace one."""

    def __init__(self, node: Any) -> None:
        self.node, self.nodes, self.graph = node, list[Any](), node.graph

    def __call__(self, operator: str, *inputs: Any, **attributes: Any) -> Any:
        node = ir.node(operator, list(inputs), attributes)
        self.nodes.append(node)
        return node.outputs[0]

    def constant(self, numbers: np.ndarray, part: str) -> Any:
        name = f"{self.node.outputs[0].name}.{part}"
        value = ir.val(name, const_value=ir.tensor(numbers, name=name))
        self.graph.register_initializer(value)
        return value

    def wide(self, value: Any) -> Any:
        """Return a value as float32."""
        return self("Cast", value, to=int(FLOAT))

    def without(self, value: Any, zero: Any) -> Any:
        """Return codes less their zero points, as float32."""
        wide = self.wide(value)
        return wide if zero is None else self("Sub", wide, self.wide(zero))


def _rewrite(node: Any, origins: Origins) -> None:
    """Replace a node that rounds, or that computes with codes. Codes of activations become numbers
    that were not rounded, of the same scale.
    """
    write = _Writer(node)
    inputs = [*node.inputs, *[None] * (12 - len(node.inputs))]
    outputs = REWRITTEN[node.op_type](write, node, inputs, origins)
    if outputs is None:
        return
    outputs = outputs if isinstance(outputs, tuple) else (outputs,)
    old = [value for value in node.outputs if value.name]
    for value, other in zip(node.outputs, outputs, strict=False):
        other.name = other.name or f"{value.name}.float32"
    for made in write.nodes:
        for value in made.outputs:
            value.name = value.name or f"{old[0].name}.{made.op_type}.{id(value)}"
    node.graph.insert_before(node, write.nodes)
    for value, other in zip(node.outputs, outputs, strict=False):
        _replace(value, other)
    node.graph.remove(node, safe=True)


def _replace(value: Any, other: Any) -> None:
    """Let all readers of a value read another one, which becomes the graph's output in its place
    under its name.
    """
    name, kind, is_output = value.name, value.type, value.is_graph_output()
    if is_output and other.is_graph_input():
        raise NotUnrounded(f"the output {name} would be an input")
    ir.convenience.replace_all_uses_with(value, other, replace_graph_outputs=True)
    if is_output:
        value.name, other.name, other.type = f"{name}.rounded", name, kind


def _stored(values: Sequence[Any]) -> List[Optional[np.ndarray]]:
    """Return the numbers of constants; None for inputs that are left out."""
    if any(value is not None and value.const_value is None for value in values):
        raise NotUnrounded("codes of weights that are computed are not read in float32")
    return [None if value is None else value.const_value.numpy() for value in values]


def _decoded(node: Any, values: Sequence[Any]) -> np.ndarray:
    """Return the numbers of the weight of an operator of com.microsoft."""
    known = {name: attribute.value for name, attribute in node.attributes.items()}
    reader, ((_, *_),) = READERS[(MICROSOFT, node.op_type)]
    own = Node(MICROSOFT, node.op_type, node.name or "", attributes=known)
    return np.asarray(reader(own, *_stored(values)), np.float32)


def _format(node: Any, codes: Any) -> str:
    stated = node.attributes.get("bits")
    return f"{stated.value if stated else BITS.get(codes.dtype, 8)} bits"


def _block_product(write: _Writer, node: Any, x: Sequence[Any], origins: Origins) -> Any:
    numbers = _decoded(node, x[1:5])  # [N,K]
    weight = write.constant(np.ascontiguousarray(numbers.T), "weight")
    origins[weight.name] = _format(node, x[1]), x[1].name
    product = write("MatMul", x[0], weight)
    return product if x[5] is None else write("Add", product, x[5])


def _block_rows(write: _Writer, node: Any, x: Sequence[Any], origins: Origins) -> Any:
    table = write.constant(_decoded(node, (x[0], x[2], x[3])), "table")
    attribute = node.attributes.get("bits")
    origins[table.name] = f"{attribute.value if attribute else 4} bits", x[0].name
    axis = node.attributes.get("gather_axis")
    return write("Gather", table, x[1], axis=axis.value if axis else 0)


def _dynamic(write: _Writer, node: Any, x: Sequence[Any], origins: Origins) -> Any:
    one, zero = np.float32(1), np.float32(0)
    return x[0], write.constant(np.array(one), "scale"), write.constant(np.array(zero), "zero")


def _integers(write: _Writer, node: Any, x: Sequence[Any], origins: Origins) -> Any:
    return write("MatMul", write.without(x[0], x[2]), write.without(x[1], x[3]))


def _integers_to_float(write: _Writer, node: Any, x: Sequence[Any], origins: Origins) -> Any:
    left = write("Mul", write.without(x[0], x[4]), x[2])
    product = write("MatMul", left, write("Mul", write.without(x[1], x[5]), x[3]))
    return product if x[6] is None else write("Add", product, x[6])


def _dynamic_product(write: _Writer, node: Any, x: Sequence[Any], origins: Origins) -> Any:
    product = write("MatMul", x[0], write("Mul", write.without(x[1], x[3]), x[2]))
    return product if x[4] is None else write("Add", product, x[4])


def _linear_product(write: _Writer, node: Any, x: Sequence[Any], origins: Origins) -> Any:
    left, right = (write("Mul", write.without(x[at], x[at + 2]), x[at + 1]) for at in (0, 3))
    return _coded(write, write("MatMul", left, right), x[6], x[7])


def _coded(write: _Writer, value: Any, scale: Any, zero: Any) -> Any:
    code = write("Div", value, scale)
    return code if zero is None else write("Add", code, write.wide(zero))


def _quantize(write: _Writer, node: Any, x: Sequence[Any], origins: Origins) -> Any:
    _check_one_scale(x[1])
    return _coded(write, x[0], x[1], x[2])


def _dequantize(write: _Writer, node: Any, x: Sequence[Any], origins: Origins) -> Any:
    if x[0].const_value is not None:
        return None  # decoded when constants are folded
    _check_one_scale(x[1])
    source = x[0].producer()
    if source is None or source.op_type != "Gather" or source.inputs[0].const_value is None:
        return write("Mul", write.without(x[0], x[2]), x[1])
    table = write("Mul", write.without(source.inputs[0], x[2]), x[1])
    axis = source.attributes.get("axis")
    return write("Gather", table, source.inputs[1], axis=axis.value if axis else 0)


def _check_one_scale(scale: Any) -> None:
    if scale.shape is None or any(size != 1 for size in scale.shape):
        raise NotUnrounded("activations with scales of channels are not read in float32")


Rewriting = Callable[[_Writer, Any, Sequence[Any], Origins], Any]
REWRITTEN: Mapping[str, Rewriting] = {
    "MatMulNBits": _block_product,
    "GatherBlockQuantized": _block_rows,
    "DynamicQuantizeLinear": _dynamic,
    "MatMulInteger": _integers,
    "MatMulIntegerToFloat": _integers_to_float,
    "DynamicQuantizeMatMul": _dynamic_product,
    "QLinearMatMul": _linear_product,
    "QuantizeLinear": _quantize,
    "DequantizeLinear": _dequantize,
}


def _fold(model: Any, origins: Origins) -> None:
    """Compute what depends on constants alone, and note what is made of rounded numbers."""
    graph, computed, kept = model.graph, list[Any](), list[Any]()
    known: Set[Any] = {value for value in graph.initializers.values() if value not in graph.inputs}
    rounded = [(value, name) for name, value in graph.initializers.items() if name in origins]
    of: Dict[Any, Tuple[str, str]] = {value: origins[name] for value, name in rounded}
    for node in graph:
        read = [value for value in node.inputs if value is not None]
        if not known.issuperset(read) or _bodies(node) or node.op_type.startswith("Random"):
            continue
        computed.append(node)
        known.update(node.outputs)
        if formats := [of[value] for value in read if value in of]:
            of.update(dict.fromkeys(node.outputs, formats[0]))
    inside = set(computed)
    for node in computed:
        for value in node.outputs:
            if value.is_graph_output() or any(use.node not in inside for use in value.uses()):
                kept.append(value)
    if not kept:
        return
    part = ir.convenience.extract(graph, [], [value.name for value in kept])
    model_of = ir.Model(part, ir_version=model.ir_version)
    arrays = _evaluated(ir.to_proto(model_of).SerializeToString())
    for value, numbers in zip(kept, arrays, strict=True):
        name = f"{value.name}.folded"
        constant = ir.val(name, const_value=ir.tensor(numbers, name=name))
        graph.register_initializer(constant)
        if value in of:
            origins[name] = of[value]
        _replace(value, constant)
    for node in reversed(computed):
        if not any(value.uses() or value.is_graph_output() for value in node.outputs):
            graph.remove(node, safe=True)


def _evaluated(content: bytes) -> List[np.ndarray]:
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.log_severity_level, options.intra_op_num_threads = 4, 1
    session = onnxruntime.InferenceSession(content, options, providers=["CPUExecutionProvider"])
    return [np.asarray(array) for array in session.run(None, {})]


def _scale_products(graph: Any, origins: Origins) -> None:
    """Multiply the weight of a product with the scales by which its outputs are multiplied."""
    for node in list(graph):
        weight = node.inputs[1] if node.op_type == "MatMul" else None
        if weight is None or weight.name not in origins or weight.const_value is None:
            continue
        if not np.array_equal(weight.const_value.numpy() % 1, np.zeros(weight.shape.numpy())):
            continue  # no codes
        value = node.outputs[0]
        while len(value.uses()) == 1 and _only(value).op_type == "Cast":
            value = _only(value).outputs[0]
        after = _only(value) if len(value.uses()) == 1 else None
        if after is None or after.op_type != "Mul":
            continue
        scale = next(other for other in after.inputs if other is not value)
        if scale.const_value is None:
            continue
        name = f"{weight.name}.scaled"
        numbers = weight.const_value.numpy() * scale.const_value.numpy().reshape(-1)
        scaled = ir.val(name, const_value=ir.tensor(numbers.astype(np.float32), name=name))
        graph.register_initializer(scaled)
        origins[name] = origins[weight.name]
        node.replace_input_with(1, scaled)
        _replace(after.outputs[0], value)
        graph.remove(after, safe=True)


def _only(value: Any) -> Any:
    (use,) = value.uses()
    return use.node


def _role(value: Any) -> str:
    uses = [(use.node.op_type, use.idx) for use in value.uses()]
    if any(operator in PRODUCTS and at < 2 for operator, at in uses):
        return "product"
    return "rows" if ("Gather", 0) in uses else "other"
