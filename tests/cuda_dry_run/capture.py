"""Capture of CUDA graphs: prompts run uncaptured, steps are captured once for each batch size and then replayed."""

from pathlib import Path
from typing import Any, Dict, List, Tuple

import numpy as np
import onnxruntime

from posenc_export.runtime.artefact.manifest import Manifest
from posenc_export.runtime.graphs import cuda
from posenc_export.runtime.graphs.onnx_files import load_errors
from posenc_export.runtime.session.buffer import Buffer
from tests.cuda_dry_run.inputs import feeds, runner_of
from tests.cuda_dry_run.record import Record, recording

CAPACITY = 512
PROMPTS = (64, 100)
UNCAPTURED = -1  # gpu_graph_id of a run that is not captured
ON_HOST = "total_sequence_length"  # GroupQueryAttention reads it on the host; a captured graph needs a value that never changes: the capacity


class FixedCall:
    """A call that is bound once, to tensors on the device.

    Args:
        states: buffers of the states before and after the call, by name.
    """

    def __init__(self, session: Any, manifest: Manifest, states: Dict[str, Buffer], batch: int, new: int, past: int, slots: int) -> None:
        self.session, self.binding, self.arrays, self.values = session, session.io_binding(), feeds(manifest, runner_of(manifest), batch, new, past, slots), {}
        for name, array in self.arrays.items():
            if name == ON_HOST:
                self.binding.bind_input(name, "cpu", 0, array.dtype, array.shape, array.ctypes.data)
            else:
                self.values[name] = on_device(array)
                self.binding.bind_ortvalue_input(name, self.values[name])
        for state in manifest.states:
            for name, bind in ((state.past, self.binding.bind_input), (state.present, self.binding.bind_output)):
                bind(name, "cuda", 0, states[name].element, states[name].shape, states[name].address)
        output = manifest.outputs[0]
        self.output = on_device(np.zeros([batch, 1 if manifest.input("logits_index") else new, int(output.axes[-1])], output.dtype))
        self.binding.bind_ortvalue_output(output.name, self.output)

    def run(self, graph_id: int) -> None:
        for name, value in self.values.items():
            value.update_inplace(self.arrays[name])
        options = onnxruntime.RunOptions()
        options.add_run_config_entry("gpu_graph_id", str(graph_id))
        self.session.run_with_iobinding(self.binding, options)
        self.output.numpy()


def on_device(array: np.ndarray) -> Any:
    return onnxruntime.OrtValue.ortvalue_from_numpy(np.ascontiguousarray(array), "cuda", 0)


def captured(folder: Path, manifest: Manifest) -> str:
    """Return "captured" if all steps replay the graphs that the first of each batch size captured, otherwise why not."""
    if any(state.update == "append" for state in manifest.states):
        return "the caches grow"
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 4
    try:
        providers = [(cuda.NAME, {**cuda.OPTIONS, "enable_cuda_graph": "1"})]
        session = onnxruntime.InferenceSession(str(folder / "model.onnx"), options, providers=providers, enable_fallback=0)
        for run, (call, graph_id, replays) in enumerate(plan(session, manifest)):
            with recording() as record:
                call.run(graph_id)
            if wrong(record, graph_id, replays):
                return f"run {run} with id {graph_id}: {wrong(record, graph_id, replays)}"
    except load_errors() as error:
        return " ".join(str(error).split())[-300:]
    return "captured"


def plan(session: Any, manifest: Manifest) -> List[Tuple[FixedCall, int, bool]]:
    """Return calls, each with its gpu_graph_id and whether it replays a graph without launches: prompts and steps of two batch sizes in turn."""
    capacity = min(CAPACITY, manifest.max_positions)
    states = {batch: states_of(manifest, batch, capacity) for batch in (1, 3)}
    first, second = (min(prompt, capacity - 1) for prompt in PROMPTS)
    steps = {batch: FixedCall(session, manifest, states[batch], batch, 1, first, capacity) for batch in states}
    prompts = [(FixedCall(session, manifest, states[1], 1, new, 0, new), UNCAPTURED, False) for new in (first, second)]
    return [prompts[0], (steps[1], 1, False), (steps[1], 1, True), prompts[1], (steps[1], 1, True), (steps[3], 3, False), (steps[3], 3, True), (steps[1], 1, True)]


def states_of(manifest: Manifest, batch: int, capacity: int) -> Dict[str, Buffer]:
    """Return buffers of all states. States written in place have one buffer, replaced ones one for reading and one for writing."""
    found: Dict[str, Buffer] = {}
    for state in manifest.states:
        shape = [batch, *(capacity if isinstance(axis, str) else axis for axis in state.axes[1:])]
        found[state.past] = Buffer(shape, state.dtype, state.fill, "cuda")
        found[state.present] = found[state.past] if state.update == "in_place" else Buffer(shape, state.dtype, state.fill, "cuda")
    return found


def wrong(record: Record, graph_id: int, replays: bool) -> str:
    """Return what a run did that it should not do; empty if all is right."""
    illegal = [name for name in record.counts if name.startswith("CAPTURE_ILLEGAL")]
    if illegal or record.counts["STALE_COPY"]:
        return ", ".join(illegal) or f"{record.counts['STALE_COPY']} copies of memory that has changed"
    expected = 0 if graph_id == UNCAPTURED else 1
    if record.counts["GRAPH_LAUNCH"] != expected or (replays and record.launches):
        return f"{record.counts['GRAPH_LAUNCH']} replays and {record.launches} launches"
    return ""
