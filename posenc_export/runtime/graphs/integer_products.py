"""Exact sums of products of unsigned with signed bytes on every processor."""

import functools
from pathlib import Path
from typing import Any, Collection, Dict

import numpy as np

from posenc_export.runtime.graphs.onnx_files import NEWER, older, version
from posenc_export.runtime.graphs.onnx_nodes import Nodes
from posenc_export.runtime.graphs.onnx_parts import constant, new_node, opened, serialised
from posenc_export.shared.refusal import refusal

OPERATOR = "MatMulIntegerToFloat"
EXACT = ("session.x64quantprecision", "1")  # products of unsigned bytes, which take longer
SINCE = "1.30"  # version of ONNX Runtime; with EXACT, earlier ones abort the process
SIZE, TOKENS = 64, (1, 4)  # of the products that are tried; one token has kernels of its own


def keep_exact(options: Any, operators: Collection[str]) -> None:
    """Let a session compute exact sums in MatMulIntegerToFloat, if it is one of the operators of
    its graph: with the option, ONNX Runtime 1.31 cannot run DequantizeLinear of int8 weights with a
    scale for each output.

    Raises:
        ValueError: an ONNX Runtime older than SINCE.
    """
    if OPERATOR in operators and saturates():
        if older(SINCE):
            rule = f"ONNX Runtime {SINCE} or newer for {OPERATOR} without VNNI"
            raise refusal("runtime", rule, version(), NEWER)
        options.add_session_config_entry(*EXACT)


@functools.cache
def saturates() -> bool:
    """Return whether ONNX Runtime limits sums of two products to 16 bits here, as the instruction
    vpmaddubsw does that it chooses for processors with AVX2 or AVX-512 and without VNNI.
    """
    numbers: Dict[str, np.ndarray] = {
        "w": np.full((SIZE, SIZE), 127, np.int8),
        "one": np.ones(1, np.float32),
        "point": np.zeros(1, np.uint8),
    }
    constants = {name: constant(name, array) for name, array in numbers.items()}
    graph = Nodes(constants=constants, opsets={"": 21, "com.microsoft": 1})
    names = ["x", "w", "one", "one", "point"]
    node = new_node(OPERATOR, names, ["y"], domain="com.microsoft")
    session = opened(serialised(graph, [node], ["y"], free={"x": "uint8"}), Path("."))
    largest = [np.full((tokens, SIZE), 255, np.uint8) for tokens in TOKENS]
    return any((session.run(None, {"x": x})[0] != SIZE * 255 * 127).any() for x in largest)
