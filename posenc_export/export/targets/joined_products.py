"""Queries, keys and values of one input become one product, whose outputs are split. At width 256
and in int4, a step of a decoder takes 0.94 to 0.97 of its time with three products.
"""

import collections
from typing import Any, Dict, List, NamedTuple, Optional

import numpy as np
import onnx_ir as ir

from posenc_export.export.expected_numbers import AND
from posenc_export.export.quantization.grid import Codes, OnGrid
from posenc_export.export.targets.builder import Builder, constant_of, numbers_of, size, transposed

# Operators that read heads. Gate and up stay two products: one takes 0.96 to 1.03 of their time.
OF_HEADS = {"SplitHeads", "Reshape", "RMSNormalization"}


class Linear(NamedTuple):
    """A linear layer in a graph."""

    product: ir.Node
    weight: ir.Value  # [N,K] if it is rounded, otherwise [K,N]
    name: str  # of [N,K]
    rounding: Optional[OnGrid]
    bias: Optional[ir.Value]  # [N]
    output: ir.Value


def join(op: Builder) -> None:
    """Join three or more linear layers to heads whose weights have one form and one reader."""
    groups: Dict[Any, List[Linear]] = collections.defaultdict(list)
    for layer in filter(None, [_linear(op, node) for node in op.graph]):
        form: List[Any] = [layer.product.inputs[0], layer.weight.dtype, layer.bias is None]
        if layer.rounding is not None:
            grid, codes = layer.rounding
            form += [grid, codes.offsets is None, codes.zeros(grid.bits) is None]
        groups[tuple(form)].append(layer)
    for layers in groups.values():
        if len(layers) > 2:
            _join(op, layers)


def _linear(op: Builder, node: ir.Node) -> Optional[Linear]:
    value, output = node.inputs[1] if node.op_type == "MatMul" else None, node.outputs[0]
    if value is None or value.shape is None or len(value.shape) != 2:
        return None
    read = transposed(value) or value
    weight, (name, rounding) = constant_of(read), op.rounded(read)
    if rounding is None and str(value.name).endswith(".T"):  # the transpose of a weight
        name = str(value.name).removesuffix(".T")
    sole = all(len(each.uses()) == 1 for each in (weight, read, value))
    if not (name and sole and weight.const_value is not None):
        return None
    user = next(iter(output.uses())).node if len(output.uses()) == 1 else node
    added = [one for one in user.inputs if one and one.const_value and one.shape == value.shape[1:]]
    bias = added[0] if added and user.op_type == "Add" else None
    output = output if bias is None else user.outputs[0]
    of_heads = {use.node.op_type for use in output.uses()} <= OF_HEADS
    return Linear(node, weight, name, rounding, bias, output) if of_heads else None


def _join(op: Builder, layers: List[Linear]) -> None:
    (product, weight, _, rounding, bias, output), new = layers[0], op.empty()
    axis, name = int(rounding is None), AND.join(layer.name for layer in layers)
    sizes = [size(layer.weight, axis) for layer in layers]
    whole = [size(weight, 0), size(weight, 1)]
    whole[axis] = sum(sizes)

    def joined() -> ir.TensorProtocol:
        return ir.tensor(np.concatenate([numbers_of(layer.weight) for layer in layers], axis))

    assert weight.dtype is not None and output.shape is not None
    lazy = ir.LazyTensor(joined, weight.dtype, ir.Shape(whole), name=name + ".T" * axis)
    read = new.initialiser(lazy)
    if rounding is not None:
        codes = Codes.joined([layer.rounding[1] for layer in layers if layer.rounding])
        read = new.Transpose(new.mark(read, name, (rounding[0], codes)), perm=[1, 0])
    y = new.MatMul(product.inputs[0], read)
    if bias is not None:
        biases = [layer.bias for layer in layers if layer.bias is not None]
        names = AND.join(str(value.name) for value in biases)
        y.shape, y.type = product.outputs[0].shape, output.type
        y = new.Add(y, new.weight(names, lambda: np.concatenate([*map(numbers_of, biases)])))
    y.shape, y.type = ir.Shape([*output.shape[:-1], sum(sizes)]), output.type
    parts = new.several(len(layers), "Split", y, sizes, axis=len(output.shape) - 1)
    op.graph.insert_before(product, new.nodes)
    for layer, part in zip(layers, parts, strict=True):
        part.shape, part.type = layer.output.shape, layer.output.type
        layer.output.replace_all_uses_with(part, replace_graph_outputs=True)
        added = layer.output.producer()
        assert added is not None
        op.graph.remove({layer.product, added}, safe=True)
