"""Programs of torch.export and TorchScript, called with arrays by name as graphs in ONNX are."""

import io
import logging
import re
from dataclasses import replace
from pathlib import Path
from typing import Any, List, Mapping, Set, Tuple, Type

import numpy as np
import torch
from torch.utils import _pytree as pytree

from posenc_export.auditing.facts import Claim, Facts
from posenc_export.auditing.graph import Arrays, source_of
from posenc_export.auditing.inputs import HEADS, MEANINGS, Interface, Value
from posenc_export.export.onnx_program import written_by
from posenc_export.runtime.artefact import archive, pt2_archive, script_archive
from posenc_export.runtime.graphs.quiet import quiet
from posenc_export.runtime.session.errors import RUN_ERRORS, GraphError
from posenc_export.shared.foreign import FOREIGN, brief, explained
from posenc_export.shared.refusal import refusal


def torch_program(
    loaded: Any, scripted: Any, names: List[str], changed: List[str], halves: List[str]
) -> Any:
    """Take a program of torch.export, or one of TorchScript with nested names of its arguments.
    Return its module, and run. names: of outputs; changed: buffers that a call writes; halves:
    inputs in bfloat16, which numpy lacks.
    """
    import torch
    from torch.utils import _pytree as pytree

    if scripted is None:
        module, spec = loaded.module(check_guards=False), loaded.call_spec.in_spec
        given = list(loaded.graph_signature.user_inputs)
    else:
        module, (given, spec) = loaded.eval(), pytree.tree_flatten((scripted, {}))
    call = module if scripted is None else module.forward  # without hooks of TorchScript
    buffers = dict(module.named_buffers())

    def run(inputs: Mapping[str, np.ndarray]) -> Arrays:
        for name in changed:
            buffers[name].copy_(torch.from_numpy(inputs[name]))
        flat = [tensor(inputs[name], name) if name in inputs else name for name in given]
        arguments, named = pytree.tree_unflatten(flat, spec)
        with torch.no_grad():
            results = pytree.tree_leaves(call(*arguments, **named))
        arrays = [array(value) for value in results if isinstance(value, torch.Tensor)]
        arrays += [array(buffers[name]).copy() for name in changed]
        return dict(zip(names, arrays, strict=True))

    def tensor(array: np.ndarray, name: str) -> Any:
        copied = torch.from_numpy(array.copy())
        return copied.bfloat16() if name in halves else copied

    def array(value: Any) -> np.ndarray:
        return (value.float() if value.dtype == torch.bfloat16 else value).numpy()

    return module, run


class Program:
    """A program on the CPU: of torch.export (.pt2) or TorchScript. Buffers that a program changes,
    such as static caches, are caches: an input that is written to the buffer before a call, and an
    output that is read after it. Attributes: as for Graph.
    """

    needs = "torch"
    rounded = ""

    def __init__(self, path: Path) -> None:
        self.operators: Set[str] = set()
        self.unread: Set[str] = set()
        loaded, exported = _checked(path)
        load = f"torch.{'export' if exported else 'jit'}.load"
        weights = loaded.state_dict if exported else loaded.state_dict()
        dtypes = [str(weight.dtype).removeprefix("torch.") for weight in weights.values()]
        self.precision = max(("float32", "float16", "bfloat16"), key=dtypes.count)
        self.inputs: List[Value]
        self.outputs: List[Value]
        changed, nested = _changed(loaded) if exported else [], None
        if exported:
            self._of_export(loaded)
        else:
            nested = self._of_script(loaded)
        names = [value.name for value in self.outputs] + [f"{name}_out" for name in changed]
        halves = [value.name for value in self.inputs if value.dtype == "bfloat16"]
        with explained("audit: expected a program that torch can call", "give another file"):
            module, self._run = torch_program(loaded, nested, names, changed, halves)
        code = source_of(torch_program, f"{load}(path)", nested, names, changed, halves)
        self.code = f"import torch\n\n\n{code}"
        buffers = dict(module.named_buffers())
        for name in changed:
            dtype = str(buffers[name].dtype).removeprefix("torch.")
            self.inputs.append(Value(name, dtype, tuple(buffers[name].shape)))
            self.outputs.append(replace(self.inputs[-1], name=f"{name}_out"))

    def _of_export(self, exported: Any) -> None:
        nodes = {node.name: node for node in exported.graph.nodes}
        signature = exported.graph_signature
        names = (signature.user_inputs, map(str, signature.user_outputs))
        self.inputs, self.outputs = (
            [_value(name, nodes[name]) for name in part if name in nodes] for part in names
        )

    def _of_script(self, module: Any) -> Any:
        """Return the nested names of the arguments."""
        _, *arguments = module.forward.schema.arguments
        nested = tuple(_leaves(argument.type, argument.name) for argument in arguments)
        dtype = self.precision
        self.inputs = [_guessed(name, dtype) for name in pytree.tree_leaves(nested)]
        outputs = pytree.tree_leaves(_leaves(module.forward.schema.returns[0].type, "output"))
        whole = Value("output", dtype, ("batch", "sequence", None))
        caches = [Value(name, dtype, ("batch", HEADS[0], "total", HEADS[1])) for name in outputs]
        self.outputs = [whole, *caches[1:]]
        return nested

    def run(self, feeds: Mapping[str, np.ndarray]) -> Arrays:
        """Run the program. Raise GraphError if it fails."""
        try:
            return dict(self._run(feeds))
        except (*RUN_ERRORS, AssertionError) as error:
            raise GraphError(error) from error

    def prove(self, interface: Interface, facts: Facts) -> List[Claim]:
        """Prove nothing: only graphs in ONNX are proved."""
        return []


def _checked(path: Path) -> Tuple[Any, bool]:
    """Load what runtime/artefact/pt2_archive.py and script_archive.py accept, not the file: torch
    reads the entries that they checked. Return it, and whether it is a program of torch.export.
    """
    # torch.jit warns at every call; torch.export logs tracebacks of errors that are handled here.
    errors: Tuple[Type[Exception], ...] = (*FOREIGN, torch._export.verifier.SpecViolationError)
    silent = quiet(DeprecationWarning, FutureWarning, logger="torch.export", level=logging.CRITICAL)
    try:
        with path.open("rb") as stream, silent:
            entries = archive.read_checked(stream, script_archive.is_tensor, compressed=True)
            if exported := any(name.endswith(f"/{pt2_archive.PROGRAM}") for name in entries):
                read = io.BytesIO(archive.packed(pt2_archive.without_places(entries)))
                return torch.export.load(read), exported
            read = io.BytesIO(archive.packed(script_archive.checked(entries)))
            loaded: Any = torch.jit.load(read)
            script_archive.check_graph(loaded.inlined_graph)
            return loaded, exported
    except errors as error:
        rule = "a program of torch.export or TorchScript that runs operators of torch alone"
        got = f"{path}: {brief(error)}"
        raise refusal("audit", rule, got, "give another file") from None


def _value(name: str, node: Any) -> Value:
    """Return an input or output; sizes that torch.export left open are names."""
    tensor = node.meta["val"]
    axes = tuple(size if isinstance(size, int) else str(size) for size in tensor.shape)
    return Value(name, str(tensor.dtype).removeprefix("torch."), axes)


def _changed(exported: Any) -> List[str]:
    """Return the names of the buffers that a program writes."""
    signature = exported.graph_signature
    written = filter(None, map(written_by, exported.graph.nodes))
    names = [signature.inputs_to_buffers.get(value.name, "") for value in written]
    every = dict.fromkeys([*signature.buffers_to_mutate.values(), *names])
    return [name for name in every if name]


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
