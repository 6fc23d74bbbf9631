"""Graphs in ONNX with inputs and outputs that no exporter wrote yet: one rank, axis, dtype or name
of a decoder with a cache is another.
"""

import itertools
from typing import Any, Iterator

import onnx
import torch
from onnx import TensorProto, helper

WIDTH = 32
Ports = dict[str, tuple[int, list[Any]]]  # dtype and axes by name
INPUTS: Ports = {
    "input_ids": (TensorProto.INT64, ["b", "s"]),
    "attention_mask": (TensorProto.INT64, ["b", "t"]),
    "position_ids": (TensorProto.INT64, ["b", "s"]),
    "past_key_values.0.key": (TensorProto.FLOAT, ["b", 2, "p", 8]),
}
OUTPUTS: Ports = {
    "logits": (TensorProto.FLOAT, ["b", "s", WIDTH]),
    "present.0.key": (TensorProto.FLOAT, ["b", 2, "t", 8]),
}
# Further inputs that have a meaning.
FURTHER = ("inputs_embeds", "past_length", "seqlens_k", "total_sequence_length", "use_cache_branch",
           "cache_position", "token_type_ids", "logits_to_keep", "unknown")  # fmt: skip
DTYPES = ("FLOAT", "FLOAT16", "BFLOAT16", "DOUBLE", "INT64", "INT32", "UINT8", "BOOL", "STRING",
          "COMPLEX64", "FLOAT8E4M3FN", "INT4")  # fmt: skip
AXES = {
    "input_ids": [[0, "s"], [2, "s"], ["b", 0], ["b", 1], ["b", 4], [None, None], [1 << 40, "s"]],
    "attention_mask": [["b", 5], [3, "t"], ["b", 0], ["b", 1 << 40], ["b", 1, "s", "t"]],
    "position_ids": [["b", 5], [3, "b", "s"], [0, "b", "s"], [1 << 40, "b", "s"]],
    "past_key_values.0.key": [
        ["b", 2, 0, 8], ["b", 2, 16, 8], ["b", 2, 8, 8], [2, 2, "p", 8], ["b", "h", "p", "d"],
        ["b", 2, 1 << 40, 8], ["b", 2, "p", 0], [0, 2, "p", 8], ["b", 1 << 40, "p", 8],
        [3, "b", 2, "p", 8], [3, 2, "b", 2, "p", 8],
    ],
}  # fmt: skip


def flat(ids: torch.Tensor) -> torch.Tensor:
    """A model whose tokens are all equally probable."""
    return torch.zeros(*ids.shape, WIDTH)


def odd() -> Iterator[tuple[str, Ports, Ports]]:
    """Yield inputs and outputs of graphs, each with what is odd about it."""
    yield "nothing", INPUTS, OUTPUTS
    for name, dtype in itertools.product((*INPUTS, *FURTHER), DTYPES):
        axes = INPUTS.get(name, (0, ["b", "s", 16] if "embeds" in name else []))[1]
        inputs = {**INPUTS, name: (getattr(TensorProto, dtype), axes)}
        kind = inputs["past_key_values.0.key"][0]
        yield f"{name} {dtype}", inputs, {**OUTPUTS, "present.0.key": (kind, ["b", 2, "t", 8])}
    for name, rank in itertools.product((*INPUTS, *FURTHER), range(6)):
        dtype = INPUTS.get(name, (TensorProto.INT64, []))[0]
        yield f"{name} rank {rank}", {**INPUTS, name: (dtype, [*"bsxyz"][:rank])}, OUTPUTS
    for name, lists in AXES.items():
        for axes in lists:
            yield f"{name} {axes}", {**INPUTS, name: (INPUTS[name][0], axes)}, OUTPUTS
    for rank, dtype in itertools.product(range(6), DTYPES[:7]):
        logits = (getattr(TensorProto, dtype), ["b", "s", WIDTH, 1, 1][:rank])
        yield f"logits {dtype} rank {rank}", INPUTS, {**OUTPUTS, "logits": logits}
    for width in (0, 1, 31, 1 << 40, "v", None):
        axes = ["b", "s", width]
        yield f"logits {axes}", INPUTS, {**OUTPUTS, "logits": (TensorProto.FLOAT, axes)}
    for name in INPUTS:
        yield f"without {name}", {k: v for k, v in INPUTS.items() if k != name}, OUTPUTS
    for name in OUTPUTS:
        yield f"without {name}", INPUTS, {k: v for k, v in OUTPUTS.items() if k != name}
    yield "no input", {}, OUTPUTS
    yield "no output", INPUTS, {}
    for name in ("", "logits", "a\nb", "'''", '"""', "\\", "\u00e9\U0001f600", "input_ids "):
        yield f"an input named {name!r}", {**INPUTS, name: INPUTS["position_ids"]}, OUTPUTS
        yield f"a cache named {name!r}", {**INPUTS, name: INPUTS["past_key_values.0.key"]}, {
            **OUTPUTS, f"present_{name}": OUTPUTS["present.0.key"]
        }  # fmt: skip


def graph(inputs: Ports, outputs: Ports) -> onnx.ModelProto:
    """Return a graph of zeros, with the sizes of the tokens and the mask if these have them."""
    nodes = []

    def put(kind: str, name: str, *sources: str, **attributes: Any) -> str:
        nodes.append(helper.make_node(kind, sources, [name], **attributes))
        return name

    places = {"b": ("input_ids", 0), "s": ("input_ids", 1), "t": ("attention_mask", 1)}
    for name, (dtype, axes) in outputs.items():
        sizes = []
        for place, axis in enumerate(axes):
            source, at = places.get(str(axis), ("", 0))
            if source in inputs and len(inputs[source][1]) >= 2:
                size = put("Shape", f"{name} {place}", source, start=at, end=at + 1)
            else:
                fixed = axis if isinstance(axis, int) and axis < 1000 else 1
                size = put("Constant", f"{name} {place}", value_ints=[fixed])
            sizes.append(size)
        if sizes:
            size = put("Concat", f"{name} size", *sizes, axis=0)
        else:
            empty = helper.make_tensor("none", TensorProto.INT64, [0], [])
            size = put("Constant", f"{name} size", value=empty)
        put("Cast", name, put("ConstantOfShape", f"{name} zeros", size), to=dtype)
    known = {
        part: [helper.make_tensor_value_info(name, *port) for name, port in ports.items()]
        for part, ports in (("inputs", inputs), ("outputs", outputs))
    }
    body = helper.make_graph(nodes, "odd", known["inputs"], known["outputs"])
    return helper.make_model(body, ir_version=10, opset_imports=[helper.make_opsetid("", 21)])


CASES = {name: (inputs, outputs) for name, inputs, outputs in odd()}
