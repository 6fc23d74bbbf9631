"""Trace a module with torch.onnx.export, without those parts of it that change nothing.

In each call, torch.onnx.export builds its table of operators, and to decompose operators that the
table lacks, it runs the traced program twice more. Here the table is built once per process, and a
program without such operators is left as it is: its graph has the same nodes under other names.
Garbage is not collected meanwhile, since a trace allocates millions of objects. The functions of
torch are private: with a version that has others, torch.onnx.export runs unchanged.
"""

import contextlib
import functools
import gc
import operator
from importlib import import_module
from inspect import signature
from typing import Any, Iterator, Optional, Set, Tuple

import torch

from posenc_export.export.mutation import refuse_mutation
from posenc_export.runtime.graphs.quiet import quiet

EXPORTER = "torch.onnx._internal.exporter"
PRIVATE = {  # functions that are replaced or called, and their parameters
    f"{EXPORTER}._fx_passes:decompose_with_registry": ["exported_program", "registry"],
    f"{EXPORTER}._registration:ONNXRegistry.from_torchlib": ["opset_version"],
    f"{EXPORTER}._decomp:get_onnx_implemented_overloads": ["registry"],
    f"{EXPORTER}._decomp:create_onnx_friendly_decomposition_table": ["onnx_registered_ops"],
    "torch._export.utils:_check_valid_to_preserve": ["op_overload"],
}
DECOMPOSE, FROM_TORCHLIB, IMPLEMENTED, DECOMPOSITIONS, MAY_STAY = PRIVATE
COMPUTED = {  # from sizes, or items of a tuple
    getattr(operator, name)
    for name in ("getitem", "add", "sub", "mul", "floordiv", "eq", "ne", "lt", "le", "gt", "ge")
} | {torch.sym_max, torch.sym_min, torch.sym_not}
CAST = torch.ops.aten.to.dtype


def onnx_program(
    module: torch.nn.Module, arguments: Tuple[Any, ...], shapes: Any, opset: int
) -> torch.onnx.ONNXProgram:
    """Return the program of a module, not optimized. shapes: dynamic_shapes of torch.export.
    ValueError: the module mutates buffers or inputs.
    """
    # torch.onnx warns of deprecations inside itself, and logs that optional packages are not
    # installed; the resulting graph is checked instead.
    with quiet(Warning, logger="torch.onnx"), torch.no_grad(), _shortened(opset):
        program = torch.onnx.export(
            module,
            arguments,
            dynamo=True,
            dynamic_shapes=shapes,
            opset_version=opset,
            optimize=False,
            verbose=False,
        )
    assert program is not None and program.exported_program is not None
    refuse_mutation(program.exported_program)
    return program


@contextlib.contextmanager
def _shortened(opset: int) -> Iterator[None]:
    """Shorten torch.onnx.export within the context, which `quiet` lets one thread enter."""
    with contextlib.ExitStack() as restored:
        if gc.isenabled():
            gc.disable()
            restored.callback(gc.enable)
        if all(map(_is_known, PRIVATE)):
            registry, decompose = _registry(opset), _private(DECOMPOSE)
            for path, replacement in (
                (FROM_TORCHLIB, staticmethod(lambda opset_version: registry)),
                (DECOMPOSE, functools.partial(decomposed, decompose)),
            ):
                owner, name = _owner(path)
                restored.callback(setattr, owner, name, vars(owner)[name])
                setattr(owner, name, replacement)
        yield


def _owner(path: str) -> Tuple[Any, str]:
    """Return the module or class that has a private function, and the name of the function."""
    module, _, names = path.partition(":")
    *classes, name = names.split(".")
    return functools.reduce(getattr, classes, import_module(module)), name


def _private(path: str) -> Any:
    return getattr(*_owner(path))


def _is_known(path: str) -> bool:
    """Return whether torch has a private function with the parameters in PRIVATE."""
    try:
        return list(signature(_private(path)).parameters) == PRIVATE[path]
    except (ImportError, AttributeError):
        return False


@functools.cache
def _registry(opset: int) -> Any:
    return _private(FROM_TORCHLIB)(opset_version=opset)


def decomposed(
    decompose: Any, program: torch.export.ExportedProgram, registry: Any
) -> torch.export.ExportedProgram:
    """Return a program with operators of ONNX alone; `decompose` is torch's function."""
    if unfinished(program, registry):
        return decompose(program, registry)  # type: ignore[no-any-return]
    for node in list(program.graph.nodes):
        if node.target is CAST and node.args[0].meta["val"].dtype == node.args[1]:
            node.replace_all_uses_with(node.args[0])
            program.graph.erase_node(node)
        elif node.target is CAST:
            node.target = torch.ops.aten._to_copy.default
            node.args, node.kwargs = node.args[:1], {"dtype": node.args[1]}
    program.graph.eliminate_dead_code()
    return program


def unfinished(program: torch.export.ExportedProgram, registry: Any) -> Optional[str]:
    """Return the first operator, except for CAST, that is decomposed, writes to a tensor, or has a
    graph of its own; None without one.
    """
    for node in program.graph.nodes:
        if node.op == "get_attr" or node.target is CAST and "output" in {u.op for u in node.users}:
            return str(node.target)
        if node.op == "call_function" and node.target not in COMPUTED | {CAST}:
            known = isinstance(node.target, torch._ops.OpOverload)
            if not known or node.target._schema.is_mutable or _decomposes(node.target, registry):
                return str(node.target)
    return None


@functools.cache
def _decomposes(operation: torch._ops.OpOverload, registry: Any) -> bool:
    implemented = _implemented(registry)
    if operation in implemented and _private(MAY_STAY)(operation):
        return False
    return operation._can_decompose() or operation in _private(DECOMPOSITIONS)(implemented)


@functools.cache
def _implemented(registry: Any) -> Set[Any]:
    return set(_private(IMPLEMENTED)(registry))
