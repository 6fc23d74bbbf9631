"""The kernels that run a graph: one for each geometry of an operator that has a contract."""

import math
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from posenc_export.runtime.artefact.manifest import Manifest
from posenc_export.runtime.graphs import onnx_nodes, onnx_parts
from posenc_export.runtime.graphs.onnx_nodes import TYPES, Node
from posenc_export.runtime.graphs.ort_options import in_float32
from posenc_export.runtime.verification import constants, described
from posenc_export.runtime.verification.conformance.attention import INPUTS, INTEGERS
from posenc_export.runtime.verification.conformance.operators import CACHED, CONTRACTS, LEAST
from posenc_export.runtime.verification.conformance.trial import Attributes, Kernel, Step, Stored
from posenc_export.runtime.verification.integer_graph import integer_part

FOLDED = {*constants.FOLDED, "Reshape", "DequantizeLinear"}
SUMS, BLOCKED = ("CumSum", "ReduceSum"), ("MatMulNBits", "QMoE")
PRODUCTS = (*BLOCKED, "MatMul", "MatMulIntegerToFloat", "GatherBlockQuantized")
ON_FLOATS = (*CACHED, "Attention", "RotaryEmbedding")
LIKE_FIRST = ("Unsqueeze", "Expand", "Reshape", "Transpose", "Slice", "Concat", "Gather")
TRUE_OR_FALSE = ("And", "Or", "Not", "Less", "LessOrEqual", "Greater", "GreaterOrEqual", "Equal")
# Outputs are computed alike, in tiles, and experts, too: of larger weights some are left out.
MOST, TILE, EXPERTS = 1 << 22, 256, 8
FEW = 4  # numbers of a constant that are kept


class Left(Exception):
    """A kernel that is not compared; says why."""


@dataclass
class Kernels:
    """The kernels of a graph, each with the first node that it runs. By node, what is wrong with
    it, or why it has no contract.
    """

    contracts: dict[Kernel, str] = field(default_factory=dict)
    wrong: dict[str, str] = field(default_factory=dict)
    skipped: dict[str, str] = field(default_factory=dict)


def kernels(folder: Path, manifest: Manifest) -> Kernels:
    """Return the kernels of model.onnx in a folder. Raise OSError, or ValueError if it or its
    manifest is no model.
    """
    graph, result = Graph(folder, manifest), Kernels()
    for node in graph.nodes.nodes:
        nodes = graph.with_makers(node)
        if not nodes:
            continue
        read = [name for part in reversed(nodes) for name in part.inputs]
        stored = (name for name in read if name in graph.nodes.constants)
        layer = graph.layers.get(node.outputs[0], -1)
        of = f"of layer {layer}" if layer >= 0 else next(stored, node.outputs[0])
        level = node.attributes.get("accuracy_level", 0)
        wanted = graph.level if node.operator == "MatMulNBits" else 0
        if node.operator in BLOCKED and level != wanted:
            wrong = f"accuracy_level {level} in place of {wanted}, as the manifest says"
            result.wrong[f"{node.operator} {of}"] = wrong
            continue
        try:
            result.contracts.setdefault(graph.kernel(nodes), f"{node.operator} {of}")
        except Left as why:
            result.skipped[f"{node.operator} {of}"] = str(why)
    return result


class Graph:
    """The nodes and constants of the graph of an artefact, without subgraphs."""

    def __init__(self, folder: Path, manifest: Manifest) -> None:
        part = integer_part(onnx_nodes.read_nodes(folder / "model.onnx"))
        self.nodes, self.folder, self.manifest = part.graph, folder, manifest
        pairs = ((output, node) for node in self.nodes.nodes for output in node.outputs)
        self.makers: dict[str, Node] = dict(pairs)
        self.layers = {node.outputs[0]: layer for node, layer in part.attention}
        self.integers = {node.outputs[0] for node in part.nodes}
        folded = onnx_parts.constant_nodes(self.nodes)
        self.folded: set[str] = {name for node in folded for name in node.outputs}

    @property
    def level(self) -> int:
        """accuracy_level of products, by the manifest."""
        weights = self.manifest.weights
        return LEAST if weights and weights.activations == "int8" else 0

    def with_makers(self, node: Node) -> list[Node]:
        """Return a node that has a contract, after the nodes before it that its kernel runs, too;
        no nodes for others.
        """
        operator, constants, weight = node.operator, self.nodes.constants, node.inputs[1:2]
        if operator not in CONTRACTS or not self.folded.isdisjoint(node.outputs):
            return []
        if operator in SUMS and node.outputs[0] not in self.integers:
            return []
        makers = [self.makers.get(name, Node()) for name in node.inputs]
        if operator == "DequantizeLinear":
            gathers = {part.operator for part in makers} == {"Gather"}
            stored = gathers and all(part.inputs[0] in constants for part in makers)
            return [*makers, node] if stored else []
        if operator == "MatMul" and not (
            makers[1].operator == "DequantizeLinear" and makers[1].outputs[0] in self.folded
        ):
            if self.element(weight[0]) != "float16" or weight[0] not in {*constants, *self.folded}:
                return []
        rounded = makers[:1] if operator == "MatMulIntegerToFloat" else []
        return [*rounded, *(self._folded(node) if operator in PRODUCTS else ()), node]

    def _folded(self, node: Node) -> list[Node]:
        """Return the nodes that compute inputs of a node from constants."""
        made = [self.makers[name] for name in node.inputs if name in self.folded]
        nodes = [part for maker in made for part in (*self._folded(maker), maker)]
        return [*{part.outputs[0]: part for part in nodes}.values()]

    def kernel(self, nodes: list[Node]) -> Kernel:
        """Return the kernel of nodes. Raise Left if it has no contract."""
        node, names = nodes[-1], {"": ""}
        contract = CONTRACTS[node.operator]
        others = [*({*node.attributes} - {*contract.attributes.split()})]
        others += filter(None, node.inputs[contract.inputs :])
        if others:
            raise Left(f"{', '.join(sorted(others))}: not in the contract")
        if node.operator in ON_FLOATS and self.manifest.dtype != "float32":
            raise Left(f"in {self.manifest.dtype}, which is not in the contract")
        steps, free, constants, sizes = [], {}, [], self._sizes(node)
        for number, part in enumerate(nodes):
            for index, name in enumerate(part.inputs):
                if name in names:
                    continue
                names[name] = f"{number}.{index}"
                if name in self.nodes.constants and node.operator not in ON_FLOATS:
                    constants.append(self._stored(name, names[name]))
                else:
                    free[names[name]] = self._free(part, index)
            outputs = part.outputs[:3] if part.operator == CACHED[0] else part.outputs  # no scores
            names |= {name: f"{number}:{index}" for index, name in enumerate(outputs)}
            reads, writes = (tuple(names[n] for n in ends) for ends in (part.inputs, outputs))
            steps.append(Step(part.operator, reads, writes, _attributes(part), part.domain))
        if contract.computed not in (-1, len(free)) or not self._is_written(nodes):
            raise Left("in another layout than the exporter writes")
        plain = "accuracy_level" in sizes and not self.level
        bits = 4 if any(value.element == "int4" for value in constants) else 8
        entries = (in_float32(bits),) if plain else ()
        opset = self.nodes.opsets.get("", 0)
        parts = tuple(steps), tuple(constants), tuple(free.items()), tuple(sizes.items())
        return _reduced(Kernel(*parts, entries, opset))

    def _is_written(self, nodes: list[Node]) -> bool:
        """Return whether nodes are those that the exporter writes for an operator."""
        node, before = nodes[-1], nodes[0]
        known, stored = node.attributes, self.nodes.constants
        block = before.attributes.get("block_size", 0)
        if node.operator in PRODUCTS and not {p.operator for p in self._folded(node)} <= FOLDED:
            return False
        if node.operator == "QMoE":
            return (known.get("activation_type"), known.get("swiglu_fusion")) == ("swiglu", 1)
        if node.operator == "GatherBlockQuantized":
            axes = known.get("gather_axis"), known.get("quantize_axis")
            return axes == (0, len(stored[node.inputs[0]].shape) - 1)
        if node.operator == "DequantizeLinear":
            rows = stored[before.inputs[0]]
            return (known.get("axis"), rows.element) == (2, "int8") and "block_size" in known
        if node.operator == "MatMulIntegerToFloat":
            return before.operator == "QuantizeLinear"
        if node.operator == "MatMul" and before.operator == "DequantizeLinear":
            shapes = [len(stored[name].shape) for name in before.inputs[:2] if name in stored]
            whole = self.element(before.inputs[0]) in ("int4", "int8")
            axis = before.attributes.get("axis", 1)
            return whole and (axis, shapes) == ((0, [2, 2]) if block else (1, [2, 1]))
        if node.operator not in SUMS:
            return True
        axis = stored.get(node.inputs[-1])
        numbers = [] if axis is None else axis.array(self.folder).reshape(-1).tolist()
        return len(numbers) == 1 and -2 <= numbers[0] < 2  # of [B,S]

    def _stored(self, name: str, other: str) -> Stored:
        value = self.nodes.constants[name]
        count, whole = math.prod(value.shape), value.element in ("int32", "int64")
        kept = len(value.shape) < 2 and (count == 1 or (whole and count <= FEW))
        values = value.array(self.folder).reshape(-1).tolist() if kept else ()
        return Stored(other, value.element, value.shape, tuple(values))

    def _free(self, node: Node, index: int) -> str:
        """Return the element type of an input that is no constant."""
        if node.operator in CACHED:
            caches = self.manifest.cache or "float"
            return caches if index in (3, 4) else INTEGERS.get(INPUTS[index], "float")
        places = (("RotaryEmbedding", 3), ("TensorScatter", 2), ("CumSum", 0), ("ReduceSum", 0))
        of = 0 if node.operator == "TensorScatter" else index  # tokens are in the type of the state
        return "int64" if (node.operator, index) in places else self.element(node.inputs[of])

    def element(self, name: str) -> str:
        """Return the element type of a value, as far as its node tells; otherwise that of
        activations.
        """
        if node := self.makers.get(name):
            if node.operator == "Cast":
                return TYPES.get(node.attributes["to"], "float")
            if node.operator in LIKE_FIRST or node.operator == "Where":
                return self.element(node.inputs[node.operator == "Where"])
            if node.element or node.operator in TRUE_OR_FALSE:
                return node.element or "bool"
        stored = self.nodes.constants.get(name)
        dtype = {"float32": "float"}.get(self.manifest.dtype, self.manifest.dtype)
        return stored.element if stored else self.nodes.inputs.get(name, dtype)

    def _sizes(self, node: Node) -> dict[str, Any]:
        """Return the sizes of inputs of a node, as far as its constants do not tell."""
        known, states = node.attributes, {state.past: state.axes for state in self.manifest.states}
        if node.operator == "MatMul":
            quantized = self.makers.get(node.inputs[1], Node()).operator == "DequantizeLinear"
            return {"accuracy_level": self.level} if quantized else {}
        if node.operator == "TensorScatter":
            if node.inputs[0] not in states:
                raise Left("writes no state")
            return {"rank": len(states[node.inputs[0]])}
        if node.operator not in ON_FLOATS:
            return {}
        layer = self.layers.get(node.outputs[0], 0)
        heads = kv_heads = size = value_size = 0
        parts = [] if described.is_read(self.manifest) else described.attentions(self.manifest)
        if 0 <= layer < len(parts):
            heads, kv_heads = parts[layer]["heads"], parts[layer]["kv_heads"]
            size = value_size = parts[layer]["head_size"]
        axes: list[Any] = [
            states.get(f"past_key_values.{layer}.{kind}", []) for kind in ("key", "value")
        ]
        if [len(part) for part in axes] == [4, 4]:
            kv_heads, size, value_size = int(axes[0][1]), int(axes[0][3]), int(axes[1][3])
        heads = known.get("q_num_heads", known.get("num_heads", heads))
        if not (heads and size):
            raise Left("its heads are not known")
        tables = self.nodes.constants
        shapes = [tables[name].shape if name in tables else (0, 0) for name in node.inputs]
        if node.operator == "RotaryEmbedding":
            part = int(known.get("rotary_embedding_dim", 0))
            pairs = shapes[1][-1] or (part or size) // 2
            return {"heads": heads, "size": size if part else 2 * pairs, "pairs": pairs}
        sizes = {"size": size, "value_size": value_size}
        if node.operator == "Attention":
            kv_heads = known.get("kv_num_heads", kv_heads)
            return {"heads": heads, "kv_heads": kv_heads, **sizes}
        shapes += [(0, 0)] * len(INPUTS)
        sizes["rotary"] = 2 * shapes[INPUTS.index("cos")][1] * known.get("do_rotary", 0)
        sizes["range"] = shapes[INPUTS.index("distances")][1]
        sizes["row_range"] = shapes[INPUTS.index("row_of_distance")][0]
        return {**sizes, "cache": self.manifest.cache}


def _attributes(node: Node) -> Attributes:
    """Return the attributes of a node, but for those that say nothing of what it computes."""
    known = dict(sorted(node.attributes.items()))
    known.pop("qk_output", None)
    if node.operator == "Transpose" and known.get("perm") == [1, 0]:  # as without it
        known.pop("perm")
    if any(isinstance(value, list) for value in known.values()):
        raise Left("an attribute with several numbers")
    return tuple(known.items())


def _reduced(kernel: Kernel) -> Kernel:
    """Return a kernel with fewer outputs, rows or experts if its weights are large."""
    drawn = [value for value in kernel.constants if not value.values]
    if not drawn:
        return kernel
    largest, step = max(drawn, key=lambda value: math.prod(value.shape)), kernel.nodes[-1]
    turned = kernel.operator == "MatMul" and kernel.nodes[0].operator != "Transpose"
    axis = -1 if turned or kernel.operator == "MatMulIntegerToFloat" else 0
    count = largest.shape[axis]
    tiles = max(MOST * count // math.prod(largest.shape) // TILE, 1)
    kept = min(count, tiles * TILE + count % TILE)
    if kernel.operator == "QMoE":
        kept = min(count, max(EXPERTS, dict(step.attributes)["k"] + 1))

    def fewer(value: Stored) -> Stored:
        shape = list(value.shape)
        if not value.values and shape[axis] == count:
            shape[axis] = kept
        return value._replace(shape=tuple(shape))

    attributes = tuple((k, kept if k == "N" else v) for k, v in step.attributes)
    nodes = (*kernel.nodes[:-1], step._replace(attributes=attributes))
    return replace(kernel, nodes=nodes, constants=tuple(map(fewer, kernel.constants)))
