"""Graphs compared whatever the names of their nodes and values."""

import hashlib

import onnx_ir as ir


def outputs_of(graph: ir.Graph) -> dict[str, str]:
    """Return a digest of each output, which names the operators, attributes, weights and inputs
    that it depends on.
    """
    digests = {value: str(value.name) for value in graph.inputs}
    digests |= {
        value: hashlib.sha256(value.const_value.tobytes()).hexdigest()
        for value in graph.initializers.values()
    }
    for node in graph:
        attributes = sorted((name, str(item.value)) for name, item in node.attributes.items())
        inputs = [None if value is None else digests.get(value) for value in node.inputs]
        for index, value in enumerate(node.outputs):
            content = (node.domain, node.op_type, attributes, inputs, index)
            digests[value] = hashlib.sha256(repr(content).encode()).hexdigest()
    return {str(value.name): digests[value] for value in graph.outputs}
