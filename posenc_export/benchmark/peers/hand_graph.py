"""Hand-written graphs of fused operators of ONNX Runtime, as text, with the fewest nodes."""

from typing import Any, Dict, Sequence

import numpy as np
from onnx import numpy_helper, parser

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
