"""Target `ort`: fusions of standard nodes outside attention for which ONNX Runtime has fewer or
cheaper nodes. Nodes that match no pattern are unchanged.

A sum and the norm after it stay two nodes: on a CPU, SkipSimplifiedLayerNormalization of ONNX
Runtime 1.31 takes 1.2 to 2.7 times as long as Add and RMSNormalization at widths of 576 and more,
SkipLayerNormalization 1.7 to 7 times as long as Add and LayerNormalization. ONNX Runtime itself
fuses BiasGelu when it loads the graph. Gate and up stay two products: one product followed by Split
takes 0.96 to 1.03 of their time (decoders of 1 to 134 M parameters).
"""

from typing import Optional, TypeGuard

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
    is x for large x.
    """
    x, users = node.inputs[0], list(node.outputs[0].uses())
    choice = users[0].node if len(users) == 1 else node
    if choice.op_type != "Where" or choice.inputs[1] is not x:
        return []
    large = None if choice.inputs[0] is None else choice.inputs[0].producer()
    if large is None or large.op_type != "Greater" or large.inputs[0] is not x:
        return []
    return [(choice.outputs[0], op.Softplus(x))]


def centred_norm(op: Builder, node: ir.Node) -> Replaced:
    """Fuse the RMSNormalization of x less its mean, as Cohere writes LayerNorm, to
    LayerNormalization.
    """
    centred = node.inputs[0].producer() if node.inputs[0] is not None else None
    if centred is None or centred.op_type != "Sub" or centred.inputs[1] is None:
        return []
    x, mean = centred.inputs[0], centred.inputs[1].producer()
    if mean is None or mean.op_type != "ReduceMean" or mean.inputs[0] is not x:
        return []
    axes = mean.inputs[1].const_value if len(mean.inputs) > 1 and mean.inputs[1] else None
    epsilon, axis = (node.attributes.get(name) for name in ("epsilon", "axis"))
    last = axes is not None and axes.numpy().tolist() == [-1]
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
    scaling = read.producer()
    if scaling is None or scaling.op_type != "Mul" or x not in scaling.inputs:
        return None
    others = (value for value in scaling.inputs if value is not None and value is not x)
    factor = next((value.const_value for value in others), None)
    return None if factor is None or len(factor.shape) else float(factor.numpy())


def _is_matrix(value: Optional[ir.Value]) -> TypeGuard[ir.Value]:
    """Return whether value is a constant matrix."""
    return value is not None and value.const_value is not None and len(value.const_value.shape) == 2


FUSIONS = {
    "MatMul": transposed_product,
    "Sigmoid": sigmoid_unit,
    "Softplus": softplus,
    "RMSNormalization": centred_norm,
}
