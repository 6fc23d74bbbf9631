"""Part "kernels" of bench.gpu: nodes alone on a provider, against numpy in float64.

Which forms of weights of few bits, of sinks and of rows of different lengths a device computes
right decides what target ort-cuda may write (export/targets/cuda_weights.py).
"""

import functools
import itertools
import math
from typing import Any, Callable, Dict, Iterator, Mapping, Sequence, Tuple

import numpy as np
import onnxruntime

from posenc_export.export.quantization.grid import Grid, packed_codes
from posenc_export.runtime.graphs.onnx_files import load_errors
from posenc_export.runtime.graphs.onnx_nodes import Nodes
from posenc_export.runtime.graphs.onnx_parts import constant, new_node, serialised
from posenc_export.runtime.graphs.ort_options import MIXED_PRODUCTS, PROVIDERS
from posenc_export.runtime.session.errors import RUN_ERRORS
from posenc_export.runtime.verification.attention import by_query_head, by_token, softmax, visible
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
# Name, node with its constants and feeds, and the output in float64.
Case = Tuple[str, Callable[[], np.ndarray], np.ndarray]


class Runner:
    """Runs single nodes on a provider. provider: "cuda" or "cpu"; random: of the inputs."""

    def __init__(self, provider: str) -> None:
        self.provider, self.random = PROVIDERS[provider], np.random.default_rng(0)

    def call(
        self,
        operator: str,
        inputs: Mapping[str, np.ndarray],
        attributes: Mapping[str, int],
        constants: Tuple[str, ...] = (),
        entries: Tuple[Tuple[str, str], ...] = (),
    ) -> np.ndarray:
        """Return the first output. inputs: in the order of the node, empty names are left out."""
        there = {name: array for name, array in inputs.items() if array.size}
        names = [name if name in there else "" for name in inputs]
        outputs = ["y", "keys", "values"] if operator == "GroupQueryAttention" else ["y"]
        domain = "" if operator == "DequantizeLinear" else MICROSOFT
        node = new_node(operator, names, outputs, attributes, domain)
        stored = {name: constant(name, there[name]) for name in constants if name in there}
        fed = {name: array for name, array in there.items() if name not in stored}
        free = {name: array.dtype.name for name, array in fed.items()}
        graph = Nodes(constants=stored, opsets={"": 23, MICROSOFT: 1})
        options = onnxruntime.SessionOptions()
        options.log_severity_level = 4
        for entry in entries:
            options.add_session_config_entry(*entry)
        content = serialised(graph, [node], outputs, free=free)
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
            x = run.random.standard_normal((1, tokens, INPUTS)).astype(np.float16)
            inputs, sizes = {"x": x, **stored}, {**how, "K": INPUTS, "N": OUTPUTS}
            entries = (MIXED_PRODUCTS,) if mixed else ()
            call = functools.partial(run.call, "MatMulNBits", inputs, sizes, tuple(stored), entries)
            kernel = ", kernel of mixed dtypes" if mixed else ""
            yield f"{name}: product, {tokens} tokens{kernel}", call, x.astype(np.float64) @ exact.T


def _rows(run: Runner, stored: Dict[str, np.ndarray], how: Dict[str, int]) -> np.ndarray:
    codes = stored["codes"].reshape(OUTPUTS, -1)
    inputs = {"codes": codes, "ids": np.arange(OUTPUTS), "scales": stored["scales"]}
    inputs["zeros"] = stored["zeros"]
    axes = {**how, "gather_axis": 0, "quantize_axis": 1}
    return run.call("GatherBlockQuantized", inputs, axes, tuple(stored))


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
    (heads, kv, size), length = sizes, np.array(lengths, np.int32)

    def numbers(*shape: int) -> np.ndarray:
        return run.random.standard_normal((len(lengths), *shape)).astype(np.float16)

    q, k, v = (numbers(new, count, size) for count in (heads, kv, kv))
    past = [numbers(kv, CAPACITY, size) for _ in "kv"]
    sink = run.random.standard_normal(heads if sinks else 0).astype(np.float16)
    exact = np.zeros((len(lengths), new, heads * size))
    for row, total in enumerate(lengths):
        of_row = [old[row, :, : total - new] for old in past]
        exact[row] = _attended(q[row], (k[row], v[row]), of_row, sink, window)
    flat, none = (len(lengths), new, -1), np.zeros(0)
    inputs = {"q": q.reshape(flat), "k": k.reshape(flat), "v": v.reshape(flat)}
    inputs |= {"past_k": past[0], "past_v": past[1], "lengths": length - 1}
    inputs |= {"longest": np.array(length.max())}
    inputs |= dict.fromkeys(("cos", "sin", "at", "bias"), none)
    attributes = {"num_heads": heads, "kv_num_heads": kv}
    attributes |= {"local_window_size": window} if window else {}
    name = f"attention of {heads}/{kv} heads of {size}, rows {list(lengths)}, {new} new"
    name += f"{', sinks' if sinks else ''}{f', window {window}' if window else ''}"
    inputs["sinks"] = sink
    call = functools.partial(run.call, "GroupQueryAttention", inputs, attributes, ("sinks",))
    return name, call, exact


def _attended(
    q: np.ndarray, new: Sequence[np.ndarray], past: Sequence[np.ndarray], sink: Any, window: int
) -> np.ndarray:
    """Output [S,H*D] of queries [S,H,D] for new [S,K,D] and cached [K,T,D] keys and values."""
    heads, size = q.shape[1:]
    pairs = zip(past, new, strict=True)
    joined = [np.concatenate([old, x.transpose(1, 0, 2)], 1) for old, x in pairs]
    keys, values = (by_query_head(x.astype(np.float64), heads) for x in joined)
    scores = q.transpose(1, 0, 2).astype(np.float64) @ keys.transpose(0, 2, 1) / math.sqrt(size)
    scores = np.where(visible(len(q), keys.shape[1], window), scores, -np.inf)
    sinks = sink[:, None, None].astype(np.float64) if sink.size else -np.inf
    return by_token(softmax(scores, sinks) @ values)


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
