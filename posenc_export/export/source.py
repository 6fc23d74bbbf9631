"""A model on its way to any number of targets: cast once a dtype, traced once a calling convention."""

import copy
import logging
import warnings
from typing import Any, Collection, Dict, Optional, Tuple, Union

import onnx_ir as ir
import torch

from posenc_export import semantic
from posenc_export.export.describe import Model, dtype_of, trace_inputs
from posenc_export.export.fewer_bits import rounded
from posenc_export.export.signatures import wrap
from posenc_export.models.own import as_model
from posenc_export.runtime.manifest import Manifest

OPSET = 23  # of the trace; what it holds means the same in later ones


class Source:
    """A model in one dtype and its semantic graphs.

    Args:
        model: in eval mode; its weights must not change any more.
    """

    def __init__(self, model: Model) -> None:
        self.model = model
        self._graphs: Dict[str, ir.Model] = {}

    def semantic(self, manifest: Manifest) -> ir.Model:
        """A copy of the graph with semantic nodes in the manifest's calling convention, to be lowered.

        Raises:
            ValueError: a module that mutates buffers or inputs.
        """
        if manifest.signature not in self._graphs:
            self._graphs[manifest.signature] = _traced(self.model, manifest)
        return self._graphs[manifest.signature].clone()


class Sources:
    """The sources of one model by dtype and format of weights.

    Args:
        model: float32, of this package or a module around one; left as it is, and as it is for as long as this is used.

    Raises:
        ValueError: as models.own.as_model.
    """

    def __init__(self, model: Union[Model, torch.nn.Module]) -> None:
        self.model = as_model(model)
        self._made: Dict[Tuple[str, Optional[str]], Source] = {}

    def of(self, dtype: str, weights: Optional[str] = None) -> Source:
        """The model in a dtype, in eval mode; with its weights rounded to a format of fewer_bits where one is given."""
        if (dtype, weights) not in self._made:
            model = in_dtype(self.model, dtype)
            self._made[dtype, weights] = Source(model if weights is None else rounded(model, weights))
        return self._made[dtype, weights]


def in_dtype(model: Model, dtype: str) -> Model:
    """The model in a dtype and in eval mode: itself where it is, else a copy."""
    ready = dtype_of(model) == dtype and not model.training
    return model if ready else copy.deepcopy(model).to(getattr(torch, dtype)).eval()


def _traced(model: Model, manifest: Manifest) -> ir.Model:
    module = wrap(model, manifest.signature)
    arguments, shapes = trace_inputs(manifest)
    logging.getLogger("torch.onnx").setLevel(logging.ERROR)  # it reports optional packages that are not there
    with semantic.semantic_graph(), warnings.catch_warnings(), torch.no_grad():
        warnings.simplefilter("ignore")  # deprecations inside torch.onnx itself; what matters is checked on the graph
        program = torch.onnx.export(module, arguments, dynamo=True, dynamic_shapes=shapes, opset_version=OPSET, optimize=True, verbose=False)
    assert program is not None and program.exported_program is not None
    refuse_mutation(program.exported_program)
    return program.model


def refuse_mutation(program: torch.export.ExportedProgram, caches: Collection[Any] = ()) -> None:
    """No graph keeps state of its own: an ONNX file would drop a mutated buffer without a word, a session could not rewind it.

    Args:
        caches: names of the inputs that are written in place.

    Raises:
        ValueError: the buffers and other inputs that change.
    """
    signature = program.graph_signature
    mutated = [*signature.buffers_to_mutate.values(), *signature.user_inputs_to_mutate.values()]
    for node in program.graph.nodes:  # a program that is not functional yet says so in its operations
        if node.op == "call_function" and getattr(getattr(node.target, "_schema", None), "is_mutable", False):
            written = _viewed(node.args[0])
            if written.op == "placeholder" and written.name not in caches:
                mutated.append(signature.inputs_to_buffers.get(written.name, written.name))
    if mutated:
        raise ValueError(f"export: expected state to cross the graph as inputs and outputs, got mutation of {', '.join(mutated)}; return the new value instead")


def _viewed(node: torch.fx.Node) -> torch.fx.Node:
    """The tensor that a view is of."""
    while node.op == "call_function":
        returns = getattr(getattr(node.target, "_schema", None), "returns", [])
        if not returns or returns[0].alias_info is None:
            break
        node = node.args[0]  # type: ignore[assignment]
    return node
