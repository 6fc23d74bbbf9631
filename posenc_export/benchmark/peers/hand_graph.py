"""Hand-written graphs of the fused operators of ONNX Runtime, as a reference with the fewest nodes
for models of two shapes.

A layer has one MatMul for queries, keys and values, one GroupQueryAttention with rotation and
cache, and one MatMul for the output. Layers of decoders also have norms fused with the preceding
sums, one MatMul for gate and up, and one for down.
"""

from typing import Any, Dict, List, Sequence

import numpy as np
import onnx
from onnx import helper

IR_VERSION, OPSET = 10, 23  # those of torch.onnx
DOMAIN = "com.microsoft"
BASE = 10000.0  # of the angles of RoPE
FLOAT, INT32, INT64 = onnx.TensorProto.FLOAT, onnx.TensorProto.INT32, onnx.TensorProto.INT64
Arrays = Dict[str, np.ndarray]


class HandGraph:
    """Collects nodes and weights of one graph.

    Args:
        attention: description of the attention: heads, kv_heads, head_size and encodings.
        slots: rows of the cos and sin tables, the largest number of tokens per row.
    """

    def __init__(self, attention: Dict[str, Any], slots: int) -> None:
        self.heads, self.kv_heads, self.head_size = (
            attention["heads"],
            attention["kv_heads"],
            attention["head_size"],
        )
        self.rotates = [spec["name"] for spec in attention["encodings"]] == ["rope"]
        self.nodes: List[Any] = []
        self.weights: Arrays = {}
        if self.rotates:
            angles = np.arange(slots)[:, None] * BASE ** (
                -np.arange(0, self.head_size, 2) / self.head_size
            )
            self.weights |= {"cos": np.cos(angles), "sin": np.sin(angles)}

    def node(
        self,
        kind: str,
        inputs: Sequence[str],
        outputs: Sequence[str],
        domain: str = "",
        **attributes: Any,
    ) -> str:
        """Add a node and return its first output."""
        self.nodes.append(
            helper.make_node(kind, list(inputs), list(outputs), domain=domain, **attributes)
        )
        return outputs[0]

    def product(self, x: str, name: str, weight: np.ndarray) -> str:
        """Add the product of x and a weight [outputs,inputs], as in torch.nn.Linear."""
        self.weights[f"{name}.weight"] = weight.T
        return self.node("MatMul", [x, f"{name}.weight"], [name])

    def attend(self, x: str, layer: int, qkv: np.ndarray, back: np.ndarray, output: str) -> str:
        """Add the attention of one layer with its cache and output projection."""
        sources = [
            self.product(x, f"qkv.{layer}", qkv),
            "",
            "",
            f"past.{layer}.key",
            f"past.{layer}.value",
            "seqlens_k",
            "total_sequence_length",
        ]
        attended = [f"attended.{layer}", f"present.{layer}.key", f"present.{layer}.value"]
        sizes = {
            "num_heads": self.heads,
            "kv_num_heads": self.kv_heads,
            "do_rotary": int(self.rotates),
        }
        self.node(
            "GroupQueryAttention",
            sources + ["cos", "sin"] * self.rotates,
            attended,
            DOMAIN,
            **sizes,
        )
        return self.product(attended[0], output, back)

    def normed(
        self, x: str, before: str, name: str, weight: np.ndarray, epsilon: float
    ) -> List[str]:
        """Add the norm of x + before; return the norm and the sum."""
        self.weights[f"{name}.weight"] = weight
        outputs = [name, "", "", f"{name}.sum"]
        self.node(
            "SkipSimplifiedLayerNormalization",
            [x, before, f"{name}.weight"],
            outputs,
            DOMAIN,
            epsilon=epsilon,
        )
        return [outputs[0], outputs[3]]

    def gated(self, x: str, name: str, gate_and_up: np.ndarray, down: np.ndarray) -> str:
        """Add a gated MLP. QuickGelu with alpha 1 is SiLU."""
        both = [f"{name}.gate", f"{name}.up"]
        self.node(
            "Split", [self.product(x, f"{name}.both", gate_and_up)], both, axis=-1, num_outputs=2
        )
        activated = self.node("QuickGelu", both[:1], [f"{name}.activated"], DOMAIN, alpha=1.0)
        return self.product(self.node("Mul", [activated, both[1]], [f"{name}.inner"]), name, down)

    def model(self, source: Any, result: Any, layers: int) -> bytes:
        """Return the serialised model with inputs source, caches [B,K,M,D], seqlens_k [B] and
        total_sequence_length [], and outputs result and caches.
        """
        cache = ["batch", self.kv_heads, "capacity", self.head_size]
        names = [f"{layer}.{part}" for layer in range(layers) for part in ("key", "value")]
        inputs = [
            source,
            *(helper.make_tensor_value_info(f"past.{name}", FLOAT, cache) for name in names),
        ]
        inputs += [
            helper.make_tensor_value_info("seqlens_k", INT32, ["batch"]),
            helper.make_tensor_value_info("total_sequence_length", INT32, []),
        ]
        outputs = [
            result,
            *(helper.make_tensor_value_info(f"present.{name}", FLOAT, cache) for name in names),
        ]
        arrays = {
            name: array if array.dtype == np.int64 else np.ascontiguousarray(array, np.float32)
            for name, array in self.weights.items()
        }
        weights = [onnx.numpy_helper.from_array(array, name) for name, array in arrays.items()]
        graph = helper.make_graph(self.nodes, "hand_written", inputs, outputs, weights)
        imports = [helper.make_opsetid("", OPSET), helper.make_opsetid(DOMAIN, 1)]
        return helper.make_model(
            graph, opset_imports=imports, ir_version=IR_VERSION
        ).SerializeToString()


def block(config: Dict[str, Any], weights: Arrays) -> bytes:
    """Return the graph of a block that `shapes.is_plain_block` accepts: hidden_states [B,S,E] to
    output [B,S,E]. weights: by parameter name of AttentionBlock.
    """
    graph = HandGraph(config["attention"], config["max_positions"])
    graph.attend(
        "hidden_states",
        0,
        weights["attention.projection.qkv.weight"],
        weights["attention.projection.output.weight"],
        "output",
    )
    source, result = (
        helper.make_tensor_value_info(name, FLOAT, ["batch", "new", config["width"]])
        for name in ("hidden_states", "output")
    )
    return graph.model(source, result, 1)


def decoder(config: Dict[str, Any], weights: Arrays) -> bytes:
    """Return the graph of a decoder that `shapes.is_llama` accepts: input_ids [B,S] to logits of
    the last token [B,1,V]. weights: by parameter name of Stack.
    """
    layers, epsilon = len(config["order"]), config["norm"]["epsilon"]
    graph = HandGraph(config["layers"][config["order"][0]]["attention"], config["max_positions"])
    table = graph.weights["table"] = weights["tokens.embedding.weight"]
    total = graph.node("Gather", ["table", "input_ids"], ["embedded"])
    graph.weights["norm.first.weight"] = weights["layers.0.residual.attention_norm.weight"]
    x = graph.node(
        "SimplifiedLayerNormalization",
        [total, "norm.first.weight"],
        ["norm.first"],
        axis=-1,
        epsilon=epsilon,
    )
    for layer in range(layers):
        x, total = _layer(graph, layer, x, total, weights, epsilon)
    graph.weights["head"] = weights.get("head.linear.weight", table).T
    graph.weights |= {
        "from": np.array([-1]),
        "to": np.array([np.iinfo(np.int64).max]),
        "token_axis": np.array([1]),
    }
    last = graph.node("Slice", [x, "from", "to", "token_axis"], ["last"])  # [B,1,E]
    graph.node("MatMul", [last, "head"], ["logits"])
    source = helper.make_tensor_value_info("input_ids", INT64, ["batch", "new"])
    vocabulary = config["tokens"]["vocabulary"]
    result = helper.make_tensor_value_info("logits", FLOAT, ["batch", 1, vocabulary])
    return graph.model(source, result, layers)


def _layer(
    graph: HandGraph, layer: int, x: str, total: str, weights: Arrays, epsilon: float
) -> List[str]:
    """Add a layer on the norm x of the residual sum `total`; return those after it. The norm is
    that of the next layer, or after the last one that of the model.
    """
    own = f"layers.{layer}."
    added = graph.attend(
        x,
        layer,
        weights[f"{own}attention.projection.qkv.weight"],
        weights[f"{own}attention.projection.output.weight"],
        f"back.{layer}",
    )
    middle = weights[f"{own}residual.mlp_norm.weight"]
    x, total = graph.normed(total, added, f"norm.mlp.{layer}", middle, epsilon)
    gate_and_up = np.concatenate((weights[f"{own}mlp.gate.weight"], weights[f"{own}mlp.up.weight"]))
    added = graph.gated(x, f"mlp.{layer}", gate_and_up, weights[f"{own}mlp.down.weight"])
    following = f"layers.{layer + 1}.residual.attention_norm.weight"
    after = weights.get(following, weights["norm.weight"])
    return graph.normed(total, added, f"norm.after.{layer}", after, epsilon)
