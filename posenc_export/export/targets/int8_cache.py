"""8-bit caches in GroupQueryAttention, with one scale per channel."""

from typing import Any, Dict, Mapping, Optional

import numpy as np
import onnx_ir as ir

from posenc_export.export.targets.builder import Builder, size
from posenc_export.runtime.artefact.manifest import Manifest
from posenc_export.runtime.artefact.summary import summary
from posenc_export.runtime.graphs import kernel_library

NODE = "GroupQueryAttention"
NODES = (NODE, kernel_library.OPERATOR)  # with the same inputs here
PAST_KEY, PAST_VALUE, KEY_SCALE, VALUE_SCALE = 3, 4, 12, 13  # inputs of the node
QUANTISED: Dict[str, Any] = {
    "k_quant_type": "PER_CHANNEL",
    "v_quant_type": "PER_CHANNEL",
    "kv_cache_bit_width": 8,
}


def store(op: Builder, manifest: Manifest, scales: Mapping[str, np.ndarray]) -> None:
    """Change the caches named in `scales` [K,D] to int8 in a lowered graph. ValueError: the graph
    has no cache of keys and values, or an operator other than GroupQueryAttention reads one.
    """
    caches = [value for value in op.graph.inputs if value.name in scales and value.uses()]
    for value in caches:
        others = sorted({node.op_type for node, _ in value.uses()} - {*NODES})
        if others:
            _refuse(manifest, f"{value.name} read by {', '.join(others)}")
    if not caches:
        _refuse(manifest, "no cache of keys and values")
    for node in op.graph:
        if node.op_type in NODES:
            node.resize_inputs(max(len(node.inputs), VALUE_SCALE + 1))
            for past, scale in ((PAST_KEY, KEY_SCALE), (PAST_VALUE, VALUE_SCALE)):
                node.replace_input_with(scale, _stored(op, node.inputs[past], scales))
            for name, value in QUANTISED.items():
                node.attributes[name] = ir.convenience.convert_attribute(name, value)


def _stored(op: Builder, past: Optional[ir.Value], scales: Mapping[str, np.ndarray]) -> ir.Value:
    """Change a cache to int8 and return its scales [K*D]."""
    assert past is not None and past.name is not None
    past.type = ir.TensorType(ir.DataType.INT8)
    unpadded = scales[past.name]
    padded = np.ones((len(unpadded), size(past, 3)), np.float32)  # heads are padded with zeros
    padded[:, : unpadded.shape[1]] = unpadded
    return op.weight(f"{past.name}.scale", lambda: padded.reshape(-1))


def _refuse(manifest: Manifest, got: str) -> None:
    rule = f"export: expected every cache to be read by {NODE} alone for cache {manifest.cache}"
    encoding = summary(manifest)["encoding"]
    raise ValueError(f"{rule}, got {got} with encoding {encoding}; omit cache")
