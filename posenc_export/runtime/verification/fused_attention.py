"""Check "attention": fused attention alone, at the edges of its description, against float64."""

import functools
from dataclasses import dataclass
from pathlib import Path
from typing import Dict, Iterator, List, NamedTuple, Optional, Tuple

import numpy as np
import onnxruntime

from posenc_export.runtime.artefact.certificate import MOST_FAILURES, Check
from posenc_export.runtime.graphs import kernel_library, onnx_nodes
from posenc_export.runtime.graphs.onnx_nodes import Node, Nodes
from posenc_export.runtime.graphs.onnx_parts import opened, serialised
from posenc_export.runtime.session.model import Model
from posenc_export.runtime.verification import attention, integer_calls
from posenc_export.runtime.verification.integer_graph import integer_part

OPERATORS = ("GroupQueryAttention", kernel_library.OPERATOR)
INPUTS = ("q", "k", "v", "past_k", "past_v", "lengths", "longest", "cos", "sin", "", "", "sinks")
SCALED = (*INPUTS, "k_scale", "v_scale")
NATIVE = (*SCALED, "distances", "slots", "key_cos", "key_sin")  # of packages/kernels
TARGETS = ("ort", "ort-native", "ort-cuda")
TOLERANCE = 2e-5  # of weighted sums of numbers of size 1 in float32; a key too many changes 1/keys
LONGEST = 8192  # keys of the longest row
TOGETHER = 1024  # keys of the longest row that is evaluated together with others
PROMPTS = (2, 17, 65)  # tokens of calls with several new tokens
JUNK = 1e4  # in slots after a row
STEP = 1 / 64  # between numbers of caches of 8 bits


@dataclass(frozen=True)
class Kernel:
    """A node and the sizes of its inputs. Equal kernels have equal results.

    Args:
        heads, kv_heads, size: H, K and head size D.
        scale, softcap: of scores; 0 for no cap.
        packed, sinks, scaled: whether q, k and v are one input, and inputs for sinks and for scales
            of 8-bit caches exist.
    """

    model: bytes  # the node alone as a model
    heads: int
    kv_heads: int
    size: int
    rotary: int  # size r of the rotated part of a head; 0 for none
    interleaved: bool  # which entries form a pair
    window: int  # number of keys that a query sees; 0 for all
    scale: float
    softcap: float
    packed: bool
    sinks: bool
    scaled: bool
    lengths: Tuple[int, ...]  # numbers of tokens after a call, both sides of each edge
    chunk: int  # positions of a chunk; 0 for none
    range: int  # columns of the table of biases by distance; 0 for none
    given: Tuple[str, ...]  # names of the inputs


def check(folder: Path, model: Model) -> Check:
    """Compare each kind of fused attention node of an artefact with attention in float64, on this
    machine's CPU. Raise OSError for a file that cannot be read.
    """
    manifest, calls = model.manifest, 0
    failures: Dict[str, str] = {}
    skipped: Dict[str, str] = {}
    if not (folder / "model.onnx").exists() or manifest.target not in TARGETS:
        return Check(0, "rows", skipped={manifest.target: "has no GroupQueryAttention"})
    if manifest.dtype != "float32":
        return Check(0, "rows", skipped={manifest.dtype: "not computed by the CPU kernel"})
    part = integer_part(onnx_nodes.read(folder / "model.onnx"))
    edges = [n for n in integer_calls.edges(manifest) if n <= LONGEST]
    lengths = tuple(sorted({n for n in (*range(1, 18), *edges) if n <= manifest.max_positions}))
    for node, layer in part.attention:
        if node.operator not in OPERATORS:
            continue
        sizes = [s.axes for s in manifest.states if s.past == f"past_key_values.{layer}.key"]
        if not sizes:
            skipped[f"{node.operator} of layer {layer}"] = "its cache is not known"
            continue
        rows, fault = compared(_kernel(part.graph, node, int(sizes[0][3]), lengths))
        calls += rows
        if fault and len(failures) < MOST_FAILURES:
            failures[f"{node.operator} of layer {layer}"] = fault
    return Check(calls, "rows", failures=failures, skipped=skipped)


def _kernel(graph: Nodes, node: Node, size: int, lengths: Tuple[int, ...]) -> Kernel:
    present = [*node.inputs, *[""] * (len(NATIVE) - len(node.inputs))]
    scaled = bool(present[12])
    names = [new if old else "" for new, old in zip(NATIVE, present, strict=True)]
    names[9] = "positions" if present[9] and node.operator == kernel_library.OPERATOR else ""
    names[10] = ""
    while not names[-1]:
        names.pop()
    known = {k: v for k, v in node.attributes.items() if k != "qk_output"}
    stored = {k: v for k, v in node.serialised.items() if k != "qk_output"}
    alone = Node(node.domain, node.operator, "", names, ["y", "keys", "values"], known, stored)
    free = dict.fromkeys((name for name in names if name), "float")
    integers = {"lengths": "int32", "longest": "int32", "slots": "int64", "positions": "int64"}
    free |= {name: element for name, element in integers.items() if name in names}
    free |= {"past_k": "int8", "past_v": "int8"} if scaled else {}
    model = serialised(Nodes(opsets=graph.opsets), [alone], ["y"], free=free)
    table, distances = (graph.constants.get(present[index]) for index in (7, 14))
    return Kernel(
        model,
        known["num_heads"],
        known["kv_num_heads"],
        size,
        2 * table.shape[1] if table is not None and known.get("do_rotary") else 0,
        bool(known.get("rotary_interleaved", 0)),
        max(known.get("local_window_size", 0), 0),
        known.get("scale", 0.0) or size**-0.5,
        known.get("softcap", 0.0),
        not present[1],
        bool(present[11]),
        scaled,
        lengths,
        known.get("chunk_size", 0),
        0 if distances is None else distances.shape[1],
        tuple(name for name in names if name),
    )


@functools.lru_cache(256)
def compared(kernel: Kernel) -> Tuple[int, str]:
    """Return how many rows were compared and the first fault; once per kernel and process. Rows
    have different lengths, and slots after them hold large numbers.
    """
    session = opened(kernel.model, Path("."))
    random, count = np.random.default_rng(0), 0
    for cached, new in _calls(kernel.lengths):
        count += len(cached)
        feeds, expected = _case(kernel, cached, new, random)
        (y,) = session.run(["y"], feeds)
        wrong = ~(np.abs(y - expected) <= TOLERANCE).all((1, 2))
        if wrong.any():
            row = int(np.flatnonzero(wrong)[0])
            text = f"{cached[row]} cached and {new} new tokens of ONNX Runtime"
            error = np.abs(y[row] - expected[row]).max()
            return count, f"{text} {onnxruntime.__version__}: error {error:.1e}"
    return count, ""


def _calls(lengths: Tuple[int, ...]) -> Iterator[Tuple[List[int], int]]:
    """Yield cached tokens of each row of a call, and its new tokens: steps first, then prompts."""
    yield [n - 1 for n in lengths if n <= TOGETHER], 1
    for length in lengths:
        if length > TOGETHER:
            yield [length - 1], 1
    for new in PROMPTS:
        for length in lengths[:: 1 if new == PROMPTS[0] else 4]:
            if new <= length <= TOGETHER:
                yield [length - new], new


def _case(
    kernel: Kernel, cached: List[int], new: int, random: np.random.Generator
) -> Tuple[Dict[str, np.ndarray], np.ndarray]:
    rows, longest = len(cached), max(cached) + new
    h, kv, d = kernel.heads, kernel.kv_heads, kernel.size
    q, k, v = (_numbers(kernel, random, (rows, new, n, d)) for n in (h, kv, kv))
    past = [_numbers(kernel, random, (rows, kv, longest, d)) for _ in range(2)]
    if kernel.scaled:
        q = np.zeros_like(q)  # rotated keys are rounded, which a query of zeros does not see
    tables = [_waves(random, longest + rows, kernel.rotary // 2) for _ in range(2)]
    of_keys = tables["key_cos" in kernel.given]
    distances = random.standard_normal((h, kernel.range)).astype(np.float32)
    slots = np.array(cached)[:, None] + np.arange(new)
    positions = slots + np.arange(rows)[:, None] if "positions" in kernel.given else slots
    sinks = random.standard_normal(h).astype(np.float32) if kernel.sinks else None
    expected = np.zeros((rows, new, h * d))
    for row, count in enumerate(cached):
        for kind in past:
            kind[row, :, count:] = JUNK
        queries, keys, values = (attention.Heads.of_tokens(x[row]) for x in (q, k, v))
        at = positions[row]
        turned, turned_keys = (
            heads.rotated(cos[at], sin[at], kernel.interleaved)
            for heads, (cos, sin) in ((queries, tables[0]), (keys, of_keys))
        )
        appended = turned_keys.numbers, values.numbers
        read = [
            np.concatenate((kind[row, :, :count], x), 1)
            for kind, x in zip(past, appended, strict=True)
        ]
        expected[row] = _attended(kernel, turned.numbers, read, _Scores(sinks, distances, at))
    flat = [x.reshape(rows, new, -1) for x in (q, k, v)]
    feeds = {"q": np.concatenate(flat, 2)} if kernel.packed else dict(zip("qkv", flat, strict=True))
    names = ("past_k", "past_v")
    feeds |= {name: _stored(kernel, x) for name, x in zip(names, past, strict=True)}
    feeds["lengths"] = np.array(cached, np.int32) + new - 1
    feeds["longest"] = np.array(longest, np.int32)
    if kernel.rotary:
        feeds |= dict(
            zip(("cos", "sin", "key_cos", "key_sin"), (*tables[0], *of_keys), strict=True)
        )
    feeds |= {} if sinks is None else {"sinks": sinks}
    feeds |= {"distances": distances, "slots": slots, "positions": positions}
    if kernel.scaled:
        feeds |= dict.fromkeys(("k_scale", "v_scale"), np.full(kv * d, STEP, np.float32))
    return {name: feeds[name] for name in kernel.given}, expected


def _waves(random: np.random.Generator, rows: int, width: int) -> Tuple[np.ndarray, np.ndarray]:
    angles = random.uniform(0, 6, (rows, width))
    return np.cos(angles).astype(np.float32), np.sin(angles).astype(np.float32)


class _Scores(NamedTuple):
    """Sinks [H] or None, biases by distance [H,range], and positions of new tokens [S] of a row."""

    sinks: Optional[np.ndarray]
    distances: np.ndarray
    positions: np.ndarray


def _numbers(kernel: Kernel, random: np.random.Generator, shape: Tuple[int, ...]) -> np.ndarray:
    """Return numbers of size 1, which caches of 8 bits hold exactly."""
    numbers = random.uniform(-1, 1, shape)
    return (np.rint(numbers / STEP) * STEP if kernel.scaled else numbers).astype(np.float32)


def _stored(kernel: Kernel, cache: np.ndarray) -> np.ndarray:
    return np.clip(np.rint(cache / STEP), -128, 127).astype(np.int8) if kernel.scaled else cache


def _attended(kernel: Kernel, q: np.ndarray, read: List[np.ndarray], given: _Scores) -> np.ndarray:
    """Return the output [S,H*D] of queries [H,S,D] with keys and values [K,T,D]."""
    keys, values = (attention.by_query_head(part, kernel.heads) for part in read)
    scores = kernel.scale * (q @ keys.transpose(0, 2, 1))  # [H,S,T]
    if kernel.softcap:
        scores = kernel.softcap * np.tanh(scores / kernel.softcap)
    count, total = q.shape[1], keys.shape[1]
    behind = np.arange(total - count, total)[:, None] - np.arange(total)
    if kernel.range:
        scores = scores + given.distances[:, np.clip(behind, 0, kernel.range - 1)]
    seen = attention.visible(count, total, kernel.window)
    if kernel.chunk:
        seen = seen & (behind <= given.positions[:, None] % kernel.chunk)
    scores = np.where(seen, scores, -np.inf)
    sinks = -np.inf if given.sinks is None else given.sinks[:, None, None]
    weights = attention.softmax(scores, sinks)
    return attention.by_token(weights @ values)
