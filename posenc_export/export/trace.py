"""The model behind several exports: cast once per dtype, and traced once per calling convention."""

import contextlib
import copy
from typing import Any, Callable, Collection, Dict, Mapping, Optional, Tuple, TypeVar, Union

import numpy as np
import onnx_ir as ir
import torch

from posenc_export.export.describe import Model, dtype_of, trace_inputs
from posenc_export.export.paging import page_out
from posenc_export.export.quantization import calibration, mixed
from posenc_export.export.quantization.calibration import Sample
from posenc_export.export.quantization.formats import KEEP, OnGrid, Rounded, format_of, rounded
from posenc_export.export.quantization.kept import kept
from posenc_export.export.quantization.smoothing import smoothed
from posenc_export.export.repeated_layers import RepeatedLayers
from posenc_export.export.signatures import wrap
from posenc_export.export.traced_constants import TracedConstants
from posenc_export.export.weight_file import Keep, WeightFile, in_memory
from posenc_export.models.parts.experts import Experts
from posenc_export.models.user_module import as_model
from posenc_export.ops import graph as semantic
from posenc_export.ops.graph import semantic_graph
from posenc_export.runtime.artefact.manifest import Manifest
from posenc_export.runtime.graphs.quiet import quiet
from posenc_export.shared.progress import Progress, Step, silent

T = TypeVar("T")
OPSET = 23  # of the trace; its operators have the same meaning in later opsets


class Source:
    """A model in one dtype with its semantic graphs.

    Args:
        model: in eval mode; its weights must not be modified afterwards.
        cache_scales: scales of quantized keys and values by state (calibration.cache_scales); None
            if caches keep dtype.
        on_grid: grids and codes of rounded weights by name of the parameter (formats.rounded); None
            if none is rounded.
        say: reports progress of tracing and writing.
    """

    def __init__(
        self,
        model: Model,
        cache_scales: Optional[Mapping[str, np.ndarray]] = None,
        on_grid: Optional[Mapping[str, OnGrid]] = None,
        say: Progress = silent,
    ) -> None:
        self.model, self.cache_scales, self.on_grid, self.say = (
            model,
            cache_scales or {},
            on_grid or {},
            say,
        )
        self._graphs: Dict[str, Tuple[ir.Model, TracedConstants]] = {}
        self._computed: Dict[Tuple[Any, ...], Any] = {}

    def once(self, key: Tuple[Any, ...], compute: Callable[[], T]) -> T:
        """Return what `compute` returned for this key first, such as the expected outputs of the
        model, which several targets share.
        """
        if key not in self._computed:
            self._computed[key] = compute()
        return self._computed[key]  # type: ignore[no-any-return]

    def release(self) -> None:
        """Release the memory of weights and codes that are mapped from a file, until they are
        used again (paging.page_out).
        """
        codes = [
            numbers
            for _, one in self.on_grid.values()
            for numbers in (one.codes, one.scales, one.offsets)
            if numbers is not None
        ]
        page_out([*self.model.parameters(), *codes])

    def semantic(self, manifest: Manifest) -> ir.Model:
        """Return a copy of the graph with semantic nodes for the manifest's calling convention.
        Rounded weights are read through nodes OnGrid.

        Raises:
            ValueError: the module mutates buffers or inputs.
        """
        return self._traced(manifest)[0].clone()

    def traced(self, manifest: Manifest) -> TracedConstants:
        """Return what the graph for the manifest's calling convention computes from constants."""
        return self._traced(manifest)[1]

    def _traced(self, manifest: Manifest) -> Tuple[ir.Model, TracedConstants]:
        if manifest.signature not in self._graphs:
            self.say(Step(f"{manifest.target}: tracing"))
            self._graphs[manifest.signature] = _traced(self.model, manifest, self.on_grid)
        return self._graphs[manifest.signature]


class Sources:
    """The sources of one model, by dtype and by formats of weights and caches.

    Args:
        model: a float32 model of this package, or a module that contains one. It is not modified,
            and must not be modified while this object is in use.
        owned: the caller uses the model no more: while it is exported, its weights may move to a
            temporary file, so that their memory can be released between uses.

    Raises:
        ValueError: models.user_module.as_model refuses the module.
    """

    def __init__(self, model: Union[Model, torch.nn.Module], owned: bool = False) -> None:
        self.model, self._owned, self._keep = as_model(model), owned, in_memory
        self._made: Dict[Tuple[Any, ...], Source] = {}

    def keep_in(self, file: WeightFile) -> None:
        """Keep rounded weights in a file from now on, and those of an owned model."""
        self._keep = file.keep
        if self._owned and dtype_of(self.model) == "float32":
            file.keep_weights(self.model)
            page_out(self.model.parameters())

    def of(
        self,
        dtype: str,
        weights: Optional[str] = None,
        sample: Optional[Sample] = None,
        cache: bool = False,
        size: Optional[float] = None,
        say: Progress = silent,
    ) -> Source:
        """Return the source in a dtype and in eval mode.

        Args:
            weights: format of formats.FORMATS that the weights are rounded to, formats.KEEP or,
                with a size and a sample, formats.MIXED; None does not round.
            sample: calibration data; None for none.
            cache: compute scales of quantized keys and values, which needs a sample.
            size: most megabytes of graph and weights.
            say: reports progress of calibration, rounding, tracing and writing.
        """
        key = dtype, weights, sample and sample.described, cache, size
        if key not in self._made:
            model = in_dtype(self.model, dtype)
            scales = (
                calibration.cache_scales(model, sample, say)
                if cache and sample is not None
                else None
            )
            formats = (
                None
                if size is None or sample is None
                else mixed.formats_within(model, sample, size, say)
            )
            rounded_model, on_grid = (
                Rounded(model, {})
                if weights is None
                else in_few_bits(model, weights, sample, formats, self._keep, say)
            )
            page_out(self.model.parameters())
            self._made[key] = Source(rounded_model, scales, on_grid, say)
        return self._made[key]


def in_few_bits(
    model: Model,
    weights: str,
    sample: Optional[Sample],
    formats: Optional[Mapping[str, str]] = None,
    keep: Keep = in_memory,
    say: Progress = silent,
) -> Rounded:
    """Return a copy of a float32 model in eval mode with weights rounded to a format
    (formats.format_of), for formats.MIXED to those of `formats` by name.

    A sample is used if the format is calibrated. Rounded weights and codes are kept in the arrays
    that `keep` returns.
    """
    if weights == KEEP:
        return kept(model, keep)
    if sample is None or not format_of(weights).calibrated:
        return rounded(model, weights, (), formats, keep, say)
    if format_of(weights).smooth:
        return rounded(smoothed(model, sample, say), weights, (), None, keep, say)
    return rounded(model, weights, calibration.moments(model, sample, say), formats, keep, say)


def in_dtype(model: Model, dtype: str) -> Model:
    """Return the model itself if it has this dtype and is in eval mode, otherwise a converted copy.

    Raises:
        ValueError: a model that chooses experts in another dtype than float32.
    """
    choosing = [
        part
        for part in model.modules()
        if isinstance(part, Experts) and part.choose.chosen < part.router.out_features
    ]
    if choosing and dtype != "float32":
        rule = (
            "export: expected dtype float32 for a model that chooses "
            f"{choosing[0].choose.chosen} of {choosing[0].router.out_features} experts"
        )
        why = (
            "with activations in half precision a token near a tie gets other experts, and other "
            "ones in a step than in a prompt"
        )
        raise ValueError(
            f"{rule}, got {dtype}, in which {why}; export target ort or onnx in float32"
        )
    ready = dtype_of(model) == dtype and not model.training
    return model if ready else copy.deepcopy(model).to(getattr(torch, dtype)).eval()


def _traced(
    model: Model, manifest: Manifest, on_grid: Mapping[str, OnGrid]
) -> Tuple[ir.Model, TracedConstants]:
    """Return the optimized graph, and what was computed from constants before."""
    part, whole = RepeatedLayers.of(model), wrap(model, manifest.signature)
    module, marking = (
        (whole, contextlib.ExitStack())
        if part is None
        else (wrap(part.model, manifest.signature), part.marking())
    )
    arguments, shapes = trace_inputs(manifest if part is None else part.manifest(manifest))
    # torch.onnx warns of deprecations inside itself, and logs that optional packages are not
    # installed; the resulting graph is checked instead.
    with marking, semantic_graph(), quiet(Warning, logger="torch.onnx"), torch.no_grad():
        program = torch.onnx.export(
            module,
            arguments,
            dynamo=True,
            dynamic_shapes=shapes,
            opset_version=OPSET,
            optimize=False,
            verbose=False,
        )
    assert program is not None and program.exported_program is not None
    refuse_mutation(program.exported_program)
    graph = program.model.graph
    if part is not None:
        part.complete(graph, manifest)
    constants = TracedConstants(graph, program.model.opset_imports)
    _read_through_nodes(graph, _initializers(whole, model, on_grid))
    turned = _transposed_weights(graph)
    program.optimize()
    for value, name in turned.items():
        if value in graph.initializers:  # the optimizer folded the transpose
            graph.initializers[value].name = name
    return program.model, constants


def _transposed_weights(graph: ir.Graph) -> Dict[str, str]:
    """Return the name that a transposed weight gets if it becomes a constant, by the name of the
    value: that of the parameter and ".T".
    """
    weights = {
        name: [node for node, _ in weight.uses() if node.op_type == "Transpose"]
        for name, weight in graph.initializers.items()
        if weight.shape is not None and len(weight.shape) == 2
    }
    return {
        str(nodes[0].outputs[0].name): f"{name}.T"
        for name, nodes in weights.items()
        if len(nodes) == 1
    }


def _initializers(
    module: torch.nn.Module, model: Model, on_grid: Mapping[str, OnGrid]
) -> Dict[str, str]:
    """Return the names of rounded parameters of `model` by their names in `module`, which
    contains it. A tied weight has several.
    """
    known = {id(parameter): name for name, parameter in model.named_parameters() if name in on_grid}
    return {
        name: known[id(parameter)]
        for name, parameter in module.named_parameters(remove_duplicate=False)
        if id(parameter) in known
    }


def _read_through_nodes(graph: ir.Graph, names: Mapping[str, str]) -> None:
    """Put a semantic node OnGrid, which returns its input, between each rounded weight and the
    nodes that read it.

    It keeps the name of the parameter, which would be lost where the optimizer folds a constant.
    Passes of export/targets/rewriter.py replace it.

    Args:
        names: names of rounded parameters by name of the initializer.
    """
    for initializer, name in names.items():
        if initializer in graph.initializers:
            weight = graph.initializers[initializer]
            node = ir.node("OnGrid", [weight], {"name": name}, domain=semantic.DOMAIN)
            made = node.outputs[0]
            made.name, made.shape, made.type = f"{initializer}.on_grid", weight.shape, weight.type
            weight.replace_all_uses_with(made)
            node.replace_input_with(0, weight)
            graph.insert_before(graph[0], node)


def refuse_mutation(program: torch.export.ExportedProgram, caches: Collection[Any] = ()) -> None:
    """Refuse a program that mutates buffers or inputs. ONNX export would drop the mutation
    silently, and a session could not rewind such a state.

    Args:
        caches: names of inputs that may be written in place.

    Raises:
        ValueError: the program mutates a buffer or another input; the message names it.
    """
    signature = program.graph_signature
    mutated = [*signature.buffers_to_mutate.values(), *signature.user_inputs_to_mutate.values()]
    for (
        node
    ) in program.graph.nodes:  # programs that are not functionalized mutate by in-place operations
        written = written_by(node)
        if written is not None and written.op == "placeholder" and written.name not in caches:
            mutated.append(signature.inputs_to_buffers.get(written.name, written.name))
    if mutated:
        raise ValueError(
            "export: expected state as inputs and outputs of the graph, got mutation of "
            f"{', '.join(mutated)}; return the new value instead"
        )


def written_by(node: torch.fx.Node) -> Optional[torch.fx.Node]:
    """Return the tensor whose memory an in-place operation writes, without the views between
    them; None for other nodes.
    """
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
