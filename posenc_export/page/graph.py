"""The graph of a page: a copy of the artefact's graph with attention weights as additional
outputs.
"""

import re
from pathlib import Path
from typing import Any, Dict, List, Tuple

import numpy as np

from posenc_export import runtime
from posenc_export.runtime.artefact import graph_inputs
from posenc_export.runtime.artefact.files import utf8
from posenc_export.runtime.artefact.graph_inputs import B, M, NewTokens, P
from posenc_export.runtime.artefact.manifest import Manifest
from posenc_export.runtime.session.errors import RUN_ERRORS, GraphError
from posenc_export.shared.numerics import worst_error

# By operator and domain: input past_key, output of the attention weights, and the attribute that
# asks for them after the softmax.
ATTENTION: Dict[Tuple[str, str], Tuple[int, int, str, int]] = {
    ("Attention", ""): (4, 3, "qk_matmul_output_mode", 3),
    ("GroupQueryAttention", "com.microsoft"): (3, 3, "qk_output", 2),
}
PROMPT = b"def read(path):\n    with open(path) as file:\n        return"


def with_attention(source: Path, written: Path) -> List[int]:
    """Copy model.onnx and add an output `attention.N` [B,H,S,T] for each layer N that one attention
    operator computes. External data are not copied.

    GroupQueryAttention does not write the weights of keys after the query.

    Returns:
        The layers N. A layer whose graph reads its attention weights already, as for `cope`, and
        one of several operators are left out.
    """
    import onnx

    model = onnx.load(source, load_external_data=False)
    of_layer: Dict[int, List[Any]] = {}
    for node in model.graph.node:
        if (node.op_type, node.domain) in ATTENTION:
            key = ATTENTION[node.op_type, node.domain][0]
            cache = node.input[key] if len(node.input) > key else ""
            match = re.match(r"past_key_values\.(\d+)\.", cache)
            of_layer.setdefault(int(match[1]) if match else len(of_layer), []).append(node)
    layers = []
    for layer, nodes in of_layer.items():
        _, output, attribute, after_softmax = ATTENTION[nodes[0].op_type, nodes[0].domain]
        if len(nodes) > 1 or len(nodes[0].output) > output:
            continue
        layers.append(layer)
        nodes[0].output.extend([""] * (output - len(nodes[0].output)) + [f"attention.{layer}"])
        nodes[0].attribute.append(onnx.helper.make_attribute(attribute, after_softmax))
        axes = ["batch_size", "heads", "sequence_length", "total_sequence_length"]
        model.graph.output.append(
            onnx.helper.make_tensor_value_info(f"attention.{layer}", onnx.TensorProto.FLOAT, axes)
        )
    written.write_bytes(model.SerializeToString(deterministic=True))
    return layers


def fuses_all_caches(source: Path, manifest: Manifest) -> bool:
    """Whether all caches of fixed capacity are read by GroupQueryAttention and by no other
    operator.
    """
    import onnx

    caches = {state.past for state in manifest.states if state.in_place}
    readers = {
        node.op_type
        for node in onnx.load(source, load_external_data=False).graph.node
        if caches.intersection(node.input)
    }
    return readers <= {"GroupQueryAttention"}


def check_calls(
    folder: Path, manifest: Manifest, states: List[Dict[str, Any]], ids: List[int]
) -> None:
    """Check that the graph, called as model.js calls it, gives the logits of a session.

    Args:
        folder: the artefact.
        states: initial states as in page.json.
        ids: tokens, fed in three calls.

    Raises:
        ValueError: the logits differ by more than the tolerance of the certificate.
        GraphError: the graph does not run.
    """
    session = runtime.load(folder, provider="cpu", threads=1).session()
    expected, middle = session.prefill([ids])[0], len(ids) // 2
    cache = {
        state["past"]: np.full(state["shape"], state["fill"], state["dtype"]) for state in states
    }
    outputs = []
    try:
        opened = _opened(folder / "model.onnx")
        names = [value.name for value in opened.get_outputs()]
        for begin, end in ((0, middle), (middle, middle + 1), (middle + 1, len(ids))):
            feeds = {**_inputs(manifest, ids[begin:end], begin), **cache}
            results = dict(zip(names, opened.run(names, feeds), strict=True))
            outputs.append(np.asarray(results[manifest.outputs[0].name])[0])
            cache = {state["past"]: results[state["present"]] for state in states}
    except RUN_ERRORS as stopped:
        raise GraphError(stopped) from None
    _check_equal("calls of the graph", np.concatenate(outputs), np.asarray(expected), manifest)


def check_copy(source: Path, written: Path, manifest: Manifest) -> None:
    """Check that the copy gives the same logits as the artefact. Raises as `check_calls`."""
    try:
        copied, expected = _logits(written, manifest), _logits(source, manifest)
    except RUN_ERRORS as stopped:
        raise GraphError(stopped) from None
    _check_equal("the copy of the graph", copied, expected, manifest)


def _check_equal(what: str, logits: np.ndarray, expected: np.ndarray, manifest: Manifest) -> None:
    bound = manifest.reference.tolerance if manifest.reference else 1e-4
    error = worst_error(logits, expected)
    if not error <= bound:
        raise ValueError(
            f"page: expected {what} to give the logits of a session within {bound:.1e}, got "
            f"{error:.1e}; report this"
        )


def _logits(path: Path, manifest: Manifest) -> np.ndarray:
    return np.asarray(_opened(path).run(["logits"], _feeds(manifest))[0])


def _opened(path: Path) -> Any:
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = 1
    return onnxruntime.InferenceSession(utf8(path), options, providers=["CPUExecutionProvider"])


def _feeds(manifest: Manifest) -> Dict[str, Any]:
    """Return the inputs of a call that feeds PROMPT as one row."""
    sizes: Dict[Any, Any] = {B: 1, P: 0, M: len(PROMPT)}
    states = {
        state.past: np.full([sizes.get(axis, axis) for axis in state.axes], state.fill, state.dtype)
        for state in manifest.states
    }
    return {**_inputs(manifest, list(PROMPT), 0), **states}


def _inputs(manifest: Manifest, tokens: List[int], cached: int) -> Dict[str, Any]:
    """Return the inputs, without states, of a call that feeds tokens of one row after `cached`
    ones.
    """
    x, count, length = np.array([tokens], np.int64), np.array([len(tokens)]), np.array([cached])
    grid = cached + np.arange(len(tokens))[None, None]  # [1,B,S]
    call = NewTokens(
        x,
        count,
        length,
        np.zeros_like(length),
        count,
        np.ones((1, cached), bool),
        count,
        {"grid": np.repeat(grid, manifest.axes, 0)} if manifest.axes else {},
    )
    return graph_inputs.feeds(manifest, call)
