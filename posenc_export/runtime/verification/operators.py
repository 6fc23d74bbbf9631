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
from posenc_export.runtime.graphs.onnx_nodes import read
from posenc_export.runtime.graphs.onnx_parts import nodes_of
from posenc_export.runtime.session.errors import GraphError
from posenc_export.runtime.verification import kernels, proof, recording
from posenc_export.runtime.verification.attention import cached_attention
from posenc_export.runtime.verification.experts import chosen_experts
from posenc_export.runtime.verification.kernels import Graph, Place

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
    places = places_of(graph)
    if not places:
        return None
    folded = {name for node in nodes_of(graph.nodes) for name in node.outputs}
    constant = folded | graph.nodes.constants.keys()
    skipped = {
        place.name: place.skipped or "computed from constants when the graph is loaded"
        for place in places
        if place.skipped or not constant.isdisjoint(place.reads)
    }
    places = [place for place in places if place.name not in skipped]
    if not places:
        return Check(0, UNIT, skipped=skipped)
    try:
        runs = {"one thread": _run(graph, places, 1)}
        if (os.cpu_count() or 1) > 1:
            runs["all cores"] = _run(graph, places, None)
    except GraphError as error:
        return Check(0, UNIT, failures={"model.onnx": str(error)}, skipped=skipped)
    return _compared(places, runs, skipped)


def places_of(graph: Graph) -> List[Place]:
    """Return the nodes of a graph that have a contract."""
    known = {**kernels.PLACES, "GroupQueryAttention": cached_attention, "QMoE": chosen_experts}
    places = [
        known[node.operator](graph, node) for node in graph.nodes.nodes if node.operator in known
    ]
    return [place for place in places if place is not None]


def _run(graph: Graph, places: Sequence[Place], threads: Optional[int]) -> Records:
    """Record what the places read and compute. threads: per operator; None uses all cores."""
    names = [name for place in places for name in place.reads]
    names += [place.output for place in places if not place.alone]
    records = recording.recorded(graph, names, threads)
    for place in places:
        if place.alone:
            inputs = [record[place.reads[0]] for record in records]
            outputs = recording.alone(graph, place.alone, inputs, threads)
            for record, output in zip(records, outputs, strict=True):
                record[place.output] = output
    return records


def _compared(places: Sequence[Place], runs: Dict[str, Records], skipped: Dict[str, str]) -> Check:
    worst, compared, failures = 0.0, 0, {}
    for place in places:
        calls = _distinct(place, runs)
        ratios = place.ratios(list(calls.values()))
        sizes = np.array([call[place.output].size for call in calls.values()])
        ends = np.cumsum(sizes) * len(ratios) // sizes.sum()
        by_call = [part.max() for part in np.split(ratios, ends[:-1])]
        compared, worst = compared + int(sizes.sum()), max(worst, float(ratios.max()))
        if place.wrong:
            failures[place.name] = place.wrong
        elif max(by_call) > 1:
            call, ratio = max(zip(calls, by_call, strict=True), key=lambda item: float(item[1]))
            failures[place.name] = f"an error of {ratio:.3g} times its bound for {call}"
    first = dict(list(failures.items())[:MOST_FAILURES])
    return Check(compared, UNIT, proof.rounded_up(worst), first, skipped)


def _distinct(place: Place, runs: Dict[str, Records]) -> Dict[str, Dict[str, np.ndarray]]:
    """Return the calls with other inputs or outputs of a place than those before, by what they
    are.
    """
    calls: Dict[str, Dict[str, np.ndarray]] = {}
    names = (*place.reads, place.output)
    for threads, records in runs.items():
        for index, record in enumerate(records):
            equal = (
                all(np.array_equal(record[name], call[name]) for name in names)
                for call in calls.values()
            )
            if not any(equal):
                calls[f"call {index} of {record[recording.TOKENS]} tokens on {threads}"] = record
    return calls
