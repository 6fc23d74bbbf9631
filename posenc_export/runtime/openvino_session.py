"""OpenVINO with the interface of onnxruntime.InferenceSession that OrtCaches uses: bind memory by address, and run.

Shapes: B rows, S new tokens, T tokens behind the call.
"""

import ctypes
from dataclasses import dataclass
from typing import Any, Dict, List, Sequence, Tuple

import numpy as np
import openvino

from posenc_export.runtime.manifest import Manifest, Value
from posenc_export.runtime.rules import B, R, S

ONE_ROW = "GroupQueryAttention"  # OpenVINO 2026.4 supports only one row without padding
Arrays = Dict[str, np.ndarray]


@dataclass(frozen=True)
class Output:
    """An output of a run."""

    array: np.ndarray

    def numpy(self) -> np.ndarray:
        """Return the array."""
        return self.array


class Binding:
    """Memory of the inputs and outputs of a run. The caller must keep it alive.

    Args:
        output: the output of the graph that is not a state.
    """

    def __init__(self, output: Value) -> None:
        self._output = output
        self.inputs: Arrays = {}
        self.outputs: Arrays = {}

    def bind_input(self, name: str, device: str, number: int, dtype: Any, shape: Sequence[int], address: int) -> None:
        """Bind an input to memory."""
        self.inputs[name] = _at(dtype, shape, address)

    def bind_output(self, name: str, device: str, number: int = 0, dtype: Any = None, shape: Sequence[int] = (), address: int = 0) -> None:
        """Bind an output to memory; without an address, to a new array."""
        self.outputs[name] = _at(dtype, shape, address) if address else self._new()

    def get_outputs(self) -> List[Output]:
        """Return all outputs in the order in which they were bound."""
        return [Output(array) for array in self.outputs.values()]

    def _new(self) -> np.ndarray:
        rows, new = next(iter(self.inputs.values())).shape[:2]
        sizes = {B: rows, S: new, R: self.inputs["logits_index"].shape[1] if "logits_index" in self.inputs else 0}
        return np.zeros([axis if isinstance(axis, int) else sizes[axis] for axis in self._output.axes], self._output.dtype)


class OpenVinoSession:
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
        self._run = self._run_rows if ONE_ROW in manifest.operators else self._run_whole

    def io_binding(self) -> Binding:
        """Return a binding without inputs and outputs."""
        return Binding(self._manifest.outputs[0])

    def run_with_iobinding(self, binding: Binding) -> None:
        """Run the graph on bound memory.

        Raises:
            RuntimeError: OpenVINO failed.
        """
        try:
            request = self._idle.pop()
        except IndexError:
            request = self._compiled.create_infer_request()
        self._run(request, binding)
        self._idle.append(request)

    def _run_whole(self, request: Any, binding: Binding) -> None:
        _infer(request, binding.inputs, binding.outputs)

    def _run_rows(self, request: Any, binding: Binding) -> None:
        """Run each row alone and without padding. For caches in place the graph returns a copy of the valid slots, from which the new slots are copied."""
        rows, new = binding.inputs[self._manifest.inputs[0].name].shape[:2]
        copied = {state.present for state in self._in_place}
        for row in range(rows):
            total = self._total(binding.inputs, row)
            count = min(new, total)  # less than `new` for a row with padding, which has no earlier tokens (Reader)
            inputs = {name: self._part(name, array, row, count) for name, array in binding.inputs.items()}
            if "total_sequence_length" in inputs:
                inputs["total_sequence_length"] = np.array(total, np.int32)
            _infer(request, inputs, {name: self._part(name, array, row, count) for name, array in binding.outputs.items() if name not in copied})
            for state in self._in_place:
                fresh = (slice(None),) * (state.axis - 1) + (slice(total - count, total),)
                binding.outputs[state.present][(row, *fresh)] = request.get_tensor(state.present).data[(0, *fresh)]

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


def _at(dtype: Any, shape: Sequence[int], address: int) -> np.ndarray:
    """Return a view of memory as an array."""
    count, dtype = int(np.prod(shape)), np.dtype(dtype)
    return np.frombuffer((ctypes.c_byte * (count * dtype.itemsize)).from_address(address), dtype).reshape(shape)
