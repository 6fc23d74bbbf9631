"""Traces without a pass that takes two thirds of their time and mostly changes no operator.

To decompose operators that ONNX lacks, torch.onnx.export runs a traced program again, twice. A
program that has none of them is left as it is: its graph has the same nodes under other names,
which tests/export/test_quick_traces.py checks. Tests whose claim does not depend on names, or on
what another process writes, ask for the fixture `quick_traces`.
"""

import functools
import operator
from typing import Any, Dict, Optional, Set, Tuple

import torch
from torch._export import utils
from torch.onnx._internal.exporter import _decomp, _fx_passes

COMPUTED = {  # from sizes, or items of a tuple
    getattr(operator, name)
    for name in ("getitem", "add", "sub", "mul", "floordiv", "eq", "ne", "lt", "le", "gt", "ge")
} | {torch.sym_max, torch.sym_min, torch.sym_not}
CAST = torch.ops.aten.to.dtype
as_exporter = _fx_passes.decompose_with_registry


def decomposed(
    program: torch.export.ExportedProgram, registry: Any
) -> torch.export.ExportedProgram:
    if unfinished(program, registry):
        return as_exporter(program, registry)
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
            if not known or _decomposes(node.target, registry) or node.target._schema.is_mutable:
                return str(node.target)
    return None


def _decomposes(operation: torch._ops.OpOverload, registry: Any) -> bool:
    registered, table = _tables(registry)
    preserved = operation in registered and utils._check_valid_to_preserve(operation)
    return operation in table or operation._can_decompose() and not preserved


@functools.cache
def _tables(registry: Any) -> Tuple[Set[Any], Dict[Any, Any]]:
    registered = set(_decomp.get_onnx_implemented_overloads(registry))
    return registered, _decomp.create_onnx_friendly_decomposition_table(registered)
