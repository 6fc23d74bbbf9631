"""Digests of the numbers and attributes of a graph, which posenc verify compares."""

import hashlib
from typing import Any, Dict, List, Sequence

import numpy as np

from posenc_export.runtime.graphs.onnx_nodes import Node, Nodes
from posenc_export.runtime.verification.constants import MICROSOFT, Constants, Place

GRAPH = "graph"  # key of the digest of nodes, attributes and connections


class Digests:
    """Collects the digests of a graph, by name of a node and GRAPH.

    The digest of a node that reads constants, or that is an operator of com.microsoft, has its
    attributes and numbers; GRAPH has the attributes and connections of all nodes.
    """

    def __init__(self, constants: Constants) -> None:
        self._constants = constants
        self._parts: Dict[str, List[str]] = {}
        self._known: Dict[str, str] = {}

    def add(self, place: Place) -> None:
        """Add the numbers of a place."""
        parts = self._parts.setdefault(place.node.name, [])
        parts.append(f"{place.role} {self._of(place)}")

    def _of(self, place: Place) -> str:
        """Return the sha256 of the numbers of a place with their dtypes and shapes."""
        if place.decoded:
            return digest_of(place.numbers)
        for name in place.names:
            if name not in self._known:
                self._known[name] = digest_of(self._constants.array(name))
        return " ".join(self._known[name] for name in place.names)

    def result(self) -> Dict[str, str]:
        """Return the digests after all places were added."""
        nodes = self._constants.nodes
        graph = self._constants.graph
        own = {
            node.name: _sha256([_described(node), *sorted(self._parts.get(node.name, []))])
            for node in nodes
            if node.name in self._parts or node.domain == MICROSOFT
        }
        ends = [*graph.inputs, "to", *graph.outputs]
        connections = [" ".join([n.name, *n.inputs, "to", *n.outputs]) for n in nodes]
        return {GRAPH: _sha256([*map(_described, nodes), *connections, *ends]), **own}


def digests_of(constants: Constants) -> Dict[str, str]:
    """Return the digests of the nodes of a graph. Raise ValueError as Constants.decoded."""
    digests = Digests(constants)
    for place in constants.decoded():
        digests.add(place)
    for place in constants.plain():
        digests.add(place)
    return digests.result()


def _described(node: Node) -> str:
    kept = sorted(
        f"{name}={content.hex()}"
        for name, content in node.serialised.items()
        if not isinstance(node.attributes[name], Nodes)
    )
    return " ".join([node.domain, node.operator, *kept])


def digest_of(numbers: np.ndarray) -> str:
    """Return the sha256 of an array: dtype, shape and little-endian numbers in row-major order."""
    content: Any = np.ascontiguousarray(numbers, numbers.dtype.newbyteorder("<"))
    whole = hashlib.sha256(f"{content.dtype.str} {numbers.shape}".encode())
    if content.size:
        whole.update(content.reshape(-1).view(np.uint8).data)
    return whole.hexdigest()


def _sha256(parts: Sequence[str]) -> str:
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()
