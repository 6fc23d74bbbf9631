"""Part "kernels" of bench.gpu: nodes alone on a provider, against numpy in float64.

Which forms of weights of few bits, of sinks and of rows of different lengths a device computes
right decides what target ort-cuda may write (export/targets/weights.py).
"""

import functools
import itertools
from typing import Any, Callable, Dict, Iterator, Sequence, Tuple

import numpy as np
import onnxruntime

from posenc_export.export.quantization.grid import Grid, packed_codes
from posenc_export.runtime.graphs.onnx_files import load_errors
from posenc_export.runtime.graphs.onnx_nodes import Node, Nodes
from posenc_export.runtime.graphs.onnx_parts import constant, new_node, serialised
from posenc_export.runtime.graphs.ort_options import MIXED_PRODUCTS, PROVIDERS
from posenc_export.runtime.session.errors import RUN_ERRORS
from posenc_export.runtime.verification.conformance.attention import INPUTS as INPUT_NAMES
from posenc_export.runtime.verification.conformance.attention import Inputs
from posenc_export.shared.numerics import FLOAT16_NOISE, Errors, cell_error, rounding_tolerance

MICROSOFT = "com.microsoft"
BLOCKS = ((4, 32), (4, 128), (8, 32), (8, 128))  # bits and block of the formats of ort-cuda
INPUTS, OUTPUTS = 512, 256
TOKENS = (1, 3, 17, 300)
# Heads, heads of keys and values, head size.
HEADS = ((4, 2, 16), (8, 1, 64), (8, 8, 64), (8, 2, 128))
LENGTHS = ((20,), (20, 7, 33), (4, 40))
CAPACITY = 64
TOLERANCE = rounding_tolerance(3 * FLOAT16_NOISE)  # of sums and weights in half precision
Arrays = Dict[str, np.ndarray]
Entry = Tuple[str, str]  # of the configuration of a session
# Name, node with its constants and feeds, and the output in float64.
Case = Tuple[str, Callable[[], np.ndarray], np.ndarray]


class Runner:
    """Runs single nodes on a provider. provider: "cuda" or "cpu"; random: of the inputs."""

    def __init__(self, provider: str) -> None:
        self.provider, self.random = PROVIDERS[provider], np.random.default_rng(0)

    def numbers(self, *shape: int) -> np.ndarray:
        return self.random.standard_normal(shape).astype(np.float16)

    def call(
        self, node: Node, inputs: Arrays, constants: Sequence[str], entries: Sequence[Entry] = ()
    ) -> np.ndarray:
        """Return the first output. constants: inputs that the graph stores."""
        stored = {name: constant(name, inputs[name]) for name in constants if name in inputs}
        fed = {name: array for name, array in inputs.items() if name not in stored}
        free = {name: array.dtype.name for name, array in fed.items()}
        graph = Nodes(constants=stored, opsets={"": 23, MICROSOFT: 1})
        options = onnxruntime.SessionOptions()
        options.log_severity_level = 4
        for entry in entries:
            options.add_session_config_entry(*entry)
        content = serialised(graph, [node], node.outputs, free=free)
        where: Any = {"providers": [self.provider], "enable_fallback": 0}
        session = onnxruntime.InferenceSession(content, options, **where)
        return np.asarray(session.run(None, fed)[0])


def weights(run: Runner) -> Iterator[Case]:
    """Yield rows of tables and products, in every grid with blocks."""
    for bits, block in BLOCKS:
        grid = Grid(bits, block, zeros=bits == 4)
        codes = grid.rounded(run.random.standard_normal((OUTPUTS, INPUTS)).astype(np.float32))
        zeros, exact = codes.zeros(bits), codes.weight.astype(np.float64)
        points = np.zeros(codes.scales.shape, np.int8) if zeros is None else zeros
        stored = {"codes": packed_codes(codes.codes, grid)}
        stored |= {"scales": codes.scales.astype(np.float16), "zeros": packed_codes(points, grid)}
        name, how = f"{bits} bits, blocks of {block}", {"bits": bits, "block_size": block}
        yield f"{name}: rows of a table", functools.partial(_rows, run, stored, how), exact
        for tokens, mixed in itertools.product(TOKENS, (True, False)):
            x = run.numbers(1, tokens, INPUTS)
            inputs, sizes = {"x": x, **stored}, {**how, "K": INPUTS, "N": OUTPUTS}
            node = new_node("MatMulNBits", [*inputs], ["y"], sizes, MICROSOFT)
            entries = (MIXED_PRODUCTS,) if mixed else ()
            kernel = ", kernel of mixed dtypes" if mixed else ""
            call = functools.partial(run.call, node, inputs, tuple(stored), entries)
            yield f"{name}: product, {tokens} tokens{kernel}", call, x.astype(np.float64) @ exact.T


def _rows(run: Runner, stored: Arrays, how: Dict[str, int]) -> np.ndarray:
    inputs = {"codes": stored["codes"].reshape(OUTPUTS, -1), "ids": np.arange(OUTPUTS)}
    inputs |= {"scales": stored["scales"], "zeros": stored["zeros"]}
    axes = {**how, "gather_axis": 0, "quantize_axis": 1}
    node = new_node("GatherBlockQuantized", [*inputs], ["y"], axes, MICROSOFT)
    return run.call(node, inputs, tuple(stored))


def attention(run: Runner) -> Iterator[Case]:
    """Yield GroupQueryAttention with rows of different lengths, sinks and windows."""
    for sizes, lengths, new in itertools.product(HEADS, LENGTHS, (1, 4)):
        if new > 1 and len(lengths) > 1:
            continue  # the operator refuses several rows with cached tokens
        for sinks, window in itertools.product((False, True), (0, 5)):
            yield _attention(run, sizes, lengths, new, sinks, window)


def _attention(
    run: Runner, sizes: Tuple[int, int, int], lengths: Any, new: int, sinks: bool, window: int
) -> Case:
    (heads, kv, size), rows, length = sizes, len(lengths), np.array(lengths, np.int32)
    feeds = {
        n: run.numbers(rows, new, k * size) for n, k in zip("qkv", (heads, kv, kv), strict=True)
    }
    feeds |= {name: run.numbers(rows, kv, CAPACITY, size) for name in ("past_k", "past_v")}
    feeds |= {"lengths": length - 1, "longest": np.array(length.max())}
    feeds |= {"sinks": run.numbers(heads)} if sinks else {}
    attributes = {"num_heads": heads, "kv_num_heads": kv}
    attributes |= {"local_window_size": window} if window else {}
    names, outputs = (
        [name if name in feeds else "" for name in INPUT_NAMES[:12]],
        ["y", "keys", "values"],
    )
    node = new_node("GroupQueryAttention", names, outputs, attributes, MICROSOFT)
    exact = np.zeros((rows, new, heads * size))
    for row, total in enumerate(lengths):
        inputs = Inputs(node, feeds, row)
        q, *appended = inputs.heads()
        pairs = zip((feeds["past_k"], feeds["past_v"]), appended, strict=True)
        read = [np.concatenate((old[row, :, : total - new], x), 1) for old, x in pairs]
        exact[row] = inputs.attended(q, *read)[1]
    name = f"attention of {heads}/{kv} heads of {size}, rows {list(lengths)}, {new} new"
    name += f"{', sinks' if sinks else ''}{f', window {window}' if window else ''}"
    return name, functools.partial(run.call, node, feeds, ("sinks",)), exact


GROUPS = {"weights": weights, "attention": attention}


def rows(group: str, provider: str) -> Iterator[Dict[str, Any]]:
    """Run the cases of a group; yield {"case", "error", "right"}, or why one is refused."""
    for name, call, exact in GROUPS[group](Runner(provider)):
        errors = Errors()
        try:
            errors.add(call().astype(np.float64), exact)
        except (*load_errors(), *RUN_ERRORS) as error:
            yield {"case": name, "refused": " ".join(str(error).split())[:200]}
            continue
        size = cell_error(errors, rounds=True)
        yield {"case": name, "error": size, "right": bool(size <= TOLERANCE)}
