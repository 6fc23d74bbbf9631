"""A kernel alone, and the calls that try whether it keeps its contract."""

import os
from dataclasses import dataclass
from typing import Any, Callable, Mapping, NamedTuple, Sequence

import numpy as np
import onnxruntime

from posenc_export.runtime.graphs import kernel_library
from posenc_export.runtime.graphs.onnx_nodes import Constant, Node, Nodes
from posenc_export.runtime.graphs.onnx_parts import new_node, serialised
from posenc_export.runtime.graphs.ort_options import SLOWER, options_of

DOMAINS = {"com.microsoft": 1, kernel_library.DOMAIN: 1}
Attributes = tuple[tuple[str, Any], ...]  # of a node, sorted by name
Feeds = dict[str, np.ndarray]
Outputs = list[np.ndarray]
Run = Callable[[Feeds], Outputs]
Values = dict[str, np.ndarray]
UNIT = 2.0**-24  # unit roundoff of float32


class Step(NamedTuple):
    """A node: the inputs have names "node.input", by number."""

    operator: str
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    attributes: Attributes = ()
    domain: str = ""

    @property
    def node(self) -> Node:
        """The node of a graph."""
        known = dict(self.attributes)
        return new_node(self.operator, self.inputs, self.outputs, known, self.domain)


class Stored(NamedTuple):
    """A constant, whose numbers are drawn unless it has few."""

    name: str
    element: str
    shape: tuple[int, ...]
    values: tuple[float, ...] = ()


@dataclass(frozen=True)
class Kernel:
    """The geometry of an operator: nodes that one kernel runs, of which the last has the contract,
    and all that it can depend on.

    Args:
        free: element types of inputs by name.
        sizes: of inputs, by name, as far as constants do not tell.
        entries: of the configuration of the session.
        opset: version of ai.onnx.
    """

    nodes: tuple[Step, ...]
    constants: tuple[Stored, ...]
    free: tuple[tuple[str, str], ...]
    sizes: tuple[tuple[str, Any], ...] = ()
    entries: tuple[tuple[str, str], ...] = ()
    opset: int = 23

    @property
    def operator(self) -> str:
        """The operator of the last node."""
        return self.nodes[-1].operator


class Case(NamedTuple):
    """Calls of a kernel: inputs, and the largest error over its bound of outputs."""

    feeds: Sequence[Feeds]
    ratio: Callable[[Feeds, Outputs], float]
    shared: Mapping[str, str] = {}  # outputs in the memory of inputs


def uniform(random: np.random.Generator, shape: Sequence[int]) -> np.ndarray:
    """Return numbers of size 1 in float32."""
    return random.uniform(-1, 1, shape).astype(np.float32)


class Trial(NamedTuple):
    """Calls of a kernel, and what its contract says of them."""

    kernel: Kernel
    nodes: Sequence[Node]
    constants: Sequence[Constant]  # whose numbers were drawn
    case: Case


def opened(trial: Trial, threads: int | None) -> Run:
    """Open a kernel alone, with the options of artefacts. threads: per operator; None uses all
    cores. Raise ValueError for a kernel that ends the process (ort_options.keep_exact).
    """
    stored, outputs = {value.name: value for value in trial.constants}, trial.nodes[-1].outputs
    graph = Nodes(constants=stored, opsets={"": trial.kernel.opset, **DOMAINS})
    shared = trial.case.shared
    content = serialised(graph, trial.nodes, outputs, free=dict(trial.kernel.free))
    native = any(node.domain == kernel_library.DOMAIN for node in trial.nodes)
    operators = {node.operator for node in trial.nodes}
    options = options_of(operators, trial.kernel.entries, threads, native)
    options.enable_cpu_mem_arena = False  # an arena keeps the memory of the largest call
    session = onnxruntime.InferenceSession(
        content, options, providers=["CPUExecutionProvider"], disabled_optimizers=SLOWER["cpu"]
    )

    def run(feeds: Feeds) -> Outputs:
        # The values have the memory of arrays, which calls change in place.
        values = {n: onnxruntime.OrtValue.ortvalue_from_numpy(a.copy()) for n, a in feeds.items()}
        binding = session.io_binding()
        for name, value in values.items():
            binding.bind_ortvalue_input(name, value)
        for name in outputs:
            if name in shared:
                binding.bind_ortvalue_output(name, values[shared[name]])
            else:
                binding.bind_output(name, "cpu")
        session.run_with_iobinding(binding)
        return [np.array(value.numpy()) for value in binding.get_outputs()]

    return run


def worst(trial: Trial, kernel: Callable[[Trial, int | None], Run] = opened) -> tuple[float, str]:
    """Return the largest error over its bound, which a right kernel keeps at or below 1, and what
    is wrong; empty for nothing. kernel: opens it.
    """
    known: dict[int, Outputs] = {}
    largest, text = 0.0, ""
    for threads in (1, None) if (os.cpu_count() or 1) > 1 else (1,):
        run = kernel(trial, threads)
        for call, feeds in enumerate(trial.case.feeds):
            outputs = run(feeds)
            if call in known and all(map(np.array_equal, outputs, known[call])):
                continue
            known[call], ratio = outputs, trial.case.ratio(feeds, outputs)
            if not ratio <= largest:
                largest = float(np.nan_to_num(ratio, nan=np.inf, posinf=np.inf))
                how = "one thread" if threads else "all cores"
                shapes = ("x".join(map(str, array.shape)) for array in feeds.values() if array.ndim)
                text = f"an error of {largest:.3g} times its bound for call {call} of "
                text += f"{', '.join(shapes)} on {how}"
    return largest, text if largest > 1 else ""
