"""Inference requests of a compiled OpenVINO graph, which read and write arrays.

Shapes: B rows, S new tokens, T tokens after the call.
"""

from typing import Any, Dict, List, Tuple

import numpy as np
import openvino

from posenc_export.runtime.artefact.manifest import Manifest
from posenc_export.runtime.artefact.rules import B, S
from posenc_export.runtime.session.errors import GraphError

ONE_ROW = "GroupQueryAttention"  # OpenVINO 2026.4 supports it for a single row without padding
Arrays = Dict[str, np.ndarray]


class Requests:
    """Runs a compiled graph. Several threads may share it, because each run uses its own inference request.

    Args:
        compiled: openvino.CompiledModel.
        manifest: manifest of the artefact.
    """

    def __init__(self, compiled: Any, manifest: Manifest) -> None:
        self._compiled, self._manifest = compiled, manifest
        self._idle: List[Any] = []  # inference requests that are not in use
        self._axes: Dict[str, Tuple[Any, ...]] = {value.name: value.axes for value in (*manifest.inputs, *manifest.encoder, *manifest.outputs)}
        self._axes |= {name: state.axes for state in manifest.states for name in (state.past, state.present)}
        self._in_place = [state for state in manifest.states if state.update == "in_place"]
        self._run = self._run_rows if ONE_ROW in manifest.operators else _infer

    def run(self, inputs: Arrays, outputs: Arrays) -> None:
        """Run the graph. `outputs` are written. Raise GraphError if OpenVINO fails."""
        try:
            request = self._idle.pop()
        except IndexError:
            request = self._compiled.create_infer_request()
        try:
            self._run(request, inputs, outputs)
        except RuntimeError as error:
            raise GraphError(error) from None
        self._idle.append(request)

    def _run_rows(self, request: Any, inputs: Arrays, outputs: Arrays) -> None:
        """Run each row alone and without padding. For caches in place the graph returns a copy of the valid slots, from which the new slots are copied."""
        rows, new = inputs[self._manifest.inputs[0].name].shape[:2]
        copied = {state.present for state in self._in_place}
        for row in range(rows):
            total = self._total(inputs, row)
            count = min(new, total)  # less than `new` for a row with padding, which has no earlier tokens (GraphRunner)
            given = {name: self._part(name, array, row, count) for name, array in inputs.items()}
            if "total_sequence_length" in given:
                given["total_sequence_length"] = np.array(total, np.int32)
            _infer(request, given, {name: self._part(name, array, row, count) for name, array in outputs.items() if name not in copied})
            for state in self._in_place:
                fresh = (slice(None),) * (state.axis - 1) + (slice(total - count, total),)
                outputs[state.present][(row, *fresh)] = request.get_tensor(state.present).data[(0, *fresh)]

    def _total(self, inputs: Arrays, row: int) -> int:
        """Return the number of slots T of a row after the call, including padding if rows share columns."""
        return int(inputs["seqlens_k"][row]) + 1 if "seqlens_k" in inputs else inputs["attention_mask"].shape[1]

    def _part(self, name: str, array: np.ndarray, row: int, count: int) -> np.ndarray:
        """Return the part of an array for one row and its first `count` new tokens, as a view if rows are the first axis."""
        chosen = {B: slice(row, row + 1), S: slice(count)}
        return np.ascontiguousarray(array[tuple(chosen.get(axis, slice(None)) for axis in self._axes[name])])


def _infer(request: Any, inputs: Arrays, outputs: Arrays) -> None:
    for name, array in (*inputs.items(), *outputs.items()):
        request.set_tensor(name, openvino.Tensor(array, shared_memory=True))
    request.infer()
