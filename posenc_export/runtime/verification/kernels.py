"""Nodes that are compared with the documented arithmetic of their operator (contracts.py)."""

import platform
from dataclasses import dataclass
from pathlib import Path
from typing import Callable, Dict, Mapping, Optional, Sequence, Tuple

import numpy as np

from posenc_export.runtime.artefact.manifest import Manifest
from posenc_export.runtime.graphs.onnx_nodes import Node, Nodes
from posenc_export.runtime.verification import contracts
from posenc_export.runtime.verification.contracts import Blocks
from posenc_export.runtime.verification.decoding import dequantized, of_blocks, split

Record = Mapping[str, np.ndarray]  # values of a call by name
UNMOVED = ("Cast", "Unsqueeze", "Reshape")  # keep the order of scales, and float16 as float32
LEVELS = {"int8": 4}  # accuracy_level by activations of the manifest; 0 for others
# Block of activations of a product whose weight has one scale per output
# (session.qdq_matmulnbits_block_size).
BLOCK = 32


@dataclass(frozen=True)
class CheckedNode:
    """A node that is compared."""

    name: str  # of the operator and its weight
    output: str  # name of the value whose numbers are compared
    reads: Tuple[str, ...]  # names of the values that must be recorded beside it
    # Returns the errors over bounds of the outputs of each token [M] of some calls
    ratios: Callable[[Sequence[Record]], np.ndarray]
    wrong: str = ""  # what is wrong with its attributes; empty for nothing
    # Nodes that compute the outputs from the first of `reads`. They run as a graph of their own, on
    # the recorded inputs, and the outputs are not recorded; empty if they are.
    alone: Tuple[Node, ...] = ()
    # Attributes that its contract does not describe, so that it is not compared; empty for none
    skipped: str = ""


class Graph:
    """The nodes and constants of the graph of an artefact."""

    def __init__(self, nodes: Nodes, folder: Path, manifest: Manifest) -> None:
        self.nodes, self.folder, self.manifest = nodes, folder, manifest
        pairs = ((output, node) for node in nodes.nodes for output in node.outputs)
        self.makers: Dict[str, Node] = dict(pairs)

    @property
    def level(self) -> int:
        """accuracy_level of products, by the manifest."""
        return LEVELS.get(self.manifest.weights.activations, 0) if self.manifest.weights else 0

    def maker(self, name: str, *operators: str) -> Optional[Node]:
        """Return the node that computes a value, if it has one of some operators."""
        node = self.makers.get(name)
        return node if node is not None and node.operator in operators else None

    def source(self, name: str) -> str:
        """Return the constant whose numbers a value has in the same order; empty if computed."""
        node = self.maker(name, *UNMOVED)
        return self.source(node.inputs[0]) if node else name if self.stored(name) else ""

    def stored(self, name: str) -> bool:
        """Whether a value is a constant of the file."""
        return name in self.nodes.constants

    def numbers(self, name: str) -> np.ndarray:
        """Return the numbers of a value that has those of a constant."""
        return self.nodes.constants[self.source(name)].array(self.folder)


def rows(records: Sequence[Record], name: str) -> np.ndarray:
    """Return a value [...,n] of all calls as [M,n]."""
    return np.concatenate([call[name].reshape(-1, call[name].shape[-1]) for call in records])


def _input(node: Node, index: int) -> str:
    return node.inputs[index] if index < len(node.inputs) else ""


def _by_block(graph: Graph, node: Node) -> CheckedNode:
    x, codes, scales, output = (*node.inputs[:3], node.outputs[0])
    zeros, bits = _input(node, 3), int(node.attributes["bits"])
    level = int(node.attributes.get("accuracy_level", 0))

    def weights() -> Blocks:
        stored = graph.numbers(codes)
        scale = graph.numbers(scales).reshape(stored.shape[:2]).astype(np.float32)
        unsigned, points = split(stored, scale, graph.numbers(zeros) if zeros else None, bits)
        return Blocks(unsigned, scale, points, bits, int(node.attributes["K"]))

    wrong = ""
    if level != graph.level:
        wrong = f"accuracy_level {level} in place of {graph.level}, as the manifest says"
    elif any(_input(node, index) for index in (4, 5)):
        wrong = "inputs g_idx or bias, which no product of the exporter has"
    return _product(f"MatMulNBits {codes}", x, output, weights, level, wrong)


def _product(
    name: str, x: str, output: str, weights: Callable[[], Blocks], level: int, wrong: str = ""
) -> CheckedNode:
    """A product with weights in blocks."""

    def ratios(records: Sequence[Record]) -> np.ndarray:
        read, inputs, outputs = weights(), rows(records, x), rows(records, output)
        if outputs.dtype == np.float16:
            return contracts.of_half(inputs, outputs, read.weight, _unit())
        contract = contracts.of_least if level == LEVELS["int8"] else contracts.of_float
        return contract(inputs, outputs, read)

    return CheckedNode(name, output, (x,), ratios, wrong)


def _multiplied(graph: Graph, node: Node) -> Optional[CheckedNode]:
    """A MatMul with a dequantized weight, or with one in float16."""
    x, weight, output = (*node.inputs, node.outputs[0])
    dequantized = graph.maker(weight, "DequantizeLinear")
    if dequantized and graph.stored(dequantized.inputs[0]):
        name = f"MatMul {dequantized.inputs[0]}"
        return _product(name, x, output, lambda: _transposed(graph, dequantized), graph.level)
    return _half(graph, node)


def _transposed(graph: Graph, node: Node) -> Blocks:
    """Return the weight [K,N] of a DequantizeLinear, by output."""
    inputs = (*node.inputs, "")[:3]
    codes, scales, zeros = (graph.numbers(name) if name else None for name in inputs)
    assert codes is not None and scales is not None
    block = int(node.attributes.get("block_size", 0))
    bits = 4 if graph.nodes.constants[node.inputs[0]].element == "int4" else 8
    half, (inputs, outputs) = 1 << (bits - 1), codes.shape
    blocks = -(-inputs // (block or BLOCK))
    padded = np.pad(codes, ((0, blocks * (block or BLOCK) - inputs), (0, 0)))
    shape = (blocks, outputs)
    points = np.zeros(shape, np.int16) if zeros is None else zeros.astype(np.int16)
    return Blocks(
        (padded.T.astype(np.int16) + half).reshape(outputs, blocks, -1),
        np.broadcast_to(scales, shape).T.astype(np.float32),
        np.broadcast_to(points, shape).T + half,
        bits,
        inputs,
    )


def _half(graph: Graph, node: Node) -> Optional[CheckedNode]:
    """A MatMul with a weight in float16. Within the graph, ONNX Runtime leaves out conversions to
    float16 between two nodes that compute in float32, so that the recorded values are rounded once
    more than those that the kernel reads. Its contract is that of the node alone.
    """
    x, weight, output = (*node.inputs, node.outputs[0])
    turned = graph.maker(weight, "Transpose")
    stored = turned.inputs[0] if turned else weight
    described = graph.nodes.constants.get(stored)
    if described is None or described.element != "float16" or len(described.shape) != 2:
        return None

    def ratios(records: Sequence[Record]) -> np.ndarray:
        numbers = graph.numbers(stored)
        numbers = numbers.T if turned else numbers
        return contracts.of_half(rows(records, x), rows(records, output), numbers, _unit())

    alone = (turned, node) if turned else (node,)
    return CheckedNode(f"MatMul {stored}", output, (x,), ratios, alone=alone)


def _unit() -> float:
    """Unit roundoff of sums of products in float16, in which processors of ARM may add."""
    arm = platform.machine().lower() in ("arm64", "aarch64")
    return contracts.HALF_UNIT if arm else contracts.UNIT


def _of_integers(graph: Graph, node: Node) -> Optional[CheckedNode]:
    """A MatMulIntegerToFloat, and the codes of its activations if a node rounds them."""
    codes, weight, of_x, scales, point = node.inputs[:5]
    output = node.outputs[0]
    rounding = graph.maker(codes, "QuantizeLinear")
    reads = tuple(rounding.inputs[:2]) if rounding else ()

    def ratios(records: Sequence[Record]) -> np.ndarray:
        zero = graph.numbers(point).astype(np.int16)
        signed = rows(records, codes).astype(np.int16) - zero
        product = graph.numbers(of_x).astype(np.float64) * graph.numbers(scales)
        ratio = contracts.of_integers(signed, rows(records, output), graph.numbers(weight), product)
        if reads:
            x, scale = (rows(records, name) for name in reads)
            ratio = np.maximum(ratio, contracts.of_codes(x, signed, scale))
        return ratio

    return CheckedNode(f"MatMulIntegerToFloat {weight}", output, (codes, *reads), ratios)


def _gathered(graph: Graph, node: Node) -> CheckedNode:
    codes, ids, scales, output = (*node.inputs[:3], node.outputs[0])
    zeros, bits = _input(node, 3), int(node.attributes["bits"])

    def ratios(records: Sequence[Record]) -> np.ndarray:
        at, y = _ids(records, ids), _flat(records, ids, output)
        *lead, size = graph.numbers(codes).shape
        tables = (graph.numbers(name) for name in (codes, scales, *([zeros] if zeros else [])))
        packed, scale, *others = (table.reshape(*lead, -1)[at] for table in tables)
        points = others[0] if others else None
        exact = of_blocks(packed, scale, points, bits, size * 8 // bits, "float64")
        return contracts.of_rows(y, exact.reshape(len(at), -1))

    return CheckedNode(f"GatherBlockQuantized {codes}", output, (ids,), ratios)


def _dequantized_rows(graph: Graph, node: Node) -> Optional[CheckedNode]:
    """A DequantizeLinear of codes, scales and zero points that Gather reads from tables."""
    gathers = [graph.maker(name, "Gather") for name in node.inputs]
    read = [gather.inputs for gather in gathers if gather]
    if len(read) < len(node.inputs) or len({ids for _, ids in read}) > 1:
        return None
    tables, ids, output = [table for table, _ in read], read[0][1], node.outputs[0]
    block = int(node.attributes["block_size"])

    def ratios(records: Sequence[Record]) -> np.ndarray:
        at, y = _ids(records, ids), _flat(records, ids, output)
        codes, scales, *zeros = (graph.numbers(table)[at] for table in tables)
        points = zeros[0] if zeros else None
        return contracts.of_rows(y, dequantized(codes, scales, points, 1, block, "float64"))

    return CheckedNode(f"DequantizeLinear {tables[0]}", output, (ids,), ratios)


def _ids(records: Sequence[Record], name: str) -> np.ndarray:
    return np.concatenate([call[name].reshape(-1) for call in records])


def _flat(records: Sequence[Record], ids: str, output: str) -> np.ndarray:
    return np.concatenate([call[output].reshape(call[ids].size, -1) for call in records])


CONTRACTS: Mapping[str, Callable[[Graph, Node], Optional[CheckedNode]]] = {
    "MatMulNBits": _by_block,
    "MatMul": _multiplied,
    "MatMulIntegerToFloat": _of_integers,
    "GatherBlockQuantized": _gathered,
    "DequantizeLinear": _dequantized_rows,
}
