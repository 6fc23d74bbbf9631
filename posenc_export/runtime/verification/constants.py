"""Decode the numbers that a graph stores, where nodes read them, and compute digests of both.

The code follows the documentation of the operators (onnx.ai/onnx/operators, ContribOperators.md of
ONNX Runtime), and not the code that packs weights.
"""

import hashlib
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Callable, Iterator, Mapping, Sequence

import numpy as np

from posenc_export.runtime.graphs import kernel_library
from posenc_export.runtime.graphs.onnx_nodes import TYPES, Constant, Node, Nodes

MICROSOFT, LINEAR = "com.microsoft", "DequantizeLinear"
Codes = np.ndarray | None
GRAPH = "graph"  # key of the digest of all nodes with their attributes and connections


def unpacked(codes: np.ndarray, bits: int) -> np.ndarray:
    """Return unsigned codes, int16, from bytes [...,n]. The lower half of a byte comes first."""
    if bits == 8:
        return codes.astype(np.int16)
    if bits != 4:
        raise ValueError(f"graph: expected codes of 4 or 8 bits, got {bits}; export again")
    return np.stack([codes & 15, codes >> 4], axis=-1).reshape(*codes.shape[:-1], -1).astype("i2")


def of_blocks(
    codes: np.ndarray,
    scales: np.ndarray,
    zeros: np.ndarray | None,
    bits: int,
    inputs: int,
    dtype: str = "float32",
) -> np.ndarray:
    """Return (code - zero point) * scale of blocks along the last axis, computed in a dtype.

    Args:
        codes: bytes [...,bytes]; each block fills whole bytes.
        scales: [...,blocks].
        zeros: bytes of zero points in rows that fill whole bytes, or zero points in the dtype of
            scales; None for half the number of possible codes.
        inputs: number of codes of a row that are weights; the others are padding.
    """
    lead, blocks = scales.shape[:-1], scales.shape[-1]
    points: np.ndarray = np.full((*lead, blocks), 1 << (bits - 1), np.int16)
    if zeros is not None and zeros.dtype == np.uint8:
        points = unpacked(zeros.reshape(*lead, -1), bits)[..., :blocks]
    elif zeros is not None:
        points = zeros.reshape(*lead, blocks)
    unsigned = unpacked(codes.reshape(*lead, -1), bits)
    block = unsigned.shape[-1] // blocks
    return dequantized(unsigned, scales, points, -1, block, dtype)[..., :inputs]


def dequantized(
    codes: np.ndarray,
    scales: np.ndarray,
    zeros: np.ndarray | None,
    axis: int,
    block: int,
    dtype: str = "float32",
) -> np.ndarray:
    """Return the output of DequantizeLinear (opset 21), with scales per tensor, axis or block."""

    def spread(part: np.ndarray) -> np.ndarray:
        if block:
            repeated = np.repeat(part, block, axis)
            return repeated[(slice(None),) * axis + (slice(codes.shape[axis]),)]
        if part.ndim == 0 or part.shape == (1,):
            return part.reshape(())
        return part.reshape([-1 if dim == axis else 1 for dim in range(codes.ndim)])

    axis %= codes.ndim
    centred = codes.astype(np.int16)
    if zeros is not None:
        centred = centred - spread(zeros)
    return centred.astype(dtype) * spread(scales).astype(dtype)


def _cast(numbers: np.ndarray, node: Node) -> np.ndarray:
    element = TYPES[node.attributes["to"]]
    return numbers.astype({"float": "float32", "double": "float64"}.get(element, element))


# Operators on constants that are computed here, such as those of scales and offsets of blocks.
FOLDED: Mapping[str, Callable[..., np.ndarray]] = {
    "Cast": lambda node, x: _cast(x, node),
    "Transpose": lambda node, x: x.transpose(node.attributes.get("perm")),
    "Unsqueeze": lambda node, x, axes: np.expand_dims(x, tuple(axes.tolist())),
    "Add": lambda node, x, y: x + y,
    "Mul": lambda node, x, y: x * y,
}


@dataclass(frozen=True)
class Place:
    """The numbers that a node reads from stored constants, such as a weight."""

    node: Node  # that reads them
    role: str  # "input N" of the node, or "rows" for rows that are gathered before they are decoded
    names: tuple[str, ...]  # of the stored constants that they consist of
    numbers: np.ndarray  # decoded, in the shape in which the operator documents them
    decoded: bool = False  # whether they were decoded from codes

    @property
    def block(self) -> int:
        """Number of weights that share a scale."""
        return int(self.node.attributes["block_size"])

    def __str__(self) -> str:
        return f"{self.node.name} {self.role}, {' and '.join(self.names)}"


class Constants:
    """The constants of a graph and of its bodies; folder: of its external data."""

    def __init__(self, graph: Nodes, folder: Path) -> None:
        self.folder, self.graph = folder, graph
        self.stored = {**graph.constants}  # by name, that of the output of a node Constant
        self.nodes = [*graph.walk()]
        for node in self.nodes:
            value = node.attributes.get("value")
            if node.operator == "Constant" and isinstance(value, Constant):
                self.stored[node.outputs[0]] = value
            for body in node.bodies:
                self.stored.update(body.constants)
        self._makers = {name: node for node in self.nodes for name in node.outputs}
        self._known: dict[str, tuple[np.ndarray, tuple[str, ...]] | None] = {}
        self._rows = self._gathered_rows()

    @property
    def count(self) -> int:
        """Count of the stored numbers."""
        return sum(math.prod(constant.shape) for constant in self.stored.values())

    def array(self, name: str) -> np.ndarray:
        """Return the numbers of a stored constant."""
        return self.stored[name].array(self.folder)

    def value(self, name: str) -> tuple[np.ndarray, tuple[str, ...]] | None:
        """Return a constant, or a value that nodes FOLDED compute from constants, and the names of
        the constants. None for a value that depends on other nodes or on an input of the graph.
        """
        if name not in self._known:
            self._known[name] = self._computed(name)
        return self._known[name]

    def _computed(self, name: str) -> tuple[np.ndarray, tuple[str, ...]] | None:
        if name in self.stored:
            return self.array(name), (name,)
        node = self._makers.get(name)
        if node is None or node.domain or node.operator not in FOLDED:
            return None
        parts = [self.value(read) for read in node.inputs]
        known = [part for part in parts if part is not None]
        if len(known) < len(parts):
            return None
        numbers = FOLDED[node.operator](node, *(part[0] for part in known))
        return numbers, tuple(dict.fromkeys(name for _, names in known for name in names))

    def _gathered_rows(self) -> dict[str, list[str]]:
        """Return by output of a DequantizeLinear the tables of codes, scales and zero points whose
        rows it decodes, gathered by one index.
        """
        rows: dict[str, list[str]] = {}
        for node in self.nodes:
            makers = [self._makers.get(name, Node()) for name in node.inputs]
            of_rows = [m for m in makers if m.operator == "Gather" and not m.attributes.get("axis")]
            gathers = [maker for maker in of_rows if maker.inputs[0] in self.stored]
            if node.operator == LINEAR and gathers and gathers[0] is makers[0]:
                if len(gathers) < len(makers) or len({gather.inputs[1] for gather in gathers}) > 1:
                    rule = f"expected rows of one index of codes, scales and zeros at {node.name}"
                    raise ValueError(f"graph: {rule}, got others; export again")
                rows[node.outputs[0]] = [gather.inputs[0] for gather in gathers]
        return rows

    def decoded(self) -> Iterator[Place]:
        """Yield the weights that are decoded from codes, in the order of nodes. Raise ValueError
        for codes of an operator whose inputs are not as documented.
        """
        for node in self.nodes:
            if names := self._rows.get(node.outputs[0]):
                codes, scales, *zeros = (self.array(name) for name in names)
                block = node.attributes.get("block_size", 0)
                numbers = dequantized(codes, scales, zeros[0] if zeros else None, -1, block)
                yield Place(node, "rows", tuple(names), numbers, True)
                continue
            decode, groups = READERS.get((node.domain, node.operator), (None, ()))
            for indices in groups:
                if decode is None or (node.operator == LINEAR and not self.value(node.inputs[0])):
                    continue  # codes that the graph computes
                parts, read = self.read(node, indices)
                yield Place(node, f"input {indices[0]}", read, decode(node, *parts), True)

    def plain(self) -> Iterator[Place]:
        """Yield the other numbers that nodes read, in order of nodes. Results of nodes FOLDED on
        constants are yielded for the nodes that read them.
        """
        tables = {name for names in self._rows.values() for name in names}
        for node in self.nodes:
            if node.operator == "Constant" or self.value(node.outputs[0]) is not None:
                continue
            _, groups = READERS.get((node.domain, node.operator), (None, ()))
            codes = {index for indices in groups for index in indices}
            for index, name in enumerate(node.inputs):
                known = self.value(name) if name and index not in codes else None
                gathered = node.operator == "Gather" and index == 0 and name in tables
                if known is not None and not gathered:
                    yield Place(node, f"input {index}", known[1], known[0])

    def read(
        self, node: Node, indices: Sequence[int]
    ) -> tuple[list[np.ndarray | None], tuple[str, ...]]:
        """Return inputs of a node, None for those left out, and the names of their constants. Raise
        ValueError for a computed input.
        """
        parts: list[np.ndarray | None] = []
        names: list[str] = []
        for index in indices:
            name = node.inputs[index] if index < len(node.inputs) else ""
            known = self.value(name) if name else None
            if name and known is None:
                rule = f"graph: expected constant codes at {node.name} input {index}"
                raise ValueError(f"{rule}, got {name}, which is computed; export again")
            parts.append(None if known is None else known[0])
            names += [] if known is None else known[1]
        return parts, tuple(dict.fromkeys(names))


def _product(node: Node, codes: Codes, scales: Codes, zeros: Codes, order: Codes) -> np.ndarray:
    a = node.attributes
    if codes is None or scales is None or order is not None:
        rule = f"graph: expected codes and scales in the order of inputs at {node.name}"
        raise ValueError(f"{rule}, got others; export again")
    codes, scales = codes.reshape(a["N"], -1), scales.reshape(a["N"], -1)
    return of_blocks(codes, scales, zeros, a["bits"], a["K"])


def _rows(node: Node, codes: Any, scales: Any, zeros: Codes) -> np.ndarray:
    bits, block = node.attributes.get("bits", 4), node.attributes.get("block_size", 128)
    points = np.full(scales.shape, 1 << (bits - 1), np.int16)
    if zeros is not None:
        points = unpacked(zeros, bits)[..., : scales.shape[-1]]
    axis = node.attributes.get("quantize_axis", 1) % codes.ndim
    return dequantized(unpacked(codes, bits), scales, points, axis, block)


def _linear(node: Node, codes: Any, scales: Any, zeros: Codes) -> np.ndarray:
    axis, block = node.attributes.get("axis", 1), node.attributes.get("block_size", 0)
    return dequantized(codes, scales, zeros, axis, block)


def _experts(node: Node, codes: Any, scales: Any) -> np.ndarray:
    bits = node.attributes.get("expert_weight_bits", 4)
    scales = scales if node.attributes.get("block_size") else scales[..., None]
    return of_blocks(codes, scales, None, bits, codes.shape[-1] * 8 // bits)


# By operator: a function that decodes numbers from a node and some of its inputs, and groups of the
# indices of these inputs. The first of each group has the codes.
READERS: Mapping[tuple[str, str], tuple[Callable[..., np.ndarray], Sequence[Sequence[int]]]] = {
    **dict.fromkeys(
        ((MICROSOFT, "MatMulNBits"), (kernel_library.DOMAIN, kernel_library.PRODUCT)),
        (_product, ((1, 2, 3, 4),)),
    ),
    (MICROSOFT, "GatherBlockQuantized"): (_rows, ((0, 2, 3),)),
    (MICROSOFT, "MatMulIntegerToFloat"): (_linear, ((1, 3, 5),)),
    (MICROSOFT, "QMoE"): (_experts, ((2, 3), (5, 6))),
    ("", LINEAR): (_linear, ((0, 1, 2),)),
}


def digests_of(constants: Constants) -> dict[str, str]:
    """Return the sha256 of each stored constant by name, and of GRAPH. Raise ValueError for one
    that cannot be read.
    """
    graph = constants.graph
    nodes = [" ".join([_described(n), *n.inputs, "to", *n.outputs]) for n in constants.nodes]
    described = "\n".join([*nodes, *graph.inputs, "to", *graph.outputs])
    own = {name: _digest(constants.array(name)) for name in constants.stored}
    return {GRAPH: hashlib.sha256(described.encode()).hexdigest(), **own}


def _described(node: Node) -> str:
    bodies = {name for name, value in node.attributes.items() if isinstance(value, Nodes)}
    kept = sorted(f"{n}={part.hex()}" for n, part in node.serialised.items() if n not in bodies)
    return " ".join([node.domain, node.operator, *kept])


def _digest(numbers: np.ndarray) -> str:
    """Return the sha256 of an array: dtype, shape and little-endian numbers in row-major order."""
    content: Any = np.ascontiguousarray(numbers, numbers.dtype.newbyteorder("<"))
    whole = hashlib.sha256(f"{content.dtype.str} {numbers.shape}".encode())
    if content.size:
        whole.update(content.reshape(-1).view(np.uint8).data)
    return whole.hexdigest()
