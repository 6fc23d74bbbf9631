"""Caches of keys and values in a format of CACHE_FORMATS, beside activations in float32."""

from typing import Any, Dict, Mapping

import numpy as np
import onnx_ir as ir

from posenc_export.export.targets.builder import Builder, size
from posenc_export.runtime.artefact.cache_formats import CACHE_FORMATS
from posenc_export.runtime.artefact.manifest import Manifest
from posenc_export.runtime.artefact.rules import keys_and_values
from posenc_export.runtime.artefact.summary import summary

PAST_KEY, PAST_VALUE, KEY_SCALE, VALUE_SCALE = 3, 4, 12, 13  # inputs of attention
QUANTISED: Dict[str, Any] = {
    "k_quant_type": "PER_CHANNEL",
    "v_quant_type": "PER_CHANNEL",
    "kv_cache_bit_width": 8,
}


def store(op: Builder, manifest: Manifest, scales: Mapping[str, np.ndarray]) -> None:
    """Change the caches of keys and values to the format of the manifest in a lowered graph.

    Args:
        scales: of the channels [K,D] of each cache by its name, if the format has scales.

    Raises:
        ValueError: the graph has no cache of keys and values, or another operator than those of the
            format reads one.
    """
    format_, names = CACHE_FORMATS[manifest.cache], {s.past for s in keys_and_values(manifest)}
    caches = [value for value in op.graph.inputs if value.name in names and value.uses()]
    for value in caches:
        others = sorted({node.op_type for node, _ in value.uses()} - {*format_.operators})
        if others:
            _refuse(manifest, f"{value.name} read by {', '.join(others)}")
        value.type = ir.TensorType(ir.DataType[manifest.cache.upper()])
    if not caches:
        _refuse(manifest, "no cache of keys and values")
    for node in op.graph:
        if format_.scaled and node.op_type in format_.operators:
            node.resize_inputs(max(len(node.inputs), VALUE_SCALE + 1))
            for past, scale in ((PAST_KEY, KEY_SCALE), (PAST_VALUE, VALUE_SCALE)):
                node.replace_input_with(scale, _scales(op, node.inputs[past], scales))
            for name, value in QUANTISED.items():
                node.attributes[name] = ir.convenience.convert_attribute(name, value)


def _scales(op: Builder, past: Any, scales: Mapping[str, np.ndarray]) -> ir.Value:
    """Return the scales [K*D] of a cache."""
    unpadded = scales[past.name]
    padded = np.ones((len(unpadded), size(past, 3)), np.float32)  # heads are padded with zeros
    padded[:, : unpadded.shape[1]] = unpadded
    return op.weight(f"{past.name}.scale", lambda: padded.reshape(-1))


def _refuse(manifest: Manifest, got: str) -> None:
    format_, encoding = manifest.cache, summary(manifest)["encoding"]
    operators = " or ".join(CACHE_FORMATS[format_].operators)
    rule = f"export: expected every cache to be read by {operators} alone for cache {format_}"
    raise ValueError(f"{rule}, got {got} with encoding {encoding}; omit cache")
