"""OpenVINO behind those calls of an ONNX Runtime session that caches make: bindings of memory by address, and their runs.

Shapes: B rows, S new tokens, T tokens behind the call.
"""

import ctypes
from dataclasses import dataclass
from typing import Any, Dict, List, Sequence, Tuple

import numpy as np
import openvino

from posenc_export.runtime.manifest import Manifest, Value
from posenc_export.runtime.rules import B, R, S

ONE_ROW = "GroupQueryAttention"  # OpenVINO 2026.4 runs it for a single row without padding
Arrays = Dict[str, np.ndarray]


@dataclass(frozen=True)
class Output:
    """What a run wrote."""

    array: np.ndarray

    def numpy(self) -> np.ndarray:
        """The array itself."""
        return self.array


class Binding:
    """Memory of the inputs and outputs of a run. It is borrowed: the caller keeps it.

    Args:
        output: the one of the graph that is no state.
    """

    def __init__(self, output: Value) -> None:
        self._output = output
        self.inputs: Arrays = {}
        self.outputs: Arrays = {}

    def bind_input(self, name: str, device: str, number: int, dtype: Any, shape: Sequence[int], address: int) -> None:
        """Read an input from memory."""
        self.inputs[name] = _at(dtype, shape, address)

    def bind_output(self, name: str, device: str, number: int = 0, dtype: Any = None, shape: Sequence[int] = (), address: int = 0) -> None:
        """Write an output to memory; that of the graph to an array of the binding where no address is given."""
        self.outputs[name] = _at(dtype, shape, address) if address else self._new()

    def get_outputs(self) -> List[Output]:
        """All outputs, in the order in which they were bound."""
        return [Output(array) for array in self.outputs.values()]

    def _new(self) -> np.ndarray:
        rows, new = next(iter(self.inputs.values())).shape[:2]
        sizes = {B: rows, S: new, R: self.inputs["logits_index"].shape[1] if "logits_index" in self.inputs else 0}
        return np.zeros([axis if isinstance(axis, int) else sizes[axis] for axis in self._output.axes], self._output.dtype)


class OpenVinoSession:
    """Runs of a compiled graph. Sessions in several threads may share it: each run takes a request of its own.

    Args:
        compiled: openvino.CompiledModel.
        manifest: description of the graph.
    """

    def __init__(self, compiled: Any, manifest: Manifest) -> None:
        self._compiled, self._manifest = compiled, manifest
        self._idle: List[Any] = []  # requests that no run uses
        self._axes: Dict[str, Tuple[Any, ...]] = {value.name: value.axes for value in (*manifest.inputs, *manifest.encoder, *manifest.outputs)}
        self._axes |= {name: state.axes for state in manifest.states for name in (state.past, state.present)}
        self._in_place = [state for state in manifest.states if state.update == "in_place"]
        self._run = self._run_rows if ONE_ROW in manifest.operators else self._run_whole

    def io_binding(self) -> Binding:
        """Nothing bound."""
        return Binding(self._manifest.outputs[0])

    def run_with_iobinding(self, binding: Binding) -> None:
        """Run the graph on bound memory.

        Raises:
            RuntimeError: of OpenVINO.
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
        """Row by row, each without its padding. Of states written in place, the graph gives a copy of the valid slots: the new ones are taken from it."""
        rows, new = binding.inputs[self._manifest.inputs[0].name].shape[:2]
        copied = {state.present for state in self._in_place}
        for row in range(rows):
            total = self._total(binding.inputs, row)
            count = min(new, total)  # a row with padding holds nothing else
            inputs = {name: self._part(name, array, row, count) for name, array in binding.inputs.items()}
            if "total_sequence_length" in inputs:
                inputs["total_sequence_length"] = np.array(total, np.int32)
            _infer(request, inputs, {name: self._part(name, array, row, count) for name, array in binding.outputs.items() if name not in copied})
            for state in self._in_place:
                fresh = (slice(None),) * (state.axis - 1) + (slice(total - count, total),)
                binding.outputs[state.present][(row, *fresh)] = request.get_tensor(state.present).data[(0, *fresh)]

    def _total(self, inputs: Arrays, row: int) -> int:
        """Slots T of a row in use behind the call, padding included where rows share columns."""
        return int(inputs["seqlens_k"][row]) + 1 if "seqlens_k" in inputs else inputs["attention_mask"].shape[1]

    def _part(self, name: str, array: np.ndarray, row: int, count: int) -> np.ndarray:
        """What belongs to a row and its first new tokens; a view where rows are the first axis."""
        chosen = {B: slice(row, row + 1), S: slice(count)}
        return np.ascontiguousarray(array[tuple(chosen.get(axis, slice(None)) for axis in self._axes[name])])


def _infer(request: Any, inputs: Arrays, outputs: Arrays) -> None:
    for name, array in (*inputs.items(), *outputs.items()):
        request.set_tensor(name, openvino.Tensor(array, shared_memory=True))
    request.infer()


def _at(dtype: Any, shape: Sequence[int], address: int) -> np.ndarray:
    """The numbers that stand in memory from an address on."""
    count, dtype = int(np.prod(shape)), np.dtype(dtype)
    return np.frombuffer((ctypes.c_byte * (count * dtype.itemsize)).from_address(address), dtype).reshape(shape)
