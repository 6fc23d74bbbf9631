"""The graph of a page: a copy of the artefact's graph with attention weights as additional outputs."""

import re
from pathlib import Path
from typing import Any, Dict, List

import numpy as np

from posenc_export.runtime.artefact.files import utf8
from posenc_export.runtime.artefact.manifest import Manifest
from posenc_export.runtime.artefact.rules import B, P
from posenc_export.runtime.session.errors import RUN_ERRORS, GraphError
from posenc_export.shared.numerics import worst_error

AFTER_SOFTMAX = 3  # qk_matmul_output_mode of ai.onnx Attention
KEY = 4  # input of Attention: past_key
PROMPT = b"def read(path):\n    with open(path) as file:\n        return"


def with_attention(source: Path, written: Path) -> List[int]:
    """Copy model.onnx and add an output `attention.N` [B,H,S,T] for each Attention operator. Return the layers N. External data are not copied."""
    import onnx

    model = onnx.load(source, load_external_data=False)
    layers: List[int] = []
    for node in model.graph.node:
        if node.op_type != "Attention" or node.domain:
            continue
        found = re.match(r"past_key_values\.(\d+)\.", node.input[KEY] if len(node.input) > KEY else "")
        layers.append(int(found[1]) if found else len(layers))
        node.output.extend([""] * (3 - len(node.output)) + [f"attention.{layers[-1]}"])
        node.attribute.append(onnx.helper.make_attribute("qk_matmul_output_mode", AFTER_SOFTMAX))
        axes = ["batch_size", "heads", "sequence_length", "total_sequence_length"]
        model.graph.output.append(onnx.helper.make_tensor_value_info(f"attention.{layers[-1]}", onnx.TensorProto.FLOAT, axes))
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
    known = {"input_ids": ids, "position_ids": order, "attention_mask": np.ones_like(ids), "logits_index": order}
    sizes: Dict[Any, Any] = {B: 1, P: 0}
    if manifest.axes:
        known["position_ids"] = np.repeat(order[None], 1 + manifest.axes, 0)
    states = {state.past: np.full([sizes.get(axis, axis) for axis in state.axes], state.fill, state.dtype) for state in manifest.states}
    return {**{value.name: known[value.name] for value in manifest.inputs}, **states}
