"""Dry run of one artefact, in a process with the stub libraries: `python -m
tests.cuda_dry_run.check FOLDER [--no-grid]` prints one JSON object.
"""

import argparse
import collections
import json
import re
import tempfile
import time
from pathlib import Path
from typing import Any, Callable, Iterator

import numpy as np
import onnx
import onnxruntime

from posenc_export.runtime import load
from posenc_export.runtime.graphs import cuda
from posenc_export.runtime.graphs.onnx_files import load_errors
from posenc_export.runtime.session.errors import GraphError
from posenc_export.runtime.verification import grid_inputs, proof
from posenc_export.runtime.verification.measuring import cells_of
from posenc_export.runtime.verification.scenarios import Level
from tests.cuda_dry_run.capture import captured
from tests.cuda_dry_run.inputs import tokens
from tests.cuda_dry_run.record import recording

CAPACITY = 256
# Steps before the recorded one, in which the provider allocates its scratch memory; rounds and
# steps that are timed.
WARM, ROUNDS, STEPS = 4, 8, 20


def placement(folder: Path) -> dict[str, Any]:
    """Load the graph with all of ONNX Runtime's optimisations. Return the number of nodes, the
    operators on the CPU, and what the copies between the two move.
    """
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 4
    options.add_session_config_entry("session.record_ep_graph_assignment_info", "1")
    with tempfile.TemporaryDirectory() as temporary:
        options.optimized_model_filepath = f"{temporary}/optimised.onnx"
        how: dict[str, Any] = {"providers": [(cuda.NAME, cuda.OPTIONS)], "enable_fallback": 0}
        session = onnxruntime.InferenceSession(str(folder / "model.onnx"), options, **how)
        model = onnx.load(options.optimized_model_filepath, load_external_data=False)
    nodes, assigned = [*_nodes(model.graph)], session.get_provider_graph_assignment_info()
    others = [part.get_nodes() for part in assigned if part.ep_name != cuda.NAME]
    on_cpu = [node.op_type for part in others for node in part]
    moving = [node for node in nodes if node.op_type.startswith("Memcpy")]
    copies = [f"{node.op_type} of {node.input[0]}" for node in moving]
    return {"nodes": len(nodes) - len(copies), "on_cpu": sorted(on_cpu), "memcpy": copies}


def _nodes(graph: Any) -> Iterator[Any]:
    """Yield the nodes of a graph and of its subgraphs."""
    for node in graph.node:
        yield node
        for attribute in node.attribute:
            yield from _nodes(attribute.g)


def step_of(model: Any) -> dict[str, Any]:
    """Return launches, copies and CPU time of a step of one row."""
    manifest = model.manifest
    session = model.session(capacity=min(CAPACITY, manifest.max_positions))
    one = tokens(manifest, 1, 1)[:, 0]
    session.prefill(tokens(manifest, 1, 8), encoder=grid_inputs.encoder_rows(manifest, 1))
    for _ in range(WARM):
        session.step(one, copy=False)
    with recording() as record:
        session.step(one, copy=False)
    launched = {"launches": record.launches, "tf32": record.tf32, "copies": record.moved()}
    least = round(_least_us(lambda: session.step(one, copy=False)))
    return {**launched, "attention": record.attention, "host_us": least}


def _least_us(step: Callable[[], Any]) -> float:
    """Return the least CPU time of a step over the rounds. Launches cost nothing here: this is
    the time of Python and ONNX Runtime.
    """
    rounds = []
    for _ in range(ROUNDS):
        begin = time.thread_time()
        for _ in range(STEPS):
            step()
        rounds.append((time.thread_time() - begin) / STEPS * 1e6)
    return min(rounds)


def grid(model: Any, folder: Path) -> dict[str, Any]:
    """Run every cell of the parity grid. Return the number of cells, and the faults and errors
    by text with their cells.
    """
    manifest, result, cells = model.manifest, collections.defaultdict(list), 0
    session = model.session(capacity=grid_inputs.fill_length(manifest))
    for cell in cells_of(manifest, proof.read(manifest, folder), Level.WHOLE):
        cells += 1
        session.reset()
        try:
            with recording() as record:
                collections.deque(cell.pairs(session), maxlen=0)  # the outputs are not compared
        except GraphError as error:
            result[_general(str(error))].append(cell.name)
        for fault in {_general(text) for text in record.faults}:
            result[fault].append(cell.name)
    faults = {text: [len(names), names[0]] for text, names in result.items()}
    return {"cells": cells, "faults": faults}


def _general(text: str) -> str:
    """Return a message without its numbers, so that equal causes have equal texts."""
    return re.sub(r"\d+", "#", " ".join(text.split()))[:300]


def checked(folder: Path, with_grid: bool) -> dict[str, Any]:
    """Return everything that the dry run finds about an artefact; "error" if it does not load or
    run.
    """
    result: dict[str, Any] = {}
    try:
        # Without a comparison of outputs; replays launch nothing that could be examined.
        model = load(folder, provider="cuda", check=False, capture=False)
        result |= placement(folder)
        if model.manifest.states:
            result |= {"step": step_of(model), **captured(folder, model.manifest, _least_us)}
        if with_grid:
            result |= grid(model, folder)
    except (*load_errors(), ValueError) as error:
        result |= {"error": " ".join(str(error).split())[-400:]}
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--no-grid", action="store_true")
    options = parser.parse_args()
    with np.errstate(all="ignore"):
        print(json.dumps(checked(options.folder, not options.no_grid)))


if __name__ == "__main__":
    main()
