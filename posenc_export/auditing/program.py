"""Programs of torch.export, called with arrays by name as graphs in ONNX are."""

from pathlib import Path
from typing import Any, List, Mapping, Set

import numpy as np
import torch
from torch.utils import _pytree as pytree

from posenc_export.auditing.graph import Arrays
from posenc_export.auditing.inputs import Value
from posenc_export.runtime.session.errors import RUN_ERRORS, GraphError
from posenc_export.shared.refusal import refusal

SUFFIX = ".pt2"


class Program:
    """A program of torch.export on the CPU.

    Attributes: as for Graph.
    """

    def __init__(self, path: Path) -> None:
        try:
            exported = torch.export.load(path)
        except (RuntimeError, ValueError, KeyError, OSError) as error:
            line = (str(error).strip().splitlines() or [type(error).__name__])[0]
            rule = "a program that torch.export.load reads"
            raise refusal("audit", rule, f"{path}: {line}", "give another file") from None
        self.module, self.spec = exported.module(check_guards=False), exported.call_spec.in_spec
        nodes = {node.name: node for node in exported.graph.nodes}
        self.given: List[Any] = list(exported.graph_signature.user_inputs)
        self.inputs = [_value(name, nodes[name]) for name in self.given if name in nodes]
        names = exported.graph_signature.user_outputs
        self.outputs = [_value(str(name), nodes[name]) for name in names if name in nodes]
        self.operators: Set[str] = set()
        self.unread: Set[str] = set()
        dtypes = [weight.dtype for weight in exported.state_dict.values()]
        half = dtypes.count(torch.float16) > dtypes.count(torch.float32)
        self.precision = "float16" if half else "float32"

    def run(self, feeds: Mapping[str, np.ndarray]) -> Arrays:
        """Run the program. Raise GraphError if it fails."""
        flat = [torch.from_numpy(feeds[name].copy()) if name in feeds else name
                for name in self.given]  # fmt: skip
        assert self.spec is not None
        arguments, named = pytree.tree_unflatten(flat, self.spec)
        try:
            with torch.no_grad():
                results = pytree.tree_leaves(self.module(*arguments, **named))
        except (*RUN_ERRORS, AssertionError) as error:
            raise GraphError(error) from error
        arrays = [np.asarray(value.numpy()) for value in results if isinstance(value, torch.Tensor)]
        return dict(zip([value.name for value in self.outputs], arrays, strict=True))


def _value(name: str, node: Any) -> Value:
    """Return an input or output; sizes that torch.export left open are names."""
    tensor = node.meta["val"]
    axes = tuple(size if isinstance(size, int) else str(size) for size in tensor.shape)
    return Value(name, str(tensor.dtype).removeprefix("torch."), axes)
