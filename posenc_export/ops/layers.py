"""Marks of layers, by which a trace needs one node for each further layer of a kind."""

import torch
from torch import Tensor, library

from posenc_export.ops.graph import DOMAIN

BEGIN, END = "begin", "end"  # of the first layer of a kind
AGAIN = "again"  # stands for a further one
NAME = "Layer"  # of a mark in an ONNX graph
library.define("posenc_layers::edge", "(Tensor x, str part, str name) -> Tensor")
EDGE = torch.ops.posenc_layers.edge.default  # x, at which a layer begins or ends, or is left out
library.impl("posenc_layers::edge", "CompositeExplicitAutograd", lambda x, part, name: x.clone())


@library.register_fake("posenc_layers::edge")
def _(x: Tensor, part: str, name: str) -> Tensor:
    return x.new_empty(x.shape)


def layer(part: str, name: str, values: list[Tensor], like: list[Tensor]) -> list[Tensor]:
    """Mark a layer in the trace of a semantic graph, which is to be completed (export/trace.py).

    Args:
        part: BEGIN, END or AGAIN.
        name: of the first layer of its kind.
        values: what the layer reads, with its weights behind its arguments; at its end, its
            results.
        like: tensors with the shapes and dtypes of those that are returned.
    """
    kinds = [(value.dtype, list(value.shape)) for value in like]
    return list(
        torch.onnx.ops.symbolic_multi_out(
            f"{DOMAIN}::{NAME}",
            values,
            {"part": part, "name": name},
            dtypes=[dtype for dtype, _ in kinds],
            shapes=[shape for _, shape in kinds],
            version=1,
        )
    )
