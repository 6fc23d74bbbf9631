"""Programs of torch.export, called with arrays by name as graphs in ONNX are."""

import io
import logging
from dataclasses import replace
from pathlib import Path
from typing import Any, Mapping

import numpy as np
import torch

from posenc_export.auditing.facts import Claim, Facts
from posenc_export.auditing.graph import Arrays, source_of
from posenc_export.auditing.inputs import Interface, Value
from posenc_export.export.onnx_program import written_by
from posenc_export.runtime.artefact import archive, pt2_archive
from posenc_export.runtime.graphs.quiet import quiet
from posenc_export.runtime.session.errors import RUN_ERRORS, GraphError
from posenc_export.shared.foreign import FOREIGN, brief, explained
from posenc_export.shared.refusal import refusal


def torch_program(loaded: Any, names: list[str], changed: list[str], halves: list[str]) -> Any:
    """Take a program of torch.export. Return its module, and run. names: of outputs; changed:
    buffers that a call writes; halves: inputs in bfloat16, which numpy lacks.
    """
    import torch
    from torch.utils import _pytree as pytree

    module, spec = loaded.module(check_guards=False), loaded.call_spec.in_spec
    given = list(loaded.graph_signature.user_inputs)
    buffers = dict(module.named_buffers())

    def run(inputs: Mapping[str, np.ndarray]) -> Arrays:
        for name in changed:
            buffers[name].copy_(torch.from_numpy(inputs[name]))
        flat = [tensor(inputs[name], name) if name in inputs else name for name in given]
        arguments, named = pytree.tree_unflatten(flat, spec)
        with torch.no_grad():
            results = pytree.tree_leaves(module(*arguments, **named))
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
    """A program of torch.export (.pt2) on the CPU. Buffers that it changes, such as static caches,
    are caches: an input that is written to the buffer before a call, and an output that is read
    after it. Attributes: as for Graph.
    """

    needs = "torch"
    rounded = ""

    def __init__(self, path: Path) -> None:
        self.operators: set[str] = set()
        self.unread: set[str] = set()
        loaded = _checked(path)
        weights = loaded.state_dict.values()
        dtypes = [str(weight.dtype).removeprefix("torch.") for weight in weights]
        self.precision = max(("float32", "float16", "bfloat16"), key=dtypes.count)
        nodes, signature = {node.name: node for node in loaded.graph.nodes}, loaded.graph_signature
        ends = (signature.user_inputs, map(str, signature.user_outputs))
        self.inputs, self.outputs = (
            [_value(name, nodes[name]) for name in part if name in nodes] for part in ends
        )
        changed = _changed(loaded)
        names = [value.name for value in self.outputs] + [f"{name}_out" for name in changed]
        halves = [value.name for value in self.inputs if value.dtype == "bfloat16"]
        with explained("audit: expected a program that torch can call", "give another file"):
            module, self._run = torch_program(loaded, names, changed, halves)
        code = source_of(torch_program, "torch.export.load(path)", names, changed, halves)
        self.code = f"import torch\n\n\n{code}"
        buffers = dict(module.named_buffers())
        for name in changed:
            dtype = str(buffers[name].dtype).removeprefix("torch.")
            self.inputs.append(Value(name, dtype, tuple(buffers[name].shape)))
            self.outputs.append(replace(self.inputs[-1], name=f"{name}_out"))

    def run(self, feeds: Mapping[str, np.ndarray]) -> Arrays:
        """Run the program. Raise GraphError if it fails."""
        try:
            return dict(self._run(feeds))
        except (*RUN_ERRORS, AssertionError) as error:
            raise GraphError(error) from error

    def prove(self, interface: Interface, facts: Facts) -> list[Claim]:
        """Prove nothing: only graphs in ONNX are proved."""
        return []


def _checked(path: Path) -> Any:
    """Load what runtime/artefact/pt2_archive.py accepts, not the file: torch reads the entries that
    it checked.
    """
    # torch.export logs tracebacks of errors that are handled here.
    errors: tuple[type[Exception], ...] = (*FOREIGN, torch._export.verifier.SpecViolationError)
    silent = quiet(DeprecationWarning, FutureWarning, logger="torch.export", level=logging.CRITICAL)
    try:
        with path.open("rb") as stream, silent:
            entries = archive.read_checked(stream, pt2_archive.is_tensor)
            read = io.BytesIO(archive.packed(pt2_archive.without_places(entries)))
            return torch.export.load(read)
    except errors as error:
        rule = "a program of torch.export that runs operators of torch alone"
        got = f"{path}: {brief(error)}"
        remedy = "export the model to ONNX or by torch.export"
        raise refusal("audit", rule, got, remedy) from None


def _value(name: str, node: Any) -> Value:
    """Return an input or output; sizes that torch.export left open are names."""
    tensor = node.meta["val"]
    axes = tuple(size if isinstance(size, int) else str(size) for size in tensor.shape)
    return Value(name, str(tensor.dtype).removeprefix("torch."), axes)


def _changed(exported: Any) -> list[str]:
    """Return the names of the buffers that a program writes."""
    signature = exported.graph_signature
    written = filter(None, map(written_by, exported.graph.nodes))
    names = [signature.inputs_to_buffers.get(value.name, "") for value in written]
    every = dict.fromkeys([*signature.buffers_to_mutate.values(), *names])
    return [name for name in every if name]
