"""Contract of attention over a cache: GroupQueryAttention, and CachedAttention of packages/kernels
(packages/kernels/README.md), in float64.

Rows have different lengths, and slots after them hold large numbers.

Shapes: H heads, S tokens of a call, T keys, R rows of a table.
"""

from dataclasses import dataclass
from typing import Iterator, Mapping, Sequence

import numpy as np

from posenc_export.runtime.artefact.cache_formats import SCALED
from posenc_export.runtime.graphs.onnx_nodes import Node
from posenc_export.runtime.verification.conformance.trial import (
    UNIT,
    Case,
    Feeds,
    Kernel,
    Outputs,
    Values,
    uniform,
)

ROTATED = 6 * UNIT  # bound of the error of a number of size 1 after its rotation
TURNS = ("turn_cos", "turn_sin")
# Names of inputs here, by index.
INPUTS = ("q", "k", "v", "past_k", "past_v", "lengths", "longest", "cos", "sin", "positions",
          "bias", "sinks", "k_scale", "v_scale", "distances", "slots", "key_cos", "key_sin",
          "query_rows", "key_rows", "row_of_distance", "decays", "count_rows", "numbers", "factors",
          "pieces", "distance_queries", "distance_keys", *TURNS)  # fmt: skip
INTEGERS = {"lengths": "int32", "longest": "int32", "slots": "int64", "positions": "int64",
            "row_of_distance": "int32"}  # fmt: skip
# Inputs that all rows share.
SHARED = ("longest", "cos", "sin", "sinks", "k_scale", "v_scale", "distances", "key_cos", "key_sin",
          "row_of_distance", "numbers", "pieces", "distance_keys")  # fmt: skip
NEIGHBOURS = 16  # of a distance between two keys of distances, on each side
# Weights of products with them: a sinc under a Kaiser window.
_AWAY = np.arange(NEIGHBOURS) + 0.5
INTERPOLATION = np.sinc(_AWAY) * np.i0(18 * np.sqrt(1 - (_AWAY / NEIGHBOURS) ** 2)) / np.i0(18)
DIGITS = 16  # numbers of a digit of a distance
LENGTHS = (8, 16, 64, 128, 256, 512)  # at which kernels may change
LONGEST = 8192  # keys of the longest row
TOGETHER = 72  # keys of the longest row that is evaluated together with many others
SHORT = 3  # keys of the row beside a longer one
PROMPTS = (2, 17, 65)  # tokens of calls with several new tokens
BEYOND = 5  # slots of caches after the longest row, in calls of several tokens
JUNK = 1e4  # in slots after a row
STEP = 1 / 128  # largest scale of a channel of caches in 8 bits
ROWS = 5  # of tables whose rows are picked by distance or read at counts, and pieces of lines


def softmax(
    scores: np.ndarray,
    seen: np.ndarray,
    biases: Sequence[np.ndarray] = (),
    softcap: float = 0.0,
    sinks: float | np.ndarray = -np.inf,
) -> np.ndarray:
    """Return the weights of scores [H,S,T], which are limited before biases are added. Scores of
    sinks [H,1,1] take a part. seen: which keys queries see, [S,T].
    """
    capped = softcap * np.tanh(scores / softcap) if softcap else scores
    numbers = np.where(seen, sum(biases, capped), -np.inf)
    largest = np.maximum(numbers.max(axis=2, keepdims=True), sinks)
    weights = np.exp(numbers - largest)
    return np.asarray(weights / (weights.sum(axis=2, keepdims=True) + np.exp(sinks - largest)))


def rotated(x: np.ndarray, cos: np.ndarray, sin: np.ndarray, interleaved: bool) -> np.ndarray:
    """Rotate the first channels of heads [heads,S,D] by angles [S,n/2]."""
    size = 2 * cos.shape[-1]
    first = slice(0, size, 2) if interleaved else slice(0, size // 2)
    second = slice(1, size, 2) if interleaved else slice(size // 2, size)
    a, b, numbers = x[..., first], x[..., second], x.copy()
    numbers[..., first], numbers[..., second] = a * cos - b * sin, a * sin + b * cos
    return numbers


def by_query_head(part: np.ndarray, heads: int) -> np.ndarray:
    """Repeat keys or values [K,T,D] for each of the query heads that share them."""
    return np.repeat(part, heads // len(part), axis=0)  # [heads,T,D]


def by_token(part: np.ndarray) -> np.ndarray:
    """Return numbers of heads [heads,S,D] as [S,heads*D]."""
    return part.transpose(1, 0, 2).reshape(part.shape[1], -1)


def tolerance(scale: float, size: int) -> float:
    """Return the bound of the error of weighted sums of numbers of size 1 in float32, with scores
    of size scale * sqrt(D). A key too many changes them by 1 / keys.
    """
    return 4e-6 * max(1.0, scale * size**0.5)


class Inputs:
    """The inputs of an attention node in a call by their names here: those of one row, without its
    axis.

    Args:
        node: a GroupQueryAttention or CachedAttention.
        feeds: arrays by name of an input.
    """

    def __init__(self, node: Node, feeds: Mapping[str, np.ndarray], row: int = 0) -> None:
        self.node, self.known, self.row = node, node.attributes, row
        pairs = zip(INPUTS, node.inputs, strict=False)
        self.given = {role: feeds[name] for role, name in pairs if name}
        self.heads_of_q = int(self.known["num_heads"])
        self.interleaved = bool(self.known.get("rotary_interleaved", 0))

    def __contains__(self, role: str) -> bool:
        return role in self.given

    def __getitem__(self, role: str) -> np.ndarray:
        numbers = self.given[role]
        return numbers if role in SHARED else np.asarray(numbers[self.row])

    def wide(self, role: str) -> np.ndarray:
        """Return numbers in float64."""
        return self[role].astype(np.float64)

    def heads(self) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Return queries, keys and values [heads,S,D] of the new tokens, rotated if the node
        rotates.
        """
        kv_heads = int(self.known["kv_num_heads"])
        counts = (self.heads_of_q, kv_heads, kv_heads)
        read = [self[role] for role in "qkv" if role in self]
        # [S,n] or [heads,S,D] as [S,n]
        flat = [part if part.ndim == 2 else by_token(part) for part in read]
        joined = np.concatenate(flat, axis=1).astype(np.float64)
        ends = np.cumsum([n * self["past_k"].shape[-1] for n in counts[:2]])
        q, k, v = (
            part.reshape(len(joined), n, part.shape[1] // n).transpose(1, 0, 2)
            for part, n in zip(np.split(joined, ends, axis=1), counts, strict=True)
        )
        if self.known.get("do_rotary", 0):
            at = self._rotated_positions(len(joined))
            of_keys = ("key_cos", "key_sin") if "key_cos" in self else ("cos", "sin")
            q_cos, q_sin, k_cos, k_sin = (self.wide(n)[at] for n in ("cos", "sin", *of_keys))
            q = rotated(q, q_cos, q_sin, self.interleaved)
            k = rotated(k, k_cos, k_sin, self.interleaved)
        return q, k, v

    def _rotated_positions(self, count: int) -> np.ndarray:
        """Return the rows of rotation tables that the new tokens read [S]."""
        slots = np.arange(count) + int(self["lengths"]) + 1 - count
        if "positions" not in self:
            return slots
        # In its first call, GroupQueryAttention counts from the first position.
        by_slot = self.node.operator == "GroupQueryAttention" and slots[0] == 0
        return slots + self["positions"][0] if by_slot else self["positions"]

    def attended(
        self, q: np.ndarray, keys: np.ndarray, values: np.ndarray
    ) -> tuple[np.ndarray, np.ndarray]:
        """Return the weights [H,S,T] and the output [S,H*D] of queries [H,S,D] that attend to keys
        and values [K,T,D], of which the last are their own.
        """
        keys, values = (by_query_head(part, len(q)) for part in (keys, values))
        count, total = q.shape[1], keys.shape[1]
        behind = np.arange(total - count, total)[:, None] - np.arange(total)  # [S,T]
        window = int(self.known.get("local_window_size", -1))
        seen = (behind >= 0) & (behind < (window if window > 0 else total))
        if chunk := self.known.get("chunk_size", 0):
            seen = seen & (behind <= self["positions"][:, None] % chunk)
        products = q @ keys.transpose(0, 2, 1)
        if "turn_cos" in self:
            products = self._turned(q, keys, behind.clip(0))
        scores = self.scale(q.shape[2]) * products
        biases = list(self._biases(scores, seen, behind))
        sinks = self["sinks"][:, None, None] if "sinks" in self else -np.inf
        weights = softmax(scores, seen, biases, self.known.get("softcap", 0.0), sinks)
        return weights, by_token(weights @ values)

    def scale(self, size: int) -> float:
        """Return the factor of products of heads of a size."""
        return float(self.known.get("scale", 0.0)) or size**-0.5

    def _biases(
        self, scores: np.ndarray, seen: np.ndarray, behind: np.ndarray
    ) -> Iterator[np.ndarray]:
        """Yield what is added to scores [H,S,T], of H heads or of one. behind: distances [S,T]."""
        count, total = behind.shape
        if "bias" in self:
            yield self.wide("bias")[..., :total]
        if "distances" in self:
            table = self.wide("distances")
            yield table[:, np.clip(behind, 0, table.shape[1] - 1)]
        if "row_of_distance" in self:
            yield from self._picked(self.picked_rows(count, total))
        if "decays" in self:  # sums of those after a key, up to the query
            sums = self.wide("decays")[:, :total, 0].cumsum(1)
            yield sums[:, total - count :, None] - sums[:, None]
        if "pieces" in self:
            numbers = self.wide("numbers")
            of_keys = numbers[np.clip(behind, 0, len(numbers) - 1)]
            yield in_pieces(of_keys * self["factors"][:, None], self.wide("pieces"))
        if "distance_keys" in self:
            yield self._by_distance(behind)
        if "count_rows" in self:
            yield at_counts(self["count_rows"], np.where(seen, scores, -np.inf))

    def _by_distance(self, behind: np.ndarray) -> np.ndarray:
        """Return the products [H,S,T] of the other queries with the keys of distances [S,T]: of
        every second distance and, in turn, of those between two keys, sums of 2 NEIGHBOURS products
        with weights, from the nearest on.
        """
        keys = self["distance_keys"]
        products = self.wide("distance_queries") @ keys.transpose(0, 2, 1)
        count = products.shape[-1] - 2 * NEIGHBOURS + 1
        parts = [products[..., n : n + count] for n in range(2 * NEIGHBOURS)]
        pairs = zip(parts[NEIGHBOURS - 1 :: -1], parts[NEIGHBOURS:], INTERPOLATION, strict=True)
        between = sum(weight * (before + after) for before, after, weight in pairs)
        both = np.stack((parts[NEIGHBOURS - 1], between), -1).reshape(*products.shape[:-1], -1)
        # Keys at larger distances are not seen.
        index = (2 * (keys.shape[1] - 2 * NEIGHBOURS) - behind.clip(0)).clip(0)
        return np.asarray(both[:, np.arange(len(index))[:, None], index])

    def picked_rows(self, count: int, total: int) -> np.ndarray:
        """Return the row that the distance of each query and key picks [S,T]."""
        behind = np.arange(total - count, total)[:, None] - np.arange(total)
        rows = self["row_of_distance"]
        return rows[np.clip(behind, 0, len(rows) - 1)]

    def _picked(self, index: np.ndarray) -> Iterator[np.ndarray]:
        """Yield the entries [H,S,T] of rows of queries and of keys at an index [S,T]."""
        count, total = index.shape
        if "query_rows" in self:  # [H,S,R]
            yield self.wide("query_rows")[:, np.arange(count)[:, None], index]
        if "key_rows" in self:  # [H*R,T,1] or [H,T,R]
            rows, heads = self.wide("key_rows"), self.heads_of_q
            by_slot = len(rows) == heads
            by_row = rows.transpose(0, 2, 1) if by_slot else rows.reshape(heads, -1, rows.shape[1])
            factor = float(self.known.get("key_row_scale", 1.0))
            yield factor * by_row[:, index, np.arange(total)]

    def _turned(self, q: np.ndarray, keys: np.ndarray, behind: np.ndarray) -> np.ndarray:
        """Return the products [H,S,T] of queries and keys [H,.,D], which are rotated further by the
        angles of each query for their distance [S,T], as products over the digits of the distance:
        that of d 16^l is in row d + 16 l of its input.
        """
        rows = self["turn_cos"] + 1j * self.wide("turn_sin")  # [S,16*digits,r/2]
        turns, half = np.ones(1), rows.shape[2]
        for first in range(0, rows.shape[1], DIGITS):
            digit = behind // DIGITS ** (first // DIGITS) % DIGITS
            turns = turns * rows[np.arange(len(rows))[:, None], first + digit]  # [S,T,r/2]
        second = slice(1, 2 * half, 2) if self.interleaved else slice(half, 2 * half)
        first_ = slice(0, 2 * half, 2) if self.interleaved else slice(0, half)
        of_q, of_keys = (x[..., first_] + 1j * x[..., second] for x in (q, keys))
        y: np.ndarray = q[..., 2 * half :] @ keys[..., 2 * half :].transpose(0, 2, 1)
        for query in range(len(rows)):
            turned = of_q[:, query, None] * turns[query]
            y[:, query] += (turned.conj() * of_keys).real.sum(2)
        return y


def at_counts(rows: np.ndarray, products: np.ndarray) -> np.ndarray:
    """Return rows [H,S,R] between their entries at the counts of keys: the sums of the sigmoids of
    their products [H,S,T] and those of all later keys, at most R - 1.
    """
    gates, last = 1 / (1 + np.exp(-products)), rows.shape[2] - 1
    counts = np.minimum(gates[..., ::-1].cumsum(2)[..., ::-1], last)
    below = counts.astype(int)
    low, high = (
        np.take_along_axis(rows, np.minimum(index, last), 2).astype(np.float64)
        for index in (below, below + 1)
    )
    return np.asarray(low + (counts - below) * (high - low))


def in_pieces(x: np.ndarray, pieces: np.ndarray) -> np.ndarray:
    """Return functions [H,S,T] of numbers x [S,T] that are linear in pieces [H,pieces,3], each with
    its least number, slope and value at 0.
    """
    index = [np.searchsorted(of_head[1:, 0], x, "right") for of_head in pieces]
    return np.stack([p[i, 1] * x + p[i, 2] for p, i in zip(pieces, index, strict=True)])


def cached_attention(kernel: Kernel, node: Node, values: Values) -> Case:
    """Return calls of GroupQueryAttention or CachedAttention at the edges of windows, chunks and
    tables.
    """
    return CachedAttention(node, **dict(kernel.sizes)).case()


@dataclass(frozen=True)
class CachedAttention:
    """A node of fused attention."""

    node: Node
    size: int  # of heads of keys
    value_size: int  # of heads of values
    rotary: int = 0  # size r of the rotated part of a head; 0 for none
    range: int = 0  # columns of the table of biases by distance; 0 for none
    row_range: int = 0  # distances whose rows are picked; 0 for none
    cache: str = ""  # format of the caches (CACHE_FORMATS); empty for float32

    @property
    def scaled(self) -> bool:
        """Whether codes of caches have scales."""
        return self.cache in SCALED

    def case(self) -> Case:
        random = np.random.default_rng(0)
        drawn = [self._feeds(cached, new, random) for cached, new in self._calls()]
        feeds = [{name: known[name] for name in self.node.inputs if name} for known in drawn]
        shared = dict(zip(self.node.outputs[1:3], self.node.inputs[3:5], strict=True))
        return Case(feeds, self._ratio, shared)

    def _calls(self) -> Iterator[tuple[list[int], int]]:
        """Yield cached tokens of each row of a call, and its new tokens: steps, then prompts."""
        edges = {
            int(self.node.attributes.get(name, 0)) for name in ("local_window_size", "chunk_size")
        }
        edges |= {self.range, self.row_range, *LENGTHS}
        near = {n + shift for n in edges if n > 0 for shift in (-1, 0, 1)}
        lengths = sorted(n for n in {*range(1, 18), *near} if 0 < n <= LONGEST)
        yield [n - 1 for n in lengths if n <= TOGETHER], 1
        for length in lengths:
            if length > TOGETHER:
                yield [length - 1, SHORT], 1
        for new in PROMPTS:
            for length in lengths[:: 1 if new == PROMPTS[0] else 4]:
                if new <= length <= LENGTHS[-1]:
                    yield [length - new], new

    def _feeds(self, cached: list[int], new: int, random: np.random.Generator) -> Feeds:
        """Return inputs of a call by name, also those that the node lacks."""
        rows, longest = len(cached), max(cached) + new
        h, kv = self.node.attributes["num_heads"], self.node.attributes["kv_num_heads"]
        d, e = self.size, self.value_size
        shapes = ((h, d), (kv, d), (kv, e))
        flat = [uniform(random, (rows, new, n * size)) for n, size in shapes]
        packed = flat if self.node.inputs[1] else [np.concatenate(flat, 2)]
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
            **dict(zip(TURNS, _of_digits(angles), strict=True)),
            "k_scale": random.uniform(STEP / 2, STEP, kv * d).astype(np.float32),
            "v_scale": random.uniform(STEP / 2, STEP, kv * e).astype(np.float32),
            "past_k": self._past(random, cached, (rows, kv, capacity, d)),
            "past_v": self._past(random, cached, (rows, kv, capacity, e)),
        }
        return {f"0.{INPUTS.index(name)}": array for name, array in inputs.items()}

    def _past(
        self, random: np.random.Generator, cached: list[int], shape: tuple[int, ...]
    ) -> np.ndarray:
        past = random.integers(-128, 128, shape) if self.scaled else uniform(random, shape)
        for row, count in enumerate(cached):
            past[row, :, count:] = 127 if self.scaled else JUNK
        return past.astype(self.cache or np.float32)

    def _ratio(self, feeds: Feeds, found: Outputs) -> float:
        return max(self._of_row(feeds, row, found) for row in range(len(found[0])))

    def _of_row(self, feeds: Feeds, row: int, found: Outputs) -> float:
        inputs = Inputs(self.node, feeds, row)
        queries, *appended = inputs.heads()
        total, new, read = int(inputs["lengths"]) + 1, queries.shape[1], []
        away = np.array([-1, 1]) * ((ROTATED if self.rotary else 0) + 4 * UNIT * self.scaled)
        for heads, name, cache in zip(appended, "kv", found[1:3], strict=True):
            past, after = inputs[f"past_{name}"], cache[row]
            own, scale = slice(total - new, total), np.ones((1, 1, 1))
            least, most = (heads + e for e in away)
            if self.scaled:
                scale = inputs.wide(f"{name}_scale").reshape(len(past), 1, -1)
                least, most = (np.rint(end / scale).clip(-128, 127) for end in (least, most))
            stored, same = after[:, own], np.delete(after, own, 1) == np.delete(past, own, 1)
            within = (least.astype(after.dtype) <= stored) & (stored <= most.astype(after.dtype))
            if not (within.all() and same.all()):
                return np.inf
            read.append(after[:, :total] * scale)
        weights, exact = inputs.attended(queries, *read)
        error = np.abs(found[0][row].reshape(exact.shape) - exact).max()
        if len(found) > 3:
            picked = np.eye(ROWS)[inputs.picked_rows(new, total)]
            sums = np.einsum("hst,str->hsr", weights, picked)
            error = np.maximum(error, np.abs(found[3][row] - sums).max())
        return float(error / tolerance(inputs.scale(self.size), self.size))


def _pieces(random: np.random.Generator, heads: int) -> np.ndarray:
    """Return pieces [H,ROWS,3] of continuous functions: rounding may choose either at an end."""
    starts = np.sort(random.random((heads, ROWS)), 1)
    slopes = random.standard_normal((heads, ROWS))
    steps = (slopes[:, :-1] - slopes[:, 1:]) * starts[:, 1:]
    values = np.concatenate((np.zeros((heads, 1)), steps.cumsum(1)), 1)
    return np.stack((starts, slopes, values), 2).astype(np.float32)


def _waves(random: np.random.Generator, rows: int, width: int) -> tuple[np.ndarray, np.ndarray]:
    angles = random.uniform(0, 6, (rows, width))
    return np.cos(angles).astype(np.float32), np.sin(angles).astype(np.float32)


def _of_digits(angles: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return the inputs turn_cos and turn_sin [B,S,64,r/2] of 4 digits for angles per slot
    [B,S,r/2].
    """
    distances = np.outer(DIGITS ** np.arange(4), np.arange(DIGITS)).reshape(-1, 1)
    turns = angles[:, :, None] * distances
    return np.cos(turns).astype(np.float32), np.sin(turns).astype(np.float32)
