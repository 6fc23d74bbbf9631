"""Programs of torch.export and TorchScript, called with arrays by name as graphs in ONNX are."""

import re
from dataclasses import replace
from pathlib import Path
from typing import Any, Dict, List, Mapping, Set

import numpy as np
import torch
from torch.utils import _pytree as pytree

from posenc_export.auditing.graph import Arrays
from posenc_export.auditing.inputs import HEADS, MEANINGS, Value
from posenc_export.runtime.graphs.quiet import quiet
from posenc_export.runtime.session.errors import RUN_ERRORS, GraphError
from posenc_export.shared.refusal import refusal

EXPORTED = """program = torch.export.load(path)
module, spec = program.module(check_guards=False), program.call_spec.in_spec"""
SCRIPTED = """module = torch.jit.load(path).eval()
spec = pytree.tree_flatten(({arguments!r}, {{}}))[1]"""


class Program:
    """A program on the CPU: of torch.export (.pt2) or TorchScript. Buffers that a program changes,
    such as static caches, are caches: an input that is written to the buffer before a call, and an
    output that is read after it. Attributes: as for Graph.
    """

    code = """import torch
from torch.utils import _pytree as pytree

{load}
given = {given!r}
names = {names!r}
buffers, changed = dict(module.named_buffers()), {changed!r}


def run(inputs):
    for name in changed:
        buffers[name].copy_(torch.from_numpy(inputs[name]))
    flat = [torch.from_numpy(inputs[name].copy()) if name in inputs else name for name in given]
    arguments, named = pytree.tree_unflatten(flat, spec)
    with torch.no_grad():
        results = pytree.tree_leaves(module(*arguments, **named))
    arrays = [value.numpy() for value in results if isinstance(value, torch.Tensor)]
    return dict(zip(names, arrays)) | {{name + "_out": buffers[name].numpy() for name in changed}}
"""

    def __init__(self, path: Path) -> None:
        self.operators: Set[str] = set()
        self.unread: Set[str] = set()
        self.buffers: Dict[str, torch.Tensor] = {}
        exported = path.suffix == ".pt2"
        try:
            with quiet(DeprecationWarning, FutureWarning):  # torch.jit warns at every call
                loaded: Any = torch.export.load(path) if exported else torch.jit.load(path)
        except (RuntimeError, ValueError, KeyError, OSError) as error:
            line = (str(error).strip().splitlines() or [type(error).__name__])[0]
            rule = f"a program that torch.{'export' if exported else 'jit'}.load reads"
            raise refusal("audit", rule, f"{path}: {line}", "give another file") from None
        weights = loaded.state_dict if exported else loaded.state_dict()
        dtypes = [weight.dtype for weight in weights.values()]
        half = dtypes.count(torch.float16) > dtypes.count(torch.float32)
        self.precision = "float16" if half else "float32"
        (self._of_export if exported else self._of_script)(loaded)
        names = [value.name for value in self.outputs]
        known = {"load": self.load, "given": self.given, "changed": [*self.buffers]}
        self.code = self.code.format(names=names, **known)
        for name, buffer in self.buffers.items():
            value = Value(name, str(buffer.dtype).removeprefix("torch."), tuple(buffer.shape))
            self.inputs.append(value)
            self.outputs.append(replace(value, name=f"{name}_out"))

    def _of_export(self, exported: Any) -> None:
        self.module, self.spec = exported.module(check_guards=False), exported.call_spec.in_spec
        self.load, buffers = EXPORTED, dict(self.module.named_buffers())
        self.buffers = {name: buffers[name] for name in _changed(exported)}
        nodes = {node.name: node for node in exported.graph.nodes}
        self.given: List[Any] = list(exported.graph_signature.user_inputs)
        self.inputs = [_value(name, nodes[name]) for name in self.given if name in nodes]
        names = exported.graph_signature.user_outputs
        self.outputs = [_value(str(name), nodes[name]) for name in names if name in nodes]

    def _of_script(self, module: Any) -> None:
        self.module, (_, *arguments) = module.eval(), module.forward.schema.arguments
        nested = tuple(_leaves(argument.type, argument.name) for argument in arguments)
        self.given, self.spec = pytree.tree_flatten((nested, {}))
        self.load = SCRIPTED.format(arguments=nested)
        dtype = self.precision
        self.inputs = [_guessed(name, dtype) for name in self.given]
        outputs = pytree.tree_leaves(_leaves(module.forward.schema.returns[0].type, "output"))
        whole = Value("output", dtype, ("batch", "sequence", None))
        caches = [Value(name, dtype, ("batch", HEADS[0], "total", HEADS[1])) for name in outputs]
        self.outputs = [whole, *caches[1:]]

    def run(self, feeds: Mapping[str, np.ndarray]) -> Arrays:
        """Run the program. Raise GraphError if it fails."""
        flat = [torch.from_numpy(feeds[name].copy()) if name in feeds else name
                for name in self.given]  # fmt: skip
        assert self.spec is not None
        arguments, named = pytree.tree_unflatten(flat, self.spec)
        try:
            with torch.no_grad():
                for name, buffer in self.buffers.items():
                    buffer.copy_(torch.from_numpy(feeds[name]))
                results = pytree.tree_leaves(self.module(*arguments, **named))
        except (*RUN_ERRORS, AssertionError) as error:
            raise GraphError(error) from error
        arrays = [np.asarray(value.numpy()) for value in results if isinstance(value, torch.Tensor)]
        arrays += [buffer.numpy().copy() for buffer in self.buffers.values()]
        return dict(zip([value.name for value in self.outputs], arrays, strict=True))


def _value(name: str, node: Any) -> Value:
    """Return an input or output; sizes that torch.export left open are names."""
    tensor = node.meta["val"]
    axes = tuple(size if isinstance(size, int) else str(size) for size in tensor.shape)
    return Value(name, str(tensor.dtype).removeprefix("torch."), axes)


def _changed(exported: Any) -> List[str]:
    signature = exported.graph_signature
    names = [*signature.buffers_to_mutate.values()]
    for node in exported.graph.nodes:
        schema = getattr(node.target, "_schema", None)
        if schema is None or not schema.is_mutable:
            continue
        value = node.args[0]
        while value.op == "call_function" and value.target._schema.returns[0].alias_info:
            value = value.args[0]  # a view
        names.append(signature.inputs_to_buffers.get(value.name, ""))
    return [name for name in dict.fromkeys(names) if name]


def _leaves(kind: Any, name: str) -> Any:
    """Return the names of the tensors of a type of TorchScript, nested as the type is."""
    if kind.kind() == "OptionalType":
        return _leaves(kind.getElementType(), name)
    if kind.kind() == "TupleType":
        return tuple(_leaves(part, f"{name}.{i}") for i, part in enumerate(kind.elements()))
    if kind.kind() != "TensorType":
        rule = "a TorchScript module with tensors and tuples of tensors"
        raise refusal("audit", rule, f"{name}: {kind}", "wrap it in a module that takes these")
    return name


def _guessed(name: str, dtype: str) -> Value:
    """Return an input of TorchScript, which keeps neither dtypes nor shapes: what a known name
    means in transformers, otherwise a cache [B,H,P,D].
    """
    patterns = {meaning: pattern for meaning, (_, pattern) in MEANINGS.items()}
    if re.fullmatch(patterns["hidden_states"], name.lower()):
        return Value(name, dtype, ("batch", "sequence", None))
    if any(re.fullmatch(pattern, name.lower()) for pattern in patterns.values()):
        return Value(name, "int64", ("batch", "sequence"))
    return Value(name, dtype, ("batch", HEADS[0], "past", HEADS[1]))
