"""Trace a module with torch.export, and translate the program with torch.onnx.export, without steps
of it that only take time.

Each call of torch.onnx.export builds a table of operators, and calls run_decompositions for those
that the table lacks, which runs the program twice more. Here the table is built once per process,
and the usual operators that it lacks are replaced one by one. run_decompositions is only called if
others are left. The graph has the same nodes under other names.
"""

import contextlib
import functools
import operator
from functools import partial
from importlib import import_module
from typing import Any, Callable, Collection, ContextManager
from unittest import mock

import torch
from torch.export import ExportedProgram

from posenc_export.reading.tracing import short_traces
from posenc_export.runtime.graphs.quiet import quiet

COMPUTED = {  # functions of Python on sizes, and items of tuples
    getattr(operator, name)
    for name in ("getitem", "add", "sub", "mul", "floordiv", "eq", "ne", "lt", "le", "gt", "ge")
} | {torch.sym_max, torch.sym_min, torch.sym_not}
# A check of a dtype that the program itself determines.
CHECK = torch.ops.aten._assert_tensor_metadata.default
CAST = torch.ops.aten.to.dtype
SIZE = torch.ops.aten.sym_size.int
REVERSED = {torch.ops.aten.rsub.Scalar, torch.ops.aten.rsub.Tensor}
RESHAPED = {
    torch.ops.aten.flatten.using_ints,
    torch.ops.aten.unflatten.int,
    torch.ops.aten.reshape.default,
}
Sizes = dict[Any, tuple[torch.fx.Node, int]]  # by symbol, an input and its axis with this size


def refuse_mutation(program: ExportedProgram, caches: Collection[Any] = ()) -> None:
    """Refuse a program that mutates buffers or inputs. ONNX export would drop the mutation
    silently, and a session could not rewind such a state.

    Args:
        caches: names of inputs that may be written in place.

    Raises:
        ValueError: the program mutates a buffer or another input; the message names it.
    """
    signature = program.graph_signature
    mutated = [*signature.buffers_to_mutate.values(), *signature.user_inputs_to_mutate.values()]
    # Programs that are not functionalized mutate by in-place operations.
    for node in program.graph.nodes:
        written = written_by(node)
        if written is not None and written.op == "placeholder" and written.name not in caches:
            mutated.append(signature.inputs_to_buffers.get(written.name, written.name))
    if mutated:
        raise ValueError(
            "export: expected state as inputs and outputs of the graph, got mutation of "
            f"{', '.join(mutated)}; return the new value instead"
        )


def written_by(node: torch.fx.Node) -> torch.fx.Node | None:
    """Return the tensor, behind views, that an operation writes in place; None for others."""
    if node.op != "call_function" or not getattr(
        getattr(node.target, "_schema", None), "is_mutable", False
    ):
        return None
    return _viewed(node.args[0])  # type: ignore[arg-type]


def _viewed(node: torch.fx.Node) -> torch.fx.Node:
    """Return the tensor that a chain of views starts from."""
    while node.op == "call_function":
        returns = getattr(getattr(node.target, "_schema", None), "returns", [])
        if not returns or returns[0].alias_info is None:
            break
        node = node.args[0]  # type: ignore[assignment]
    return node


def onnx_program(
    module: torch.nn.Module, arguments: tuple[Any, ...], shapes: Any, opset: int
) -> torch.onnx.ONNXProgram:
    """Return the program of a module, not optimized. shapes: dynamic_shapes of torch.export.
    ValueError: the module mutates buffers or inputs.
    """
    # torch.onnx warns of deprecations inside itself, and logs that optional packages are not
    # installed; the resulting graph is checked instead.
    with quiet(Warning, logger="torch.onnx"), torch.no_grad(), short_traces():
        program = torch.export.export(module, arguments, dynamic_shapes=shapes)
        refuse_mutation(program)
        with _shortened(program, opset):
            made = torch.onnx.export(
                program, dynamo=True, opset_version=opset, optimize=False, verbose=False
            )
    assert made is not None
    return made


def _shortened(program: ExportedProgram, opset: int) -> ContextManager[Any]:
    """Shorten torch.onnx.export of a program within the context, which only one thread enters at a
    time (`quiet`). Versions of torch that build the table elsewhere run unchanged.
    """
    try:
        builder = import_module("torch.onnx._internal.exporter._registration").ONNXRegistry
        table = _table(builder, opset)
    except (ImportError, AttributeError):
        return contextlib.nullcontext()
    whole = program.run_decompositions
    program.run_decompositions = partial(decomposed, program, table, whole)  # type: ignore[method-assign]
    return mock.patch.object(builder, "from_torchlib", lambda *_, **__: table)


@functools.cache
def _table(builder: Any, opset: int) -> Any:
    """Return torch's table of operators, with functions that write their nodes."""
    table = builder.from_torchlib(opset_version=opset)
    # As in a program that torch decomposed: in a view, a size of 0 does not copy the input's size.
    table.functions["aten::reshape"] = table.functions["aten::view"]
    return table


def decomposed(
    program: ExportedProgram, table: Any, whole: Callable[..., ExportedProgram], *how: Any
) -> ExportedProgram:
    """Return a program that only has operators of a table. whole: its run_decompositions, which is
    called with `how` if needed.
    """
    if unfinished(program, table):
        return whole(*how)
    sizes = _sizes(program)
    for node in list(program.graph.nodes):
        if node.target is CAST and node.args[0].meta["val"].dtype == node.args[1]:
            node.replace_all_uses_with(node.args[0])
            program.graph_signature.replace_all_uses(node.name, node.args[0].name)
            program.graph.erase_node(node)
        elif node.target is CAST:
            node.target = torch.ops.aten._to_copy.default
            node.args, node.kwargs = node.args[:1], {"dtype": node.args[1]}
        elif node.target in REVERSED:
            node.target, node.args = torch.ops.aten.sub.Tensor, node.args[::-1]
        elif node.target in RESHAPED and _is_replaced(node, sizes):
            with program.graph.inserting_before(node):
                shape = [_as_argument(size) for size in _shape(node, sizes)]
            # No view: torch runs the program once more, with the strides of values that are cast.
            node.target, node.args = torch.ops.aten.reshape.default, (node.args[0], shape)
    program.graph.eliminate_dead_code()
    return program


def unfinished(program: ExportedProgram, table: Any) -> str | None:
    """Return the first operator that `decomposed` leaves to torch, or None: one that the table
    lacks, that writes to a tensor, or that has a graph of its own.
    """
    sizes = _sizes(program)
    for node in program.graph.nodes:
        stays = node.op != "call_function" or _stays(node.target, table)
        is_finished = stays or _is_replaced(node, sizes)
        if node.op == "get_attr" or not is_finished:
            return str(node.target)
    return None


def _is_replaced(node: torch.fx.Node, sizes: Sizes) -> bool:
    """Return whether `decomposed` replaces an operator."""
    if node.target in RESHAPED:
        return _shape(node, sizes).count(-1) < 2
    return node.target is CAST or (node.target in REVERSED and len(node.args) == 2)


def _sizes(program: ExportedProgram) -> Sizes:
    """Return for each dynamic size the first input that has it."""
    sizes: Sizes = {}
    for node in program.graph.nodes:
        if node.op == "placeholder" and isinstance(node.meta.get("val"), torch.Tensor):
            for axis, size in enumerate(node.meta["val"].shape):
                if isinstance(size, torch.SymInt):
                    sizes.setdefault(size.node.expr, (node, axis))
    return sizes


def _shape(node: torch.fx.Node, sizes: Sizes) -> list[int | tuple[torch.fx.Node, int]]:
    """Return the shape of a tensor; -1 stands for a dynamic size that no input has."""
    return [
        sizes.get(size.node.expr, -1) if isinstance(size, torch.SymInt) else size
        for size in node.meta["val"].shape
    ]


def _as_argument(size: int | tuple[torch.fx.Node, int]) -> int | torch.fx.Node:
    """Return a size as an argument of a node. The size of an input becomes the node that reads it,
    which is inserted if the graph has none.
    """
    if isinstance(size, int):
        return size
    value, axis = size
    for node in value.users:
        if node.target is SIZE and node.args == size:
            return node
    node = value.graph.call_function(SIZE, size)
    node.meta["val"] = value.meta["val"].shape[axis]
    return node


@functools.cache
def _stays(operation: Any, table: Any) -> bool:
    """Return whether an operator has a function in a table, and writes to no tensor."""
    if operation in COMPUTED or operation is CHECK:  # checks are left out of the graph
        return True
    mutable = getattr(getattr(operation, "_schema", None), "is_mutable", True)
    return not mutable and bool(table.is_registered(operation))
