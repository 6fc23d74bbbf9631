"""Contract of attention over a cache: GroupQueryAttention, and CachedAttention of packages/kernels.

Rows have different lengths, and slots after them hold large numbers.
"""

from dataclasses import dataclass
from typing import Iterator, List, Sequence, Tuple

import numpy as np

from posenc_export.runtime.artefact.cache_formats import SCALED
from posenc_export.runtime.graphs.onnx_nodes import Node
from posenc_export.runtime.verification.conformance.attention import (
    ROTATED,
    UNIT,
    Inputs,
    attended,
    of_digits,
    tolerance,
)
from posenc_export.runtime.verification.conformance.operators import Case, Values, uniform
from posenc_export.runtime.verification.conformance.trial import Feeds, Kernel, Outputs

TURNS = ("turn_cos", "turn_sin")
# Names of inputs here, by index.
INPUTS = ("q", "k", "v", "past_k", "past_v", "lengths", "longest", "cos", "sin", "positions",
          "bias", "sinks", "k_scale", "v_scale", "distances", "slots", "key_cos", "key_sin",
          "query_rows", "key_rows", "row_of_distance", "decays", "count_rows", "numbers", "factors",
          "pieces", "distance_queries", "distance_keys", *TURNS)  # fmt: skip
INTEGERS = {"lengths": "int32", "longest": "int32", "slots": "int64", "positions": "int64",
            "row_of_distance": "int32"}  # fmt: skip
SIZES = (8, 16, 64, 128, 256, 512)  # lengths at which kernels may change
LONGEST = 8192  # keys of the longest row
TOGETHER = 72  # keys of the longest row that is evaluated together with many others
SHORT = 3  # keys of the row beside a longer one
PROMPTS = (2, 17, 65)  # tokens of calls with several new tokens
BEYOND = 5  # slots of caches after the longest row, in calls of several tokens
JUNK = 1e4  # in slots after a row
STEP = 1 / 128  # largest scale of a channel of caches in 8 bits
ROWS = 5  # of tables whose rows are picked by distance or read at counts, and pieces of lines


@dataclass(frozen=True)
class CachedAttention:
    """A node of fused attention.

    Args:
        given: names of its inputs here (INPUTS).
        size, value_size: head sizes of keys and of values.
        rotary: size r of the rotated part of a head; 0 for none.
        range: columns of the table of biases by distance; 0 for none.
        row_range: distances whose rows are picked; 0 for none.
        cache: format of the caches (CACHE_FORMATS); empty for float32.
    """

    node: Node
    given: Sequence[str]
    size: int
    value_size: int
    rotary: int = 0
    range: int = 0
    row_range: int = 0
    cache: str = ""

    def case(self) -> Case:
        """Return calls at the edges of windows, chunks and tables."""
        random = np.random.default_rng(0)
        drawn = [self._feeds(cached, new, random) for cached, new in self._calls()]
        feeds = [{name: known[name] for name in self.node.inputs if name} for known in drawn]
        shared = dict(zip(self.node.outputs[1:3], self.node.inputs[3:5], strict=True))
        return Case(feeds, self._ratio, shared)

    def _lengths(self) -> List[int]:
        known = self.node.attributes
        edges = {int(known.get(name, 0)) for name in ("local_window_size", "chunk_size")}
        edges |= {self.range, self.row_range, *SIZES}
        near = {n + shift for n in edges if n > 0 for shift in (-1, 0, 1)}
        return sorted(n for n in {*range(1, 18), *near} if 0 < n <= LONGEST)

    def _calls(self) -> Iterator[Tuple[List[int], int]]:
        """Yield cached tokens of each row of a call, and its new tokens: steps, then prompts."""
        lengths = self._lengths()
        yield [n - 1 for n in lengths if n <= TOGETHER], 1
        for length in lengths:
            if length > TOGETHER:
                yield [length - 1, SHORT], 1
        for new in PROMPTS:
            for length in lengths[:: 1 if new == PROMPTS[0] else 4]:
                if new <= length <= SIZES[-1]:
                    yield [length - new], new

    def _feeds(self, cached: List[int], new: int, random: np.random.Generator) -> Feeds:
        """Return inputs of a call by name, also those that the node lacks."""
        rows, longest, known = len(cached), max(cached) + new, self.node.attributes
        h, kv, d, e = known["num_heads"], known["kv_num_heads"], self.size, self.value_size
        shapes = ((h, d), (kv, d), (kv, e))
        flat = [uniform(random, (rows, new, n * size)) for n, size in shapes]
        packed = flat if "k" in self.given else [np.concatenate(flat, 2)]
        turned = (self.rotary or d) // 2  # half of the rotated part of a head
        tables = [_waves(random, longest + rows, self.rotary // 2) for _ in range(2)]
        slots = np.array(cached)[:, None] + np.arange(new)
        capacity = longest + (BEYOND if new > 1 else 0)
        inputs = dict(zip("qkv", packed, strict=False))
        pairs = zip(("cos", "sin", "key_cos", "key_sin"), (*tables[0], *tables[1]), strict=True)
        numbers = {
            "sinks": (h,),
            "distances": (h, self.range),
            "query_rows": (rows, h, new, ROWS),
            "key_rows": (rows, h * ROWS, longest, 1),
            "count_rows": (rows, h, new, ROWS),
            "distance_queries": (rows, h, new, d),
            "bias": (rows, h, new, longest),
        }
        inputs |= {**dict(pairs), "slots": slots, "positions": slots + np.arange(rows)[:, None]}
        inputs |= {n: random.standard_normal(shape, np.float32) for n, shape in numbers.items()}
        angles = random.uniform(-3, 3, (rows, new, turned))
        inputs |= {
            "lengths": np.array(cached, np.int32) + new - 1,
            "longest": np.array(longest, np.int32),
            "row_of_distance": random.integers(0, ROWS, self.row_range).astype(np.int32),
            "decays": -random.random((rows, h, longest, 1), np.float32),
            "numbers": random.random(longest, np.float32),
            "factors": random.random((rows, new), np.float32),
            "pieces": _pieces(random, h),
            "distance_keys": uniform(random, (h, longest // 2 + 34, d)) / 10,
            **dict(zip(TURNS, of_digits(angles, 4), strict=True)),
            "k_scale": random.uniform(STEP / 2, STEP, kv * d).astype(np.float32),
            "v_scale": random.uniform(STEP / 2, STEP, kv * e).astype(np.float32),
            "past_k": self._past(random, cached, (rows, kv, capacity, d)),
            "past_v": self._past(random, cached, (rows, kv, capacity, e)),
        }
        return {f"0.{INPUTS.index(name)}": array for name, array in inputs.items()}

    def _past(
        self, random: np.random.Generator, cached: List[int], shape: Tuple[int, ...]
    ) -> np.ndarray:
        scaled = self.cache in SCALED
        past = random.integers(-128, 128, shape) if scaled else uniform(random, shape)
        for row, count in enumerate(cached):
            past[row, :, count:] = 127 if scaled else JUNK
        return past.astype(self.cache or np.float32)

    def _ratio(self, feeds: Feeds, found: Outputs) -> float:
        return max(self._of_row(feeds, row, found) for row in range(len(found[0])))

    def _of_row(self, feeds: Feeds, row: int, found: Outputs) -> float:
        inputs, total = Inputs(self.node, feeds.__getitem__, row), int(feeds["0.5"][row]) + 1
        queries, *appended = inputs.heads()
        new, scaled, read = queries.shape[1], self.cache in SCALED, []
        away = np.array([-1, 1]) * ((ROTATED if self.rotary else 0) + 4 * UNIT * scaled)
        for heads, index, cache in zip(appended, (3, 4), found[1:3], strict=True):
            past, after = feeds[f"0.{index}"][row], cache[row]
            own, scale = slice(total - new, total), np.ones((1, 1, 1))
            least, most = (heads + e for e in away)
            if scaled:
                scale = feeds[f"0.{index + 9}"].reshape(len(past), 1, -1).astype(np.float64)
                least, most = (np.rint(end / scale).clip(-128, 127) for end in (least, most))
            stored, others = after[:, own], (np.delete(part, own, 1) for part in (after, past))
            within = (least.astype(after.dtype) <= stored) & (stored <= most.astype(after.dtype))
            if not (within.all() and np.array_equal(*others)):
                return np.inf
            read.append(after[:, :total] * scale)
        scores = inputs.scores(queries, total)
        weights, exact = attended(queries, read, scores)
        error = np.abs(found[0][row].reshape(exact.shape) - exact).max()
        if len(found) > 3:
            picked = np.eye(ROWS)[inputs.picked_rows(new, total)]
            sums = np.einsum("hst,str->hsr", weights, picked)
            error = np.maximum(error, np.abs(found[3][row] - sums).max())
        return float(error / tolerance(scores.scale, self.size))


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


def cached_attention(kernel: Kernel, node: Node, values: Values) -> Case:
    """GroupQueryAttention and CachedAttention."""
    given = [role for role, name in zip(INPUTS, node.inputs, strict=False) if name]
    return CachedAttention(node, given, **dict(kernel.sizes)).case()
