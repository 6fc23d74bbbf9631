"""The float32 form of model.pt and model.pt2 in half precision: weights and casts in float32.

https://docs.pytorch.org/docs/stable/torch.compiler_ir.html lists the operators of model.pt2.
"""

from functools import partial
from pathlib import Path
from typing import Any, Callable, Optional, Tuple

from posenc_export.runtime.artefact.manifest import Manifest
from posenc_export.runtime.artefact.rules import graph_file
from posenc_export.runtime.graphs.torch_files import nested, read_program, read_script, weights_of
from posenc_export.runtime.graphs.torch_graph import TorchGraph, limited

HALF_CODE, FLOAT_CODE = 5, 6  # ScalarType of torch


def load_float32(
    folder: Path, manifest: Manifest, described: Manifest, threads: Optional[int]
) -> TorchGraph:
    """Load the float32 form of an artefact of target torchscript or pt2. Raise ValueError if the
    file is damaged.

    Args:
        manifest, described: of the artefact; of the form, whose inputs have the same dtypes.
        threads: threads per operator; None for torch's own number.
    """
    load = {"torchscript": _script, "pt2": _program}[manifest.target]
    run = _with_float_inputs(load(folder / graph_file(manifest), manifest))
    return TorchGraph(limited(run, threads) if threads else run, described)


def _script(path: Path, _: Manifest) -> Any:
    module = read_script(path)
    graph = module.graph
    for node in graph.findAllNodes("prim::Constant"):
        value = node.output().toIValue()
        if _is_half(value):
            node.t_("value", value.float())
            node.output().inferTypeFrom(value.float())
        elif type(value) is int and value == HALF_CODE:
            _replace_dtypes(graph, node)
    return module.forward


def _replace_dtypes(graph: Any, constant: Any) -> None:
    """Make nodes that read a constant as a dtype read float32 instead of float16."""
    import torch

    for use in list(constant.output().uses()):
        if use.user.schema() == "(no schema)":
            continue
        taken = torch._C.parse_schema(use.user.schema()).arguments
        if use.offset < len(taken) and taken[use.offset].name == "dtype":
            with graph.insert_point_guard(use.user):
                use.user.replaceInput(use.offset, graph.insertConstant(FLOAT_CODE))


def _program(path: Path, manifest: Manifest) -> Any:

    program = read_program(path, manifest)
    module = program.graph_module
    for node in module.graph.nodes:
        node.args = tuple(map(_wide_dtype, node.args))
        node.kwargs = {name: _wide_dtype(value) for name, value in node.kwargs.items()}
    module.recompile()
    return nested(partial(module.forward, *map(_wide, weights_of(program))), manifest)


def _with_float_inputs(run: Callable[..., Any]) -> Callable[..., Tuple[Any, Any]]:
    """Return a function that casts inputs in half precision to float32."""

    def call(*arguments: Any) -> Any:
        *single, states = arguments
        return run(*map(_wide, single), [_wide(value) for value in states])

    return call


def _wide(value: Any) -> Any:
    """Cast a tensor in half precision to float32."""
    return value.float() if _is_half(value) else value


def _wide_dtype(value: Any) -> Any:
    import torch

    return torch.float32 if value is torch.float16 else value


def _is_half(value: Any) -> bool:
    import torch

    return isinstance(value, torch.Tensor) and value.dtype is torch.float16
