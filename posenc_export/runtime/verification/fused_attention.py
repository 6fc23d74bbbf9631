"""Check "attention": fused attention alone, at the edges of its description, against float64."""

import functools
from dataclasses import dataclass, field
from pathlib import Path
from typing import Dict, Iterator, List, Tuple

import numpy as np
import onnxruntime

from posenc_export.runtime.artefact.cache_formats import SCALED
from posenc_export.runtime.artefact.certificate import Check
from posenc_export.runtime.artefact.schema import GRAPHS
from posenc_export.runtime.graphs import kernel_library, onnx_nodes
from posenc_export.runtime.graphs.onnx_nodes import Node, Nodes
from posenc_export.runtime.graphs.onnx_parts import opened, serialised
from posenc_export.runtime.session.model import Model
from posenc_export.runtime.verification import described
from posenc_export.runtime.verification.attention import ROW_OF_DISTANCE, Inputs, attended
from posenc_export.runtime.verification.integer_graph import integer_part
from posenc_export.runtime.verification.turned_keys import of_digits

OPERATORS = ("GroupQueryAttention", kernel_library.OPERATOR)
INPUTS = ("q", "k", "v", "past_k", "past_v", "lengths", "longest", "cos", "sin", "", "", "sinks")
OF_SCALES = ("k_scale", "v_scale")
BY_CONTENT = ("query_rows", "key_rows", "row_of_distance", "decays", "count_rows")
PIECES = ("numbers", "factors", "pieces")
DISTANCE_KEYS = ("distance_queries", "distance_keys")
TURNS = ("turn_cos", "turn_sin")
# Of packages/kernels.
NATIVE = (*INPUTS, *OF_SCALES, "distances", "slots", "key_cos", "key_sin", *BY_CONTENT, *PIECES,
          *DISTANCE_KEYS, *TURNS)  # fmt: skip
TOLERANCE = 2e-5  # of weighted sums of numbers of size 1 in float32; a key too many changes 1/keys
LONGEST = 8192  # keys of the longest row
TOGETHER = 1024  # keys of the longest row that is evaluated together with others
PROMPTS = (2, 17, 65)  # tokens of calls with several new tokens
JUNK = 1e4  # in slots after a row
STEP = 1 / 64  # between numbers of caches in a format of CACHE_FORMATS
ROWS = 5  # of tables whose rows are picked by distance or read at counts, and pieces of lines


@dataclass(frozen=True)
class Kernel:
    """A fused attention node alone, and the sizes of its inputs. Equal kernels have equal results.

    Args:
        size, value_size: head sizes of keys and of values.
    """

    model: bytes  # the node as a model
    node: Node = field(compare=False)
    size: int
    value_size: int
    rotary: int  # size r of the rotated part of a head; 0 for none
    range: int  # columns of the table of biases by distance; 0 for none
    row_range: int  # distances whose rows are picked; 0 for none
    lengths: Tuple[int, ...]  # numbers of tokens after a call, both sides of each edge
    cache: str  # format of the caches (CACHE_FORMATS); empty for float32

    @property
    def compared(self) -> List[str]:
        """The outputs that are compared: "y", and "weights" for sums of weights by row."""
        return [self.node.outputs[0], *self.node.outputs[3:]]


def check(folder: Path, model: Model) -> Check:
    """Compare each kind of fused attention node of an artefact with attention in float64, on this
    machine's CPU. Raise OSError for a file that cannot be read.
    """
    manifest, calls = model.manifest, 0
    failures: Dict[str, str] = {}
    skipped: Dict[str, str] = {}
    if not (folder / "model.onnx").exists() or not GRAPHS[manifest.target].fused:
        return Check(0, "rows", skipped={manifest.target: "has no GroupQueryAttention"})
    if manifest.dtype != "float32":
        return Check(0, "rows", skipped={manifest.dtype: "not computed by the CPU kernel"})
    part = integer_part(onnx_nodes.read(folder / "model.onnx"))
    edges = [n for n in described.edges(manifest) if n <= LONGEST]
    lengths = tuple(sorted({n for n in (*range(1, 18), *edges) if n <= manifest.max_positions}))
    for node, layer in part.attention:
        if node.operator not in OPERATORS:
            continue
        caches = [f"past_key_values.{layer}.{kind}" for kind in ("key", "value")]
        sizes = [int(s.axes[3]) for name in caches for s in manifest.states if s.past == name]
        if len(sizes) < 2:
            skipped[f"{node.operator} of layer {layer}"] = "its cache is not known"
            continue
        rows, fault = compared(_kernel(part.graph, node, sizes, lengths, manifest.cache))
        calls += rows
        if fault:
            failures[f"{node.operator} of layer {layer}"] = fault
    if not part.attention:
        skipped[manifest.target] = "the graph has no fused attention"
    return Check(calls, "rows", failures=failures, skipped=skipped)


def _kernel(
    graph: Nodes, node: Node, sizes: List[int], lengths: Tuple[int, ...], cache: str
) -> Kernel:
    present = [*node.inputs, *[""] * (len(NATIVE) - len(node.inputs))]
    names = [new if old else "" for new, old in zip(NATIVE, present, strict=True)]
    names[9] = "positions" if present[9] else ""
    names[10] = ""
    while not names[-1]:
        names.pop()
    known = {k: v for k, v in node.attributes.items() if k != "qk_output"}
    stored = {k: v for k, v in node.serialised.items() if k != "qk_output"}
    by_row = node.operator == kernel_library.OPERATOR and len(node.outputs) > 3
    outputs = ["y", "keys", "values", *(["weights"] if by_row else [])]
    alone = Node(node.domain, node.operator, "", names, outputs, known, stored)
    free = dict.fromkeys((name for name in names if name), "float")
    integers = {"lengths": "int32", "longest": "int32", "slots": "int64", "positions": "int64"}
    integers["row_of_distance"] = "int32"
    free |= {name: element for name, element in integers.items() if name in names}
    free |= dict.fromkeys(("past_k", "past_v"), cache) if cache else {}
    model = serialised(Nodes(opsets=graph.opsets), [alone], [*outputs[:1], *outputs[3:]], free=free)
    table, distances, rows = (graph.constants.get(present[index]) for index in (7, 14, 20))
    return Kernel(
        model,
        alone,
        sizes[0],
        sizes[1],
        2 * table.shape[1] if table is not None and known.get("do_rotary") else 0,
        0 if distances is None else distances.shape[1],
        0 if rows is None else rows.shape[0],
        lengths,
        cache,
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
        results = session.run(kernel.compared, feeds)
        errors = [abs(y - e) for y, e in zip(results, expected, strict=True)]
        worst = np.max([error.reshape(len(cached), -1).max(1) for error in errors], axis=0)
        wrong = ~(worst <= TOLERANCE)
        if wrong.any():
            row = int(np.flatnonzero(wrong)[0])
            text = f"{cached[row]} cached and {new} new tokens of ONNX Runtime"
            return count, f"{text} {onnxruntime.__version__}: error {worst[row]:.1e}"
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
) -> Tuple[Dict[str, np.ndarray], List[np.ndarray]]:
    """Return the inputs of a call, and its outputs in float64: [B,S,H*D], and if the node has
    them, sums of weights by row [B,H,S,R].
    """
    rows, longest, heads = len(cached), max(cached) + new, kernel.node.attributes["num_heads"]
    kv_heads = kernel.node.attributes["kv_num_heads"]
    past = [
        _numbers(kernel, random, (rows, kv_heads, longest, size))
        for size in (kernel.size, kernel.value_size)
    ]
    for kind in past:
        for row, count in enumerate(cached):
            kind[row, :, count:] = JUNK
    known = _inputs(kernel, cached, new, random)
    known |= {f"past_{n}": _stored(kernel, x) for n, x in zip("kv", past, strict=True)}
    expected = [np.zeros((rows, new, heads * kernel.value_size))]
    expected.append(np.zeros((rows, heads, new, ROWS)))
    for row, count in enumerate(cached):
        inputs = Inputs(kernel.node, known.__getitem__, row)
        queries, *appended = inputs.heads()
        pairs = zip(past, appended, strict=True)
        read = [np.concatenate((kind[row, :, :count], x.numbers), 1) for kind, x in pairs]
        scores = inputs.scores(queries, count + new)
        weights, expected[0][row], _ = attended(queries, read, scores)
        if inputs.has(ROW_OF_DISTANCE):
            picked = np.eye(ROWS)[inputs.picked_rows(new, count + new)]
            expected[1][row] = np.einsum("hst,str->hsr", weights, picked)
    feeds = {name: known[name] for name in kernel.node.inputs if name}
    return feeds, expected[: len(kernel.compared)]


def _inputs(
    kernel: Kernel, cached: List[int], new: int, random: np.random.Generator
) -> Dict[str, np.ndarray]:
    """Return inputs of a call by name, also those that the node lacks, without its caches."""
    rows, longest, names = len(cached), max(cached) + new, kernel.node.inputs
    h, kv = (kernel.node.attributes[name] for name in ("num_heads", "kv_num_heads"))
    d, e = kernel.size, kernel.value_size
    shapes = ((h, d), (kv, d), (kv, e))
    q, k, v = (_numbers(kernel, random, (rows, new, *shape)) for shape in shapes)
    if kernel.cache:
        q = np.zeros_like(q)  # rotated keys are rounded, which a query of zeros does not see
    turned = (kernel.rotary or d) // 2  # half of the rotated part of a head
    tables = [_waves(random, longest + rows, kernel.rotary // 2) for _ in range(2)]
    distances = random.standard_normal((h, kernel.range)).astype(np.float32)
    slots = np.array(cached)[:, None] + np.arange(new)
    flat = [x.reshape(rows, new, -1) for x in (q, k, v)]
    known = dict(zip("qkv", flat if "k" in names else [np.concatenate(flat, 2)], strict=False))
    known |= dict(zip(("cos", "sin", "key_cos", "key_sin"), (*tables[0], *tables[1]), strict=True))
    return known | {
        "lengths": np.array(cached, np.int32) + new - 1,
        "longest": np.array(longest, np.int32),
        "sinks": random.standard_normal(h).astype(np.float32),
        "distances": distances,
        "slots": slots,
        "positions": slots + np.arange(rows)[:, None],
        "query_rows": random.standard_normal((rows, h, new, ROWS)).astype(np.float32),
        "key_rows": random.standard_normal((rows, h * ROWS, longest, 1)).astype(np.float32),
        "row_of_distance": random.integers(0, ROWS, kernel.row_range).astype(np.int32),
        "decays": -random.random((rows, h, longest, 1), np.float32),
        "count_rows": random.standard_normal((rows, h, new, ROWS)).astype(np.float32),
        "numbers": random.random(longest, np.float32),
        "factors": random.random((rows, new), np.float32),
        "pieces": _pieces(random, h),
        "distance_queries": random.standard_normal((rows, h, new, d)).astype(np.float32),
        "distance_keys": random.uniform(-0.1, 0.1, (h, longest // 2 + 34, d)).astype(np.float32),
        **dict(zip(TURNS, of_digits(random.uniform(-3, 3, (rows, new, turned)), 4), strict=True)),
        "k_scale": np.full(kv * d, STEP, np.float32),
        "v_scale": np.full(kv * e, STEP, np.float32),
    }


def _pieces(random: np.random.Generator, heads: int) -> np.ndarray:
    """Return pieces [H,ROWS,3] of continuous functions: rounding may choose either at an end."""
    starts = np.sort(random.random((heads, ROWS)), 1)
    slopes = random.standard_normal((heads, ROWS))
    steps = (slopes[:, :-1] - slopes[:, 1:]) * starts[:, 1:]
    values = np.concatenate((np.zeros((heads, 1)), steps.cumsum(1)), 1)
    return np.stack((starts, slopes, values), 2).astype(np.float32)


def _waves(random: np.random.Generator, rows: int, width: int) -> Tuple[np.ndarray, np.ndarray]:
    angles = random.uniform(0, 6, (rows, width))
    return np.cos(angles).astype(np.float32), np.sin(angles).astype(np.float32)


def _numbers(kernel: Kernel, random: np.random.Generator, shape: Tuple[int, ...]) -> np.ndarray:
    """Return numbers of size 1, which caches of a format hold exactly."""
    numbers = random.uniform(-1, 1, shape)
    return (np.rint(numbers / STEP) * STEP if kernel.cache else numbers).astype(np.float32)


def _stored(kernel: Kernel, cache: np.ndarray) -> np.ndarray:
    codes = np.clip(np.rint(cache / STEP), -128, 127) if kernel.cache in SCALED else cache
    return codes.astype(kernel.cache or np.float32)
