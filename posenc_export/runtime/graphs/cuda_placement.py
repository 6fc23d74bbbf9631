"""Where ONNX Runtime's CUDA provider would run the nodes of a graph, found without a device.

The kernels are those of cuda_kernels.json, which tests/cuda_dry_run/tables.py reads from the
provider of one version of onnxruntime-gpu. The rules are those of that version: a node without a
kernel runs on the CPU, and so do nodes that only compute shapes; a value that is made on one side
and read on the other is copied. Neither outputs nor times follow from it.
"""

import functools
import json
import math
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple, Sequence

from posenc_export.runtime.graphs.onnx_nodes import TYPES, Node, Nodes, read_nodes

TABLE = Path(__file__).with_name("cuda_kernels.json")
SMALL = 100  # most elements of a constant that a shape computation reads on the CPU
NOT_FOR_CPU = ("float16", "bfloat16")  # element types that shape computations do not have
# Products of several matrices on both sides. If the numbers of matrices differ, the provider copies
# the addresses of all pairs from memory of the host, which it reuses after the run: a captured step
# would repeat the copy, and multiply other matrices.
PRODUCTS = ("MatMul", "FusedMatMul")
# Where a value is. CALLER: graph inputs, which are copied to where they are read.
DEVICE, HOST, CALLER, CONSTANT = "device", "host", "caller", "constant"


class Kernels(NamedTuple):
    """The kernels of one version of an operator."""

    # A type parameter or an element type for each input and output; "..." repeats the last one.
    takes: list[str]
    gives: list[str]
    # Element types of the type parameters, separated by spaces, for each kernel
    types: list[dict[str, str]]
    host_inputs: list[int]  # indices of inputs and outputs in host memory
    host_outputs: list[int]


@dataclass
class Placement:
    """Nodes of a graph, without those that ONNX Runtime computes when it loads the graph."""

    nodes: int = 0  # their number
    # Operators of nodes that compute shapes, which run on the CPU
    on_cpu: list[str] = field(default_factory=list)
    # Nodes without a kernel for their element types, as text; they run on the CPU too
    without_kernel: list[str] = field(default_factory=list)
    # Nodes that have a kernel which refuses them when it runs, as text
    refused: list[str] = field(default_factory=list)
    control_flow: list[str] = field(default_factory=list)  # operators with subgraphs
    # Products whose matrices the provider may address from the host (PRODUCTS)
    addressed: list[str] = field(default_factory=list)
    to_host: list[str] = field(default_factory=list)  # values that are copied in each run
    to_device: list[str] = field(default_factory=list)

    @property
    def copied(self) -> int:
        """Number of copies in each run."""
        return len(self.to_host) + len(self.to_device)

    @property
    def runs(self) -> bool:
        """Whether no node lacks a kernel or is refused."""
        return not self.without_kernel and not self.refused

    @property
    def captured(self) -> bool:
        """Whether a run of unchanged shapes and buffers can be captured as a CUDA graph."""
        return self.runs and not self.copied and not self.control_flow and not self.addressed

    def said(self, grows: bool = False) -> str:
        """Describe the placement in one line. grows: whether a step changes shapes of caches."""
        if not self.runs:
            nodes = Counter(self.without_kernel).items()
            numbers = [f" ({count} nodes)" if count > 1 else "" for _, count in nodes]
            lacking = [f"no kernel for {n}{k}" for (n, _), k in zip(nodes, numbers, strict=True)]
            return "cannot run: " + "; ".join([*lacking, *dict.fromkeys(self.refused)])
        run = "runs" if len(self.on_cpu) == 1 else "run"
        copies = f"{self.copied} {'copy' if self.copied == 1 else 'copies'} a step"
        can = "can" if self.captured and not grows else "cannot"
        on_cpu = f"{len(self.on_cpu)} of {self.nodes} nodes {run} on the CPU"
        return f"{on_cpu}, {copies}, {can} be captured"


@functools.cache
def table() -> tuple[str, dict[tuple[str, str], dict[int, Kernels]]]:
    """Return the version of onnxruntime-gpu; its kernels by operator, then by its first version."""
    content = json.loads(TABLE.read_text(encoding="utf-8"))
    kernels_of: dict[tuple[str, str], dict[int, Kernels]] = {}
    for domain, operator, version, *kernels in content["rows"]:
        kernels_of.setdefault((domain, operator), {})[version] = Kernels(*kernels)
    return content["onnxruntime"], kernels_of


def placed(file: Path) -> Placement:
    """Place the nodes of an ONNX file. Raise ValueError if it is no protocol buffer, or OSError."""
    graph = read_nodes(file)
    planner = _Planner(graph.opsets)
    planner.add(graph, outermost=True)
    return planner.finish()


class _Planner:
    """Places nodes in the order of the graph."""

    def __init__(self, opsets: dict[str, int]) -> None:
        self.opsets, self.placement = opsets, Placement()
        self.types: dict[str, str] = {}  # element type of each value, "" if unknown
        self.at: dict[str, str] = {}  # where each value is
        self.small: set[str] = set()
        self.matrices: set[str] = set()  # constants of several matrices
        self.shapes: set[str] = set()  # values on the host that come from shapes alone
        self.readers: dict[str, set[str]] = {}  # where each value is read

    def add(self, graph: Nodes, outermost: bool = False) -> None:
        for name, constant in graph.constants.items():
            self.types[name], self.at[name] = constant.element, CONSTANT
            self.small |= {name} if math.prod(constant.shape) <= SMALL else set()
            self.matrices |= {name} if len(constant.shape) > 2 else set()
        for name, element in graph.inputs.items():
            self.types[name], self.at[name] = element, CALLER if outermost else DEVICE
        for node in graph.nodes:
            self._add_node(node)

    def finish(self) -> Placement:
        """Count copies of values read on the other side, or, of graph inputs, on both."""
        for name, sides in self.readers.items():
            where = self.at[name]
            if where == DEVICE and HOST in sides:
                self.placement.to_host.append(name)
            elif (where == HOST and DEVICE in sides) or (where == CALLER and len(sides) == 2):
                self.placement.to_device.append(name)
        return self.placement

    def _add_node(self, node: Node) -> None:
        names = [name for name in node.inputs if name]
        versions = table()[1].get((node.domain, node.operator), {})
        opset = self.opsets.get(node.domain, 1)
        kernels = versions.get(max((v for v in versions if v <= opset), default=-1))
        types = None if kernels is None else self._matched(node, kernels)
        constant = all(self.at.get(name) == CONSTANT for name in names)
        if constant and not node.bodies:  # computed when the graph is loaded
            self._give(node, CONSTANT, types or [node.element])
            self.small |= set(node.outputs)
            return
        self.placement.nodes += 1
        if kernels is None or types is None:
            elements = " ".join(self.types.get(name, "") or "?" for name in names)
            self.placement.without_kernel.append(f"{node.operator} of {elements}")
            self._read(names, HOST)
            self._give(node, HOST, [])
        elif self._computes_shape(node, kernels):
            self.placement.on_cpu.append(node.operator)
            self._read(names, HOST)
            self._give(node, HOST, types)
            self.shapes |= set(node.outputs)
        else:
            self._on_device(node, kernels, types)

    def _on_device(self, node: Node, kernels: Kernels, types: Sequence[str]) -> None:
        self.placement.refused += refusals(node)
        if node.operator in PRODUCTS and not self.matrices.isdisjoint(node.inputs[:2]):
            self.placement.addressed.append(node.operator)
        for index, name in enumerate(node.inputs):
            self._read([name] if name else [], HOST if index in kernels.host_inputs else DEVICE)
        self._give(node, DEVICE, types)
        for index in kernels.host_outputs:
            self.at[node.outputs[index]] = HOST
            self.shapes.add(node.outputs[index])
        if node.bodies:
            self.placement.control_flow.append(node.operator)
            for body in node.bodies:
                self.add(body)
                self._read(body.outputs, DEVICE)
            for name, inner in zip(node.outputs, node.bodies[0].outputs, strict=False):
                self.types[name] = self.types.get(inner, "")

    def _read(self, names: Sequence[str], side: str) -> None:
        for name in names:
            if self.at.get(name, CONSTANT) != CONSTANT:
                self.readers.setdefault(name, set()).add(side)

    def _give(self, node: Node, where: str, types: Sequence[str]) -> None:
        for index, name in enumerate(node.outputs):
            self.at[name], self.types[name] = where, types[index] if index < len(types) else ""

    def _computes_shape(self, node: Node, kernels: Kernels) -> bool:
        """Whether a node reads nothing but small constants, graph inputs and values from shapes."""

        def readable(index: int, name: str) -> bool:
            of_shape = name in self.shapes and index not in kernels.host_inputs
            known = name in self.small or self.at[name] == CALLER or of_shape
            return known and self.types.get(name, "") not in NOT_FOR_CPU

        names = [(index, name) for index, name in enumerate(node.inputs) if name]
        if node.bodies or not any(name in self.shapes for _, name in names):
            return False
        return all(readable(*place) for place in names)

    def _matched(self, node: Node, kernels: Kernels) -> list[str] | None:
        """Return the output types of the first kernel that takes the inputs, or None."""
        if node.bodies:
            return [""] * len(node.outputs)
        takes = _repeated(kernels.takes, len(node.inputs))
        bound: dict[str, str] = {}
        for name, parameter in zip(node.inputs, takes, strict=False):
            element = self.types.get(name, "")
            if name and element and bound.setdefault(parameter, element) != element:
                return None  # inputs of one parameter with different types
        if node.operator == "Cast":
            bound[kernels.gives[0]] = TYPES.get(node.attributes["to"], "")
        elif node.element:  # of ConstantOfShape
            bound[kernels.gives[0]] = node.element
        for types in kernels.types:
            if all(bound.get(name, "") in ("", *kinds.split()) for name, kinds in types.items()):
                only = {name: "" if " " in kinds else kinds for name, kinds in types.items()}
                outputs = _repeated(kernels.gives, len(node.outputs))
                return [bound.get(name) or only.get(name, name) for name in outputs]
        return None


def _repeated(parameters: list[str], count: int) -> list[str]:
    if "..." in parameters:
        return [*parameters[:-1], *[parameters[-2]] * count][:count]
    return [*parameters, *parameters[-1:] * count][:count]


def refusals(node: Node) -> list[str]:
    """Return why the kernel of a node returns an error in every run."""
    there = [bool(name) for name in node.inputs] + [False] * 16
    reasons = []
    if node.operator == "GroupQueryAttention" and there[10] and there[11]:
        reasons.append("GroupQueryAttention with attention_bias does not take head_sink (sinks)")
    if node.operator == "GroupQueryAttention" and len(node.outputs) > 3:
        reasons.append("GroupQueryAttention does not give output_qk")
    if node.operator == "GRU" and not node.attributes.get("linear_before_reset"):
        reasons.append("GRU needs linear_before_reset 1")
    return reasons
