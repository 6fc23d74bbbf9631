"""Target `ort`: fusions of standard nodes outside attention for which ONNX Runtime has fewer or
cheaper nodes. Nodes that match no pattern are unchanged.

A sum and the norm after it stay two nodes: on a CPU, SkipSimplifiedLayerNormalization of ONNX
Runtime 1.31 takes 1.2 to 2.7 times as long as Add and RMSNormalization at widths of 576 and more,
SkipLayerNormalization 1.7 to 7 times as long as Add and LayerNormalization. ONNX Runtime itself
fuses BiasGelu when it loads the graph.
"""

from typing import Optional, TypeGuard

import numpy as np
import onnx_ir as ir

from posenc_export.export.targets.builder import MICROSOFT, Builder
from posenc_export.export.targets.rewriter import Replaced


def transposed_product(op: Builder, node: ir.Node) -> Replaced:
    """Fuse the product of x and a transposed constant, such as a tied token table, to FusedMatMul,
    which reads the constant without transposing it.

    Otherwise ONNX Runtime stores a transposed copy of the constant whenever it loads the graph.
    """
    x, turned = node.inputs
    transpose = None if turned is None else turned.producer()
    if transpose is None or transpose.op_type != "Transpose" or not _is_matrix(transpose.inputs[0]):
        return []
    order = transpose.attributes.get("perm")
    if order is not None and tuple(order.as_ints()) != (1, 0):
        return []
    return [(node.outputs[0], op.FusedMatMul(x, transpose.inputs[0], domain=MICROSOFT, transB=1))]


def sigmoid_unit(op: Builder, node: ir.Node) -> Replaced:
    """Fuse x sigmoid(x), or x sigmoid(alpha x) with a constant alpha, to QuickGelu."""
    read, share = node.inputs[0], node.outputs[0]
    users = list(share.uses())
    if len(users) != 1 or users[0].node.op_type != "Mul":
        return []
    product = users[0].node
    x = next((value for value in product.inputs if value is not share), None)
    alpha = _factor(x, read)
    if alpha is None:
        return []
    return [(product.outputs[0], op.QuickGelu(x, domain=MICROSOFT, alpha=alpha))]


def softplus(op: Builder, node: ir.Node) -> Replaced:
    """Replace where(x > 20, x, softplus(x)), as torch computes softplus, by Softplus, whose kernel
    is x for large x, and which may be spelled log(exp(x) + 1).
    """
    x, users = node.inputs[0], list(node.outputs[0].uses())
    if node.op_type == "Log":
        exponential = _other(_made_by(x, "Add"), 1.0)
        power = _made_by(exponential, "Exp")
        if power is None:
            return []
        x = power.inputs[0]
    choice = users[0].node if len(users) == 1 else node
    if choice.op_type != "Where" or choice.inputs[1] is not x:
        return []
    large = _made_by(choice.inputs[0], "Greater")
    return [(choice.outputs[0], op.Softplus(x))] if large and large.inputs[0] is x else []


def unit_length(op: Builder, node: ir.Node) -> Replaced:
    """Replace x / sqrt(sum(x x) + epsilon) over the last axis by a norm with a constant scale."""
    users = [use.node for use in node.outputs[0].uses()]
    inverse = users[0] if len(users) == 1 and users[0].op_type == "Reciprocal" else None
    if inverse is not None:
        users = [use.node for use in inverse.outputs[0].uses()]
    added = _made_by(node.inputs[0], "Add")
    total = None if added is None else _made_by(added.inputs[0], "ReduceSum")
    square = None if total is None else _made_by(total.inputs[0], "Mul")
    if added is None or total is None or square is None or len(users) != 1:
        return []
    x, epsilon = square.inputs[0], _number(added.inputs[1])
    typed = next((value for value in (*square.outputs, x) if value and value.shape), None)
    if x is not square.inputs[1] or typed is None or typed.dtype != ir.DataType.FLOAT:
        return []
    kind, keeps = "Div" if inverse is None else "Mul", total.attributes.get("keepdims")
    if epsilon is None or users[0].op_type != kind or x not in users[0].inputs:
        return []
    sizes = list(typed.shape or ())
    if _number(total.inputs[1]) not in (-1, len(sizes) - 1) or (keeps and not keeps.as_int()):
        return []
    size = sizes[-1]
    if not isinstance(size, int):
        return []
    scale = op.constant(np.full(size, size**-0.5), "float32")
    norm = op.RMSNormalization(x, scale, axis=-1, epsilon=epsilon / size, stash_type=1)
    return [(users[0].outputs[0], norm)]


def _made_by(value: Optional[ir.Value], kind: str) -> Optional[ir.Node]:
    """Return the node that makes a value, if it is of a kind."""
    node = None if value is None else value.producer()
    return node if node is not None and node.op_type == kind else None


def _other(node: Optional[ir.Node], number: float) -> Optional[ir.Value]:
    """Return the first input of a node whose second one is a number."""
    return node.inputs[0] if node is not None and _number(node.inputs[1]) == number else None


def _number(value: Optional[ir.Value]) -> Optional[float]:
    """Return the number that a constant holds, if it is one."""
    constant = None if value is None else value.const_value
    return None if constant is None or constant.size != 1 else float(constant.numpy().item())


def centred_norm(op: Builder, node: ir.Node) -> Replaced:
    """Fuse the RMSNormalization of x less its mean, as Cohere writes LayerNorm, to
    LayerNormalization.
    """
    centred = _made_by(node.inputs[0], "Sub")
    mean = None if centred is None else _made_by(centred.inputs[1], "ReduceMean")
    if centred is None or mean is None or mean.inputs[0] is not centred.inputs[0]:
        return []
    x, epsilon, axis = centred.inputs[0], *(node.attributes.get(n) for n in ("epsilon", "axis"))
    last = len(mean.inputs) > 1 and _number(mean.inputs[1]) == -1
    if not last or epsilon is None or (axis is not None and axis.as_int() != -1):
        return []
    norm = op.LayerNormalization(x, node.inputs[1], epsilon=epsilon.as_float())
    return [(node.outputs[0], norm)]


def _factor(x: Optional[ir.Value], read: Optional[ir.Value]) -> Optional[float]:
    """Return alpha if `read` is alpha x with a constant alpha, otherwise None."""
    if x is None or read is None:
        return None
    if read is x:
        return 1.0
    scaling = _made_by(read, "Mul")
    if scaling is None or x not in scaling.inputs:
        return None
    others = (value for value in scaling.inputs if value is not x)
    return next((_number(value) for value in others), None)


def _is_matrix(value: Optional[ir.Value]) -> TypeGuard[ir.Value]:
    """Return whether value is a constant matrix."""
    return value is not None and value.const_value is not None and len(value.const_value.shape) == 2


FUSIONS = {
    "MatMul": transposed_product,
    "Sigmoid": sigmoid_unit,
    "Softplus": softplus,
    "RMSNormalization": centred_norm,
    "Log": softplus,
    "Sqrt": unit_length,
}
