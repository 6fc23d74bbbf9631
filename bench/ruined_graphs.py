"""Ruins of graphs that bench.ruins plants in artefacts and in what the exporter writes."""

from dataclasses import dataclass
from typing import Any, Callable, Sequence

import numpy as np
import onnx
from onnx import helper, numpy_helper

FEW_BITS = ("int8", "int8-32", "int4", "int4-128", "keep")
NATIVE = ("native", "native cache int8")  # of target ort-native
CACHES = ("cache int8", "native cache int8")
FORMATS = ("float32", "float16", *FEW_BITS, "cache int8", *NATIVE)
ATTENTIONS = ("GroupQueryAttention", "CachedAttention")  # with the same first inputs
WEIGHT = "layers.1.mlp.up.weight"  # the weight that is ruined
BLOCKED = "layers.1.mlp.down.weight"  # in blocks in every format of few bits
ORIGINAL = 600  # positions after which LongRoPE has other factors
Graph = Any  # onnx.GraphProto


@dataclass(frozen=True)
class Ruin:
    """A wrong artefact."""

    name: str  # what is wrong
    model: str  # the decoder that it is planted in, a key of MODELS
    plant: Callable[[Graph], None]  # changes a graph in place
    formats: tuple[str, ...] = FORMATS  # formats in which it can be planted


def _constant(graph: Graph, name: str, change: Callable[[np.ndarray], np.ndarray]) -> None:
    """Change the constants whose name ends with `name`."""
    changed = [tensor for tensor in graph.initializer if tensor.name.endswith(name)]
    assert changed, f"expected a constant {name}"
    for tensor in changed:
        before = numpy_helper.to_array(tensor)
        after = np.ascontiguousarray(change(before.copy())).astype(before.dtype)
        assert not np.array_equal(before, after), f"expected a change of {name}"
        tensor.CopyFrom(numpy_helper.from_array(after, tensor.name))


def _weight(change: Callable[[np.ndarray], np.ndarray]) -> Callable[[Graph], None]:
    """Change the numbers of WEIGHT, or its codes, with outputs along the first axis."""

    def plant(graph: Graph) -> None:
        names = [tensor.name for tensor in graph.initializer]
        codes = [name for name in names if name.endswith(f"{WEIGHT}.codes")]
        name = codes[0] if codes else next(name for name in names if WEIGHT in name)
        shape = next(list(t.dims) for t in graph.initializer if t.name == name)
        turned = len(shape) == 2 and shape[0] == 64
        _constant(graph, name, lambda array: change(array.T).T if turned else change(array))

    return plant


def constants(name: str, change: Callable[[np.ndarray], np.ndarray]) -> Callable[[Graph], None]:
    return lambda graph: _constant(graph, name, change)


def _zero_output(numbers: np.ndarray) -> np.ndarray:
    numbers[5] = 136 if numbers.dtype == np.uint8 and numbers.ndim == 3 else 0
    return numbers


def _exchange(first: int) -> Callable[[np.ndarray], np.ndarray]:
    """Exchange a row with the next one."""

    def change(numbers: np.ndarray) -> np.ndarray:
        numbers[[first, first + 1]] = numbers[[first + 1, first]]
        return numbers

    return change


def _exchange_nibbles(codes: np.ndarray) -> np.ndarray:
    codes[5] = codes[5] >> 4 | (codes[5] & 15) << 4
    return codes


def _next_number(numbers: np.ndarray) -> np.ndarray:
    numbers[5, 7] = np.nextafter(numbers[5, 7], np.asarray(np.inf, numbers.dtype))
    return numbers


def _one_more(numbers: np.ndarray) -> np.ndarray:
    numbers.reshape(-1)[5] ^= 1
    return numbers


def attention(name: str, change: Callable[[Any], Any]) -> Callable[[Graph], None]:
    """Change an attribute of every attention node; None removes it."""

    def plant(graph: Graph) -> None:
        nodes = [node for node in graph.node if node.op_type in ATTENTIONS]
        assert nodes
        for node in nodes:
            before = {a.name: helper.get_attribute_value(a) for a in node.attribute}
            value = change(before.get(name))
            kept = [attribute for attribute in node.attribute if attribute.name != name]
            del node.attribute[:]
            node.attribute.extend(kept)
            if value is not None:
                node.attribute.append(helper.make_attribute(name, value))

    return plant


def _hole(rows: np.ndarray) -> np.ndarray:
    rows[400:432] = 0
    return rows


def _late_decays(graph: Graph) -> None:
    """Let the keys of the second layer have the decays of the keys before."""
    node = [node for node in graph.node if node.op_type == "CachedAttention"][1]
    # A slot more at the start, one less at the end
    _store(graph, "ruin.later", [0, 0, 1, 0, 0, 0, -1, 0])
    _insert(graph, node, [helper.make_node("Pad", [node.input[21], "ruin.later"], ["ruin.decays"])])
    node.input[21] = "ruin.decays"


def _exchange_tables(graph: Graph) -> None:
    for node in graph.node:
        if node.op_type in ATTENTIONS:
            node.input[7], node.input[8] = node.input[8], node.input[7]


def slopes(change: Callable[[np.ndarray], np.ndarray]) -> Callable[[Graph], None]:
    """Change the slopes of ALiBi, the constant [H,1,1] for 4 heads, or its table by distance."""

    def plant(graph: Graph) -> None:
        tables = {node.input[14] for node in graph.node if len(node.input) > 14}
        (tensor,) = (t for t in graph.initializer if list(t.dims) == [4, 1, 1] or t.name in tables)
        after = np.ascontiguousarray(change(numpy_helper.to_array(tensor).copy()))
        tensor.CopyFrom(numpy_helper.from_array(after, tensor.name))

    return plant


def _halved(numbers: np.ndarray) -> np.ndarray:
    numbers[1] /= 2
    return numbers


def _late_head(graph: Graph) -> None:
    """Let the first head of the second layer read the queries of the token before."""
    node = [node for node in graph.node if node.op_type in ATTENTIONS][1]
    queries = node.input[0]
    numbers = {"ruin.0": 0, "ruin.1": 1, "ruin.16": 16, "ruin.-1": -1, "ruin.end": 1 << 40}
    for name, value in {**numbers, "ruin.2": 2}.items():
        _store(graph, name, [value])
    parts = [
        helper.make_node("Slice", [queries, "ruin.0", "ruin.16", "ruin.2"], ["ruin.head"]),
        helper.make_node("Slice", [queries, "ruin.16", "ruin.end", "ruin.2"], ["ruin.rest"]),
        helper.make_node("Slice", ["ruin.head", "ruin.0", "ruin.1", "ruin.1"], ["ruin.first"]),
        helper.make_node("Slice", ["ruin.head", "ruin.0", "ruin.-1", "ruin.1"], ["ruin.before"]),
        helper.make_node("Concat", ["ruin.first", "ruin.before"], ["ruin.late"], axis=1),
        helper.make_node("Concat", ["ruin.late", "ruin.rest"], ["ruin.queries"], axis=2),
    ]
    _insert(graph, node, parts)
    node.input[0] = "ruin.queries"


def _shift_slots(depth: int) -> Callable[[Graph], None]:
    """Let rows of more than `depth` tokens lose their last one: lengths are one less."""

    def plant(graph: Graph) -> None:
        nodes = [node for node in graph.node if node.op_type in ATTENTIONS]
        lengths = nodes[0].input[5]
        _store(graph, "ruin.depth", np.int32(depth))
        parts = [
            helper.make_node("Greater", [lengths, "ruin.depth"], ["ruin.deep"]),
            helper.make_node("Cast", ["ruin.deep"], ["ruin.less"], to=onnx.TensorProto.INT32),
            helper.make_node("Sub", [lengths, "ruin.less"], ["ruin.lengths"]),
        ]
        _insert(graph, nodes[0], parts)
        for node in nodes:
            node.input[5] = "ruin.lengths"

    return plant


def _store(graph: Graph, name: str, numbers: Any) -> None:
    graph.initializer.append(numpy_helper.from_array(np.asarray(numbers), name))


def _insert(graph: Graph, before: Any, nodes: Sequence[Any]) -> None:
    at = [node.name for node in graph.node].index(before.name)
    for offset, node in enumerate(nodes):
        graph.node.insert(at + offset, node)


def _far_keys_unwritten(graph: Graph) -> None:
    """Cache zeros in place of the entries of keys with long factors."""
    laid_out = {node.output[0] for node in graph.node if node.op_type == "Reshape"}
    nodes = [n for n in graph.node if n.op_type == "Concat" and n.input[1] in laid_out]
    assert nodes, "expected a node that joins the entries of both rotations of keys"
    for index, node in enumerate(nodes):
        zeros = f"ruin.zeros.{index}"
        _insert(graph, node, [helper.make_node("Sub", [node.input[1]] * 2, [zeros])])
        node.input[1] = zeros


RUINS = (
    Ruin("scales rolled by one output", "rope",
         constants(f"{WEIGHT}.scales", lambda s: np.roll(s, 1, 0)), FEW_BITS),
    Ruin("codes rolled by one output", "rope", _weight(lambda w: np.roll(w, 1, 0)), FEW_BITS),
    Ruin("one zero point off", "rope", constants(f"{BLOCKED}.zeros", _one_more),
         ("int4", "int4-128")),
    Ruin("nibbles of one output exchanged", "rope", _weight(_exchange_nibbles),
         ("int4", "int4-128")),
    Ruin("one output zero", "rope", _weight(_zero_output)),
    Ruin("two outputs exchanged", "rope", _weight(_exchange(5))),
    Ruin("one weight off by one unit in the last place", "rope", _weight(_next_number),
         ("float32", "float16", "cache int8", *NATIVE)),
    Ruin("cache scale of one channel doubled", "rope",
         constants("past_key_values.1.key.scale",
                lambda s: np.where(np.arange(len(s)) == 3, 2 * s, s)),
         CACHES),
    Ruin("softmax scale 1 % off", "rope", attention("scale", lambda scale: 1.01 * scale)),
    Ruin("one head's queries late by one token", "rope", _late_head),
    Ruin("cos and sin exchanged", "rope", _exchange_tables),
    Ruin("rows 400 to 431 of the cos table zero", "rope", constants("cos.rows", _hole)),
    Ruin("slope of one head halved", "alibi", slopes(_halved)),
    Ruin("window one token short", "rope", attention("local_window_size", lambda w: w - 1)),
    Ruin("window one token long", "rope", attention("local_window_size", lambda w: w + 1)),
    Ruin("window ignored", "rope", attention("local_window_size", lambda _: None)),
    Ruin("slots shifted from 256 cached tokens on", "rope", _shift_slots(256)),
    Ruin("slots shifted from 300 cached tokens on", "rope", _shift_slots(300)),
    Ruin("long factors of keys never written", "longrope", _far_keys_unwritten),
    Ruin("rows of two distances exchanged", "shaw",
         constants("row_of_distance", _exchange(3)), NATIVE),
    Ruin("decays of keys late by one token", "fox", _late_decays, NATIVE),
)  # fmt: skip
