"""Hand-written graphs of fused operators of ONNX Runtime, with the fewest nodes.

They are bound, and their caches are updated in place.
"""

from pathlib import Path
from typing import Any, Dict, Sequence

import numpy as np
import onnxruntime
import torch
from onnx import numpy_helper, parser

from posenc_export.benchmark.opened import CHUNK, CallSession, Opened
from posenc_export.benchmark.peers.eager import rebuilt
from posenc_export.runtime.artefact.manifest import Manifest

HEADER = '<ir_version: 10, opset_import: ["": 23, "com.microsoft": 1]>'  # those of torch.onnx
BASE = 10000.0  # of the angles of RoPE
# One product for queries, keys and values; one operator for rotation, cache and attention.
ATTENTION = """
    qkv_{n} = MatMul({x}, W_qkv_{n})
    attended_{n}, present_{n}_key, present_{n}_value = com.microsoft.GroupQueryAttention
        <num_heads = {heads}, kv_num_heads = {kv_heads}, do_rotary = {rotates}>
        (qkv_{n}, "", "", past_{n}_key, past_{n}_value, seqlens_k, total_sequence_length{tables})
    {output} = MatMul(attended_{n}, W_output_{n})"""
EMBEDDING = """
    total_0 = Gather(table, input_ids)
    x_0 = SimplifiedLayerNormalization <axis = -1, epsilon: float = {epsilon}> (total_0, W_norm)"""
# Sums fused with the norms that follow; one product for gate and up. QuickGelu with alpha 1 is
# SiLU.
MLP = """
    y_{n}, "", "", sum_{n} = com.microsoft.SkipSimplifiedLayerNormalization
        <epsilon: float = {epsilon}> (total_{n}, mixed_{n}, W_mlp_norm_{n})
    both_{n} = MatMul(y_{n}, W_both_{n})
    gate_{n}, up_{n} = Split <axis = -1, num_outputs = 2> (both_{n})
    active_{n} = com.microsoft.QuickGelu <alpha: float = 1> (gate_{n})
    inner_{n} = Mul(active_{n}, up_{n})
    down_{n} = MatMul(inner_{n}, W_down_{n})
    x_{after}, "", "", total_{after} = com.microsoft.SkipSimplifiedLayerNormalization
        <epsilon: float = {epsilon}> (sum_{n}, down_{n}, W_norm_{n})"""
HEAD = """
    last = Slice(x_{layers}, from, to, token_axis)
    logits = MatMul(last, W_head)"""
Arrays = Dict[str, np.ndarray]


def block(config: Dict[str, Any], weights: Arrays) -> bytes:
    """Return the graph of a block that `runtimes.is_plain_block` accepts: hidden_states [B,S,E] to
    output [B,S,E]. weights: by parameter name of AttentionBlock.
    """
    nodes = _attention(config["attention"], 0, "hidden_states", "output")
    ends = [f"float[batch, new, {config['width']}] {name}" for name in ("hidden_states", "output")]
    arrays = _projections(weights, "", 0)
    return _model(config["attention"], config["max_positions"], 1, ends, nodes, arrays)


def decoder(config: Dict[str, Any], weights: Arrays) -> bytes:
    """Return the graph of a decoder that `runtimes.is_llama` accepts: input_ids [B,S] to logits of
    the last token [B,1,V]. weights: by parameter name of Stack.
    """
    attention = config["layers"][config["order"][0]]["attention"]
    layers, epsilon = len(config["order"]), config["norm"]["epsilon"]
    table = weights["tokens.embedding.weight"]
    arrays = {
        "table": table,
        "W_norm": weights["layers.0.residual.attention_norm.weight"],
        "W_head": weights.get("head.linear.weight", table).T,
        "from": np.array([-1]),
        "to": np.array([np.iinfo(np.int64).max]),
        "token_axis": np.array([1]),
    }
    nodes = EMBEDDING.format(epsilon=epsilon)
    for n in range(layers):
        own, following = f"layers.{n}.", f"layers.{n + 1}.residual.attention_norm.weight"
        gate, up, down = (weights[f"{own}mlp.{part}.weight"] for part in ("gate", "up", "down"))
        nodes += _attention(attention, n, f"x_{n}", f"mixed_{n}")
        nodes += MLP.format(n=n, after=n + 1, epsilon=epsilon)
        arrays |= {
            **_projections(weights, own, n),
            f"W_mlp_norm_{n}": weights[f"{own}residual.mlp_norm.weight"],
            f"W_both_{n}": np.concatenate((gate, up)).T,
            f"W_down_{n}": down.T,
            f"W_norm_{n}": weights.get(following, weights["norm.weight"]),
        }
    nodes += HEAD.format(layers=layers)
    ends = ["int64[batch, new] input_ids"]
    ends += [f"float[batch, 1, {config['tokens']['vocabulary']}] logits"]
    return _model(attention, config["max_positions"], layers, ends, nodes, arrays)


def _attention(attention: Dict[str, Any], n: int, x: str, output: str) -> str:
    rotates = _rotates(attention)
    sizes = {name: attention[name] for name in ("heads", "kv_heads")}
    tables = ", cos, sin" if rotates else ""
    return ATTENTION.format(n=n, x=x, output=output, rotates=int(rotates), tables=tables, **sizes)


def _rotates(attention: Dict[str, Any]) -> bool:
    return [spec["name"] for spec in attention["encodings"]] == ["rope"]


def _projections(weights: Arrays, own: str, n: int) -> Arrays:
    place = f"{own}attention.projection"
    qkv, output = (weights[f"{place}.{name}.weight"] for name in ("qkv", "output"))
    return {f"W_qkv_{n}": qkv.T, f"W_output_{n}": output.T}


def _model(
    attention: Dict[str, Any],
    slots: int,
    layers: int,
    ends: Sequence[str],
    nodes: str,
    arrays: Arrays,
) -> bytes:
    """The model: the first of `ends`, caches [B,K,M,D], seqlens_k [B] and length to the second."""
    size = attention["head_size"]
    if _rotates(attention):
        angles = np.arange(slots)[:, None] * BASE ** (-np.arange(0, size, 2) / size)
        arrays = {**arrays, "cos": np.cos(angles), "sin": np.sin(angles)}
    cache = f"float[batch, {attention['kv_heads']}, capacity, {size}]"
    names = [f"{n}_{part}" for n in range(layers) for part in ("key", "value")]
    inputs = [ends[0], *(f"{cache} past_{name}" for name in names)]
    inputs += ["int32[batch] seqlens_k", "int32 total_sequence_length"]
    outputs = [ends[1], *(f"{cache} present_{name}" for name in names)]
    signature = f"hand_written ({', '.join(inputs)}) => ({', '.join(outputs)})"
    model = parser.parse_model(f"{HEADER} {signature} {{{nodes}\n}}")
    for name, array in arrays.items():
        kept = array if array.dtype == np.int64 else np.ascontiguousarray(array, np.float32)
        model.graph.initializer.append(numpy_helper.from_array(kept, name))
    return model.SerializeToString()


def open_session(folder: Path, manifest: Manifest, threads: int, batch: int) -> Opened:
    torch.set_num_threads(1)  # a second thread pool would slow down that of ONNX Runtime
    model, source = rebuilt(manifest)
    weights = {name: parameter.detach().numpy() for name, parameter in model.named_parameters()}
    write = {"block": block, "decoder": decoder}[manifest.kind]
    graph = write(manifest.config, weights)
    return Opened(HandSession(graph, threads, batch, manifest.max_positions), source)


class HandSession(CallSession):
    """Session on a serialised graph, with caches of `capacity` slots."""

    def __init__(self, graph: bytes, threads: int, batch: int, capacity: int) -> None:
        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = threads
        options.add_session_config_entry("session.set_denormal_as_zero", "1")  # as the runtime does
        cpu = ["CPUExecutionProvider"]
        self.session = onnxruntime.InferenceSession(graph, options, providers=cpu)
        source, *inputs = self.session.get_inputs()
        self.caches: Dict[str, np.ndarray] = {
            value.name: np.zeros((batch, value.shape[1], capacity, value.shape[3]), np.float32)
            for value in inputs
            if value.name.startswith("past_")
        }
        self.seqlens, self.total = np.zeros(batch, np.int32), np.zeros((), np.int32)
        # GroupQueryAttention supports several rows of several tokens only with an empty cache.
        self.chunk = CHUNK if batch == 1 else None
        dtype = np.int64 if source.type == "tensor(int64)" else np.float32
        self.step_input = np.zeros((batch, 1, *source.shape[2:]), dtype)
        self.step_run, self.step_output = self._bound(self.step_input)

    def call(self, inputs: np.ndarray) -> np.ndarray:
        end = self.length + inputs.shape[1]
        self.seqlens[:], self.total[...] = end - 1, end
        if inputs.shape[1] == 1:
            self.step_input[:] = inputs
            self.session.run_with_iobinding(self.step_run)
            return self.step_output.copy()
        binding, output = self._bound(np.ascontiguousarray(inputs))
        self.session.run_with_iobinding(binding)
        return output

    def _bound(self, inputs: np.ndarray) -> Any:
        """Return a binding and its output. The session keeps the arrays alive."""
        source, result = self.session.get_inputs()[0], self.session.get_outputs()[0]
        rows = result.shape[1] if isinstance(result.shape[1], int) else inputs.shape[1]
        output = np.zeros((len(inputs), rows, result.shape[-1]), np.float32)
        binding = self.session.io_binding()
        fed = {source.name: inputs, "seqlens_k": self.seqlens, "total_sequence_length": self.total}
        written = {name.replace("past", "present"): array for name, array in self.caches.items()}
        for name, array in {**fed, **self.caches}.items():
            binding.bind_ortvalue_input(name, onnxruntime.OrtValue.ortvalue_from_numpy(array))
        for name, array in {result.name: output, **written}.items():
            binding.bind_ortvalue_output(name, onnxruntime.OrtValue.ortvalue_from_numpy(array))
        return binding, output
