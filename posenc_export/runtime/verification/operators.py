"""The check of operators: kernels of this machine on weights of few bits and in float16 keep their
documented arithmetic.

The graph of the artefact runs with the options of its session, on one thread and on all cores, on a
call of several tokens, of one and of two. What each such node reads and computes is recorded, and
compared with its contract in float64.
"""

import os
from pathlib import Path
from typing import Dict, List, Optional, Sequence

import numpy as np

from posenc_export.runtime.artefact.certificate import MOST_FAILURES, Check
from posenc_export.runtime.artefact.manifest import Manifest
from posenc_export.runtime.graphs.kernel_library import OPERATOR
from posenc_export.runtime.graphs.onnx_nodes import read
from posenc_export.runtime.graphs.onnx_parts import nodes_of
from posenc_export.runtime.session.errors import GraphError
from posenc_export.runtime.verification import kernels, proof, recording
from posenc_export.runtime.verification.attention import cached_attention
from posenc_export.runtime.verification.experts import chosen_experts
from posenc_export.runtime.verification.kernels import CheckedNode, Graph

UNIT = "outputs of operators"
Records = List[Dict[str, np.ndarray]]  # values of each call by name


def of_artefact(folder: Path, manifest: Manifest) -> Optional[Check]:
    """Compare the kernels of model.onnx that ONNX Runtime runs on the CPU; None if no node of it
    has a contract.

    Args:
        folder: of the artefact, whose files were checked.
        manifest: of the artefact.
    """
    graph = Graph(read(folder / "model.onnx"), folder, manifest)
    nodes = checked_nodes(graph)
    if not nodes:
        return None
    folded = {name for node in nodes_of(graph.nodes) for name in node.outputs}
    constant = folded | graph.nodes.constants.keys()
    skipped = {
        node.name: node.skipped or "computed from constants when the graph is loaded"
        for node in nodes
        if node.skipped or not constant.isdisjoint(node.reads)
    }
    nodes = [node for node in nodes if node.name not in skipped]
    if not nodes:
        return Check(0, UNIT, skipped=skipped)
    try:
        runs = {"one thread": _run(graph, nodes, 1)}
        if (os.cpu_count() or 1) > 1:
            runs["all cores"] = _run(graph, nodes, None)
    except GraphError as error:
        return Check(0, UNIT, failures={"model.onnx": str(error)}, skipped=skipped)
    return _compared(nodes, runs, skipped)


def checked_nodes(graph: Graph) -> List[CheckedNode]:
    """Return the nodes of a graph that have a contract."""
    known = {
        **kernels.CONTRACTS,
        "GroupQueryAttention": cached_attention,
        OPERATOR: cached_attention,
        "QMoE": chosen_experts,
    }
    nodes = [
        known[node.operator](graph, node) for node in graph.nodes.nodes if node.operator in known
    ]
    return [node for node in nodes if node is not None]


def _run(graph: Graph, nodes: Sequence[CheckedNode], threads: Optional[int]) -> Records:
    """Record what the nodes read and compute. threads: per operator; None uses all cores."""
    names = [name for node in nodes for name in node.reads]
    names += [node.output for node in nodes if not node.alone]
    records = recording.recorded(graph, names, threads)
    for node in nodes:
        if node.alone:
            inputs = [record[node.reads[0]] for record in records]
            outputs = recording.alone(graph, node.alone, inputs, threads)
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
    first = dict(list(failures.items())[:MOST_FAILURES])
    return Check(compared, UNIT, proof.rounded_up(worst), first, skipped)


def _distinct(node: CheckedNode, runs: Dict[str, Records]) -> Dict[str, Dict[str, np.ndarray]]:
    """Return the calls whose inputs or outputs of a node differ from those before, by name."""
    calls: Dict[str, Dict[str, np.ndarray]] = {}
    names = (*node.reads, node.output)
    for threads, records in runs.items():
        for index, record in enumerate(records):
            equal = (
                all(np.array_equal(record[name], call[name]) for name in names)
                for call in calls.values()
            )
            if not any(equal):
                calls[f"call {index} of {record[recording.TOKENS]} tokens on {threads}"] = record
    return calls
