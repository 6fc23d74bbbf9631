"""The graph of a page: the artefact's graph with attention weights as further outputs."""

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from posenc_export import runtime
from posenc_export.runtime.artefact import graph_inputs
from posenc_export.runtime.artefact.files import utf8
from posenc_export.runtime.artefact.graph_inputs import PaddedTokens
from posenc_export.runtime.artefact.manifest import Manifest
from posenc_export.runtime.graphs import onnx_nodes
from posenc_export.runtime.graphs.onnx_parts import serialised, with_attribute
from posenc_export.runtime.session.errors import RUN_ERRORS, GraphError
from posenc_export.shared.numerics import worst_error
from posenc_export.shared.refusal import refusal

# By operator and domain: input past_key, output of the attention weights, and the attribute that
# asks for them after the softmax.
ATTENTION: dict[tuple[str, str], tuple[int, int, str, int]] = {
    ("Attention", ""): (4, 3, "qk_matmul_output_mode", 3),
    ("GroupQueryAttention", "com.microsoft"): (3, 3, "qk_output", 2),
}
PROMPT = b"def read(path):\n    with open(path) as file:\n        return"


def with_attention(source: Path, written: Path) -> list[int]:
    """Copy model.onnx, without its weights, with an output `attention.N` [B,H,S,T] for each layer N
    that one attention operator computes. Return these layers. GroupQueryAttention does not write
    the weights of keys after the query.
    """
    model = onnx_nodes.read_nodes(source)
    of_layer: dict[int, list[int]] = {}  # places of attention nodes
    for place, node in enumerate(model.nodes):
        if (node.operator, node.domain) in ATTENTION:
            key = ATTENTION[node.operator, node.domain][0]
            cache = node.inputs[key] if len(node.inputs) > key else ""
            match = re.match(r"past_key_values\.(\d+)\.", cache)
            of_layer.setdefault(int(match[1]) if match else len(of_layer), []).append(place)
    layers = []
    for layer, (place, *others) in of_layer.items():
        node = model.nodes[place]
        _, output, attribute, after_softmax = ATTENTION[node.operator, node.domain]
        if others or len(node.outputs) > output:
            continue
        layers.append(layer)
        outputs = [*node.outputs, *[""] * (output - len(node.outputs)), f"attention.{layer}"]
        model.nodes[place] = with_attribute(
            replace(node, outputs=outputs), attribute, after_softmax
        )
    named = [*model.outputs, *(f"attention.{layer}" for layer in layers)]
    written.write_bytes(serialised(model, model.nodes, named, list(model.inputs)))
    return layers


def fuses_all_caches(source: Path, manifest: Manifest) -> bool:
    """Whether GroupQueryAttention alone reads all caches of fixed capacity."""
    caches = {state.past for state in manifest.states if state.in_place}
    nodes = onnx_nodes.read_nodes(source).nodes
    readers = {node.operator for node in nodes if caches.intersection(node.inputs)}
    return readers <= {"GroupQueryAttention"}


def check_calls(
    folder: Path, path: Path, manifest: Manifest, states: list[dict[str, Any]], ids: list[int]
) -> None:
    """Check that the graph at `path`, called with `ids` in three calls as model.js does, gives the
    logits of a session. Raise ValueError if they differ by more than the tolerance of the
    certificate, GraphError if the graph does not run. states: initial states as in page.json.
    """
    expected = runtime.load(folder, provider="cpu", threads=1).session().prefill([ids])[0]
    middle, output = len(ids) // 2, manifest.outputs[0].name
    names = [output, *(state["present"] for state in states)]
    cache, logits = empty(states), []
    try:
        opened = _opened(path, manifest)
        for begin, end in ((0, middle), (middle, middle + 1), (middle + 1, len(ids))):
            results = opened.run(names, {**inputs(manifest, ids[begin:end], begin), **cache})
            logits.append(np.asarray(results[0])[0])
            cache = dict(zip(cache, results[1:], strict=True))
    except RUN_ERRORS as stopped:
        raise GraphError(stopped) from None
    bound = manifest.reference.tolerance if manifest.reference else 1e-4
    error = worst_error(np.concatenate(logits), np.asarray(expected))
    if not error <= bound:
        rule = f"calls of the graph to give the logits of a session within {bound:.1e}"
        raise refusal("page", rule, f"{error:.1e}", "report this")


def _opened(path: Path, manifest: Manifest) -> Any:
    import onnxruntime

    from posenc_export.runtime.graphs import ort_options

    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = 1
    ort_options.keep_exact(options, manifest.operators)
    return onnxruntime.InferenceSession(utf8(path), options, providers=["CPUExecutionProvider"])


def empty(states: list[dict[str, Any]]) -> dict[str, np.ndarray]:
    """Return the states of a row without tokens, by name of the input."""
    return {s["past"]: np.full(s["shape"], s["fill"], s["dtype"]) for s in states}


def inputs(manifest: Manifest, tokens: list[int], cached: int) -> dict[str, np.ndarray]:
    """Return the inputs of a call, without states, that feeds tokens after `cached` ones."""
    x, count, length = np.array([tokens], np.int64), np.array([len(tokens)]), np.array([cached])
    grid = cached + np.arange(len(tokens))[None, None]  # [1,B,S]
    planes = {"grid": np.repeat(grid, manifest.axes, 0)} if manifest.axes else {}
    zero, occupied = np.zeros_like(length), np.ones((1, cached), bool)
    padded = PaddedTokens(x, count, length, zero, count, occupied, count, zero, planes)
    return graph_inputs.fill(manifest, padded)
