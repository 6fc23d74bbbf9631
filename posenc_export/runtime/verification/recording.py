"""Run the graph of an artefact and record values between its nodes.

ONNX Runtime computes a value that becomes an output of the graph with the same kernel as before,
unless it would have fused the node that computes it with those that read it. It fuses no product
with the nodes behind it, of those that graphs of this package have
(tests/runtime/verification/test_operators.py compares the kernels of both graphs).
"""

from typing import Any, Callable, Dict, List, Optional, Sequence

import numpy as np
import onnxruntime

from posenc_export.runtime.graphs import onnx_parts
from posenc_export.runtime.graphs.onnx_nodes import Node
from posenc_export.runtime.graphs.ort_graph import OrtGraph
from posenc_export.runtime.graphs.ort_options import SLOWER, session_options
from posenc_export.runtime.session.errors import RUN_ERRORS, GraphError
from posenc_export.runtime.session.graph import Bound, Call, Feeds
from posenc_export.runtime.session.model import Model
from posenc_export.runtime.verification.inputs import encoder_rows, inputs
from posenc_export.runtime.verification.kernels import Graph
from posenc_export.runtime.verification.long_sequence import SHORT

PROMPT = 5  # tokens: kernels for several tokens compute 2 to 4 at a time, and then the rest
CALLS = (PROMPT, 1, 2)  # tokens of each call
TOKENS = ""  # name of the number of tokens of a call, which no value has


class Recorder(OrtGraph):
    """The graph of an artefact on the CPU, with values between its nodes as further outputs.

    Args:
        graph: of the artefact.
        names: of the values, which are no constants.
        threads: threads per operator; None uses all cores.

    Attributes:
        record: for each call its inputs, its recorded values and the 8-bit states after it, by
            name.
    """

    def __init__(self, graph: Graph, names: Sequence[str], threads: Optional[int]) -> None:
        self.manifest, self.provider, self.device = graph.manifest, "cpu", "cpu"
        nodes, states = graph.nodes, {state.present for state in graph.manifest.states}
        known = nodes.inputs.keys() | states
        self.names = [name for name in dict.fromkeys(names) if name not in known]
        self.record: List[Dict[str, np.ndarray]] = []
        outputs = list(dict.fromkeys((*nodes.outputs, *self.names)))
        content = onnx_parts.serialised(nodes, nodes.nodes, outputs, tuple(nodes.inputs))
        self.session = _opened(content, graph, threads)

    def run(self, call: Call, states: Sequence[Bound]) -> np.ndarray:
        binding = self._bind(call.feeds, states)
        output = self.manifest.outputs[call.output].name
        names = list(dict.fromkeys((output, *self.names)))
        for name in names:
            binding.bind_output(name, "cpu")
        try:
            self.session.run_with_iobinding(binding)
        except RUN_ERRORS as error:
            raise GraphError(error) from None
        values = [np.array(value.numpy()) for value in binding.get_outputs()[len(states) :]]
        recorded = dict(zip(names, values, strict=True))
        tokens = {TOKENS: np.array(call.new)}
        cached = {  # views of the buffers
            bound.state.present: bound.present.read()
            for bound in states
            if bound.state.dtype == "int8"
        }
        self.record.append({**tokens, **call.feeds, **recorded, **cached})
        return recorded[output]

    def repeat(
        self, feeds: Feeds, states: Sequence[Bound], result: np.ndarray
    ) -> Callable[[], object]:
        rows, new = result.shape[:2]

        def again() -> None:  # a step changes its inputs in place
            copied = {name: array.copy() for name, array in feeds.items()}
            result[...] = self.run(Call(0, rows, new, copied), states)

        return again


def recorded(
    graph: Graph, names: Sequence[str], threads: Optional[int]
) -> List[Dict[str, np.ndarray]]:
    """Return the recorded values of CALLS on tokens of a text that is generated from a name, each
    call on the caches of those before.

    A model without caches reads the tokens of each call alone.

    Args:
        graph, names, threads: as for Recorder.

    Raises:
        GraphError: the graph failed.
    """
    manifest, recorder = graph.manifest, Recorder(graph, names, threads)
    capacity = min(manifest.max_positions, SHORT)
    session = Model(recorder).session(capacity=capacity)
    tokens = inputs(manifest, (1, min(sum(CALLS), manifest.max_positions)), "operators")
    encoder = encoder_rows(manifest, 1)
    ends = np.cumsum(CALLS)
    for part in np.split(tokens, ends[:-1], axis=1):
        if not manifest.states:
            session.reset()
        begins = not (manifest.states and recorder.record)
        if part.shape[1]:
            session.prefill(part, encoder=encoder if begins else None)
    return recorder.record


def alone(
    graph: Graph, nodes: Sequence[Node], inputs: Sequence[np.ndarray], threads: Optional[int]
) -> List[np.ndarray]:
    """Return what some nodes alone compute from each value of their first input."""
    name, output = nodes[-1].inputs[0], nodes[-1].outputs[0]
    free = {name: onnx_parts.ELEMENTS.get(inputs[0].dtype.name, inputs[0].dtype.name)}
    content = onnx_parts.serialised(graph.nodes, nodes, [output], free=free)
    session = _opened(content, graph, threads)
    return [session.run([output], {name: value})[0] for value in inputs]


def _opened(content: bytes, graph: Graph, threads: Optional[int]) -> Any:
    """Open a graph with the options of the artefact."""
    options = session_options(graph.manifest, threads)
    options.add_session_config_entry(
        "session.model_external_initializers_file_folder_path", str(graph.folder)
    )
    return onnxruntime.InferenceSession(
        content, options, providers=["CPUExecutionProvider"], disabled_optimizers=SLOWER["cpu"]
    )
