"""The graph of a page: a copy of the artefact's graph with attention weights as additional outputs."""

import re
from pathlib import Path
from typing import Any, Dict, List, Tuple

import numpy as np

from posenc_export.runtime.artefact.files import utf8
from posenc_export.runtime.artefact.manifest import Manifest
from posenc_export.runtime.artefact.rules import B, M, P
from posenc_export.runtime.session.errors import RUN_ERRORS, GraphError
from posenc_export.shared.numerics import worst_error

# By operator and domain: input past_key, output of the attention weights, and the attribute that asks for them after the softmax.
ATTENTION: Dict[Tuple[str, str], Tuple[int, int, str, int]] = {
    ("Attention", ""): (4, 3, "qk_matmul_output_mode", 3),
    ("GroupQueryAttention", "com.microsoft"): (3, 3, "qk_output", 2),
}
PROMPT = b"def read(path):\n    with open(path) as file:\n        return"


def with_attention(source: Path, written: Path) -> List[int]:
    """Copy model.onnx and add an output `attention.N` [B,H,S,T] for each layer N that one attention operator computes. External data are not copied.

    GroupQueryAttention does not write the weights of keys after the query.

    Returns:
        The layers N. A layer whose graph reads its attention weights already, as for `cope`, and one of several operators are left out.
    """
    import onnx

    model = onnx.load(source, load_external_data=False)
    of_layer: Dict[int, List[Any]] = {}
    for node in model.graph.node:
        if (node.op_type, node.domain) in ATTENTION:
            key = ATTENTION[node.op_type, node.domain][0]
            found = re.match(r"past_key_values\.(\d+)\.", node.input[key] if len(node.input) > key else "")
            of_layer.setdefault(int(found[1]) if found else len(of_layer), []).append(node)
    layers = []
    for layer, nodes in of_layer.items():
        _, output, attribute, after_softmax = ATTENTION[nodes[0].op_type, nodes[0].domain]
        if len(nodes) > 1 or len(nodes[0].output) > output:
            continue
        layers.append(layer)
        nodes[0].output.extend([""] * (output - len(nodes[0].output)) + [f"attention.{layer}"])
        nodes[0].attribute.append(onnx.helper.make_attribute(attribute, after_softmax))
        axes = ["batch_size", "heads", "sequence_length", "total_sequence_length"]
        model.graph.output.append(onnx.helper.make_tensor_value_info(f"attention.{layer}", onnx.TensorProto.FLOAT, axes))
    written.write_bytes(model.SerializeToString(deterministic=True))
    return layers


def check_copy(source: Path, written: Path, manifest: Manifest) -> None:
    """Check that the copy gives the same logits as the artefact.

    Raises:
        ValueError: the logits differ by more than the tolerance of the certificate.
        GraphError: one of the graphs does not run.
    """
    bound = manifest.reference.tolerance if manifest.reference else 1e-4
    try:
        error = worst_error(_logits(written, manifest), _logits(source, manifest))
    except RUN_ERRORS as stopped:
        raise GraphError(stopped) from None
    if not error <= bound:
        raise ValueError(f"page: expected the copy of the graph to give the logits of the artefact within {bound:.1e}, got {error:.1e}; report this")


def _logits(path: Path, manifest: Manifest) -> np.ndarray:
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = 1
    session = onnxruntime.InferenceSession(utf8(path), options, providers=["CPUExecutionProvider"])
    return np.asarray(session.run(["logits"], _feeds(manifest))[0])


def _feeds(manifest: Manifest) -> Dict[str, Any]:
    """Return the inputs of a call that feeds PROMPT as one row."""
    ids = np.frombuffer(PROMPT, np.uint8).astype(np.int64)[None]
    order = np.arange(ids.shape[1], dtype=np.int64)[None]
    known: Dict[str, Any] = {"input_ids": ids, "position_ids": order, "attention_mask": np.ones_like(ids), "logits_index": order, "cache_position": order}
    last, count = np.array([ids.size - 1], np.int32), np.array(ids.size, np.int32)
    known |= {"first_position": np.zeros((1, 1), np.int64), "seqlens_k": last, "total_sequence_length": count}
    sizes: Dict[Any, Any] = {B: 1, P: 0, M: ids.size}
    if manifest.axes:
        known["position_ids"] = np.repeat(order[None], 1 + manifest.axes, 0)
    states = {state.past: np.full([sizes.get(axis, axis) for axis in state.axes], state.fill, state.dtype) for state in manifest.states}
    return {**{value.name: known[value.name] for value in manifest.inputs}, **states}
