"""The check of operators: kernels of this machine keep their documented arithmetic."""

import os
from pathlib import Path
from typing import Any, Dict, List, Optional, Sequence

import numpy as np
import onnxruntime

from posenc_export.runtime.artefact.certificate import Check
from posenc_export.runtime.artefact.manifest import Manifest
from posenc_export.runtime.graphs import kernel_library, onnx_files, onnx_parts, ort_graph
from posenc_export.runtime.graphs.onnx_nodes import Node, read
from posenc_export.runtime.graphs.ort_options import SLOWER, session_options
from posenc_export.runtime.session import errors, model
from posenc_export.runtime.session.graph import BoundRun, Feeds, GraphRun, StateMemory
from posenc_export.runtime.verification import attention, experts, kernels, proof
from posenc_export.runtime.verification.grid_inputs import SHORT, encoder_rows, inputs
from posenc_export.runtime.verification.kernels import CheckedNode, Graph

PROMPT = 5  # tokens: kernels for several tokens compute 2 to 4 at a time, and then the rest
CALLS = (PROMPT, 1, 2)  # tokens of each call
TOKENS = ""  # name of the number of tokens of a call, which no value has
UNIT = "outputs of operators"
Records = List[Dict[str, np.ndarray]]  # values of each call by name


class Recorder(ort_graph.OrtGraph):
    """The graph of an artefact on the CPU, with values `names` between nodes as more outputs."""

    def __init__(self, graph: Graph, names: Sequence[str], threads: Optional[int]) -> None:
        self.manifest, self.provider, self.device = graph.manifest, "cpu", "cpu"
        nodes, states = graph.nodes, {state.present for state in graph.manifest.states}
        known = nodes.inputs.keys() | states
        self.names = [name for name in dict.fromkeys(names) if name not in known]
        self.states = states.intersection(names)
        # For each call its inputs, recorded values and states `names` after it, by name.
        self.record: List[Dict[str, np.ndarray]] = []
        outputs = list(dict.fromkeys((*nodes.outputs, *self.names)))
        content = onnx_parts.serialised(nodes, nodes.nodes, outputs, tuple(nodes.inputs))
        self.ort_session = _opened(content, graph, threads)

    def run(self, run: GraphRun, states: Sequence[StateMemory]) -> np.ndarray:
        binding = self._bind(run.feeds, states)
        output = self.manifest.outputs[run.output].name
        names = list(dict.fromkeys((output, *self.names)))
        for name in names:
            binding.bind_output(name, "cpu")
        try:
            self.ort_session.run_with_iobinding(binding)
        except errors.RUN_ERRORS as error:
            raise errors.GraphError(error) from None
        values = [np.array(value.numpy()) for value in binding.get_outputs()[len(states) :]]
        recorded = dict(zip(names, values, strict=True))
        tokens = {TOKENS: np.array(run.new)}
        cached = {  # views of the buffers
            memory.state.present: memory.present.read()
            for memory in states
            if memory.state.present in self.states
        }
        self.record.append({**tokens, **run.feeds, **recorded, **cached})
        return recorded[output]

    def repeat(self, feeds: Feeds, states: Sequence[StateMemory], result: np.ndarray) -> BoundRun:
        rows, new = result.shape[:2]

        def again() -> None:  # a step changes its inputs in place
            copied = {name: array.copy() for name, array in feeds.items()}
            result[...] = self.run(GraphRun(0, rows, new, copied), states)

        return again


def recorded(graph: Graph, names: Sequence[str], threads: Optional[int]) -> Records:
    """Return the recorded values of CALLS on tokens that are generated from a name, each on the
    caches of those before, if there are any. Raise GraphError if the graph failed.
    """
    manifest, recorder = graph.manifest, Recorder(graph, names, threads)
    capacity = min(manifest.max_positions, SHORT)
    session = model.Model(recorder).session(capacity=capacity)
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
    options = session_options(graph.manifest, threads)
    options.add_session_config_entry(onnx_files.FOLDER, str(graph.folder))
    return onnxruntime.InferenceSession(
        content, options, providers=["CPUExecutionProvider"], disabled_optimizers=SLOWER["cpu"]
    )


def of_artefact(folder: Path, manifest: Manifest) -> Optional[Check]:
    """Compare the kernels of model.onnx, whose files were checked, that ONNX Runtime runs on the
    CPU; None if no node of it has a contract.
    """
    graph = Graph(read(folder / "model.onnx"), folder, manifest)
    nodes = checked_nodes(graph)
    if not nodes:
        return None
    folded = {name for node in onnx_parts.constant_nodes(graph.nodes) for name in node.outputs}
    constant = folded | graph.nodes.constants.keys()
    why = "computed from constants when the graph is loaded"
    computed = {node.name: why for node in nodes if not constant.isdisjoint(node.reads)}
    skipped = computed | {node.name: node.skipped for node in nodes if node.skipped}
    nodes = [node for node in nodes if node.name not in skipped]
    if not nodes:
        return Check(0, UNIT, skipped=skipped)
    try:
        runs = {"one thread": _run(graph, nodes, 1)}
        if (os.cpu_count() or 1) > 1:
            runs["all cores"] = _run(graph, nodes, None)
    except errors.GraphError as error:
        return Check(0, UNIT, failures={"model.onnx": str(error)}, skipped=skipped)
    return _compared(nodes, runs, skipped)


def checked_nodes(graph: Graph) -> List[CheckedNode]:
    """Return the nodes of a graph that have a contract."""
    known = {
        **kernels.CONTRACTS,
        "GroupQueryAttention": attention.cached_attention,
        kernel_library.OPERATOR: attention.cached_attention,
        "QMoE": experts.chosen_experts,
    }
    described = [node for node in graph.nodes.nodes if node.operator in known]
    nodes = [known[node.operator](graph, node) for node in described]
    return [node for node in nodes if node is not None]


def _run(graph: Graph, nodes: Sequence[CheckedNode], threads: Optional[int]) -> Records:
    names = [name for node in nodes for name in node.reads]
    names += [node.output for node in nodes if not node.alone]
    records = recorded(graph, names, threads)
    for node in nodes:
        if node.alone:
            inputs = [record[node.reads[0]] for record in records]
            outputs = alone(graph, node.alone, inputs, threads)
            for record, output in zip(records, outputs, strict=True):
                record[node.output] = output
    return records


def _compared(
    nodes: Sequence[CheckedNode], runs: Dict[str, Records], skipped: Dict[str, str]
) -> Check:
    worst, compared, failures = 0.0, 0, {}
    for node in nodes:
        calls = _distinct(node, runs)
        ratios = node.ratios(list(calls.values()))
        sizes = np.array([call[node.output].size for call in calls.values()])
        ends = np.cumsum(sizes) * len(ratios) // sizes.sum()
        by_call = [part.max() for part in np.split(ratios, ends[:-1])]
        compared, worst = compared + int(sizes.sum()), max(worst, float(ratios.max()))
        if node.wrong:
            failures[node.name] = node.wrong
        elif max(by_call) > 1:
            call, ratio = max(zip(calls, by_call, strict=True), key=lambda item: float(item[1]))
            failures[node.name] = f"an error of {ratio:.3g} times its bound for {call}"
    return Check(compared, UNIT, proof.rounded_up(worst), failures, skipped)


def _distinct(node: CheckedNode, runs: Dict[str, Records]) -> Dict[str, Dict[str, np.ndarray]]:
    """Return the calls whose inputs or outputs of a node differ from those before, by name."""
    calls: Dict[str, Dict[str, np.ndarray]] = {}
    names = (*node.reads, node.output)
    for threads, records in runs.items():
        for index, record in enumerate(records):
            known = list(calls.values())
            equal = (all(np.array_equal(record[n], call[n]) for n in names) for call in known)
            if not any(equal):
                calls[f"call {index} of {record[TOKENS]} tokens on {threads}"] = record
    return calls
