"""What values of the integer part must be. Shapes: B rows, S new tokens, T keys, A coordinates."""

from dataclasses import dataclass
from functools import partial
from typing import Any, Callable, Iterator, List, Mapping, Optional, Sequence, Tuple

import numpy as np

from posenc_export.runtime.artefact.schema import Manifest
from posenc_export.runtime.graphs.kernel_library import OPERATOR
from posenc_export.runtime.verification import described
from posenc_export.runtime.verification.described import attentions
from posenc_export.runtime.verification.integer_calls import Places
from posenc_export.runtime.verification.integer_graph import Use
from posenc_export.shared.numerics import FINE, LEVELS

Layout = Tuple[str, ...]  # "b", "s", "t" or a size, for each axis of a value
POSITIONS = ("positions of tokens", "positions of keys")
REQUESTED, LONGEST = "columns of requested tokens", "number of slots of the longest row"
PADDING_LAST = ("columns with padding last", "places with padding last", "last inputs of filters")
# Operators and their inputs that count from the first token of a cache
IN_CACHES = {("GroupQueryAttention", 5), ("GroupQueryAttention", 6), (OPERATOR, 5), (OPERATOR, 15)}
IN_CACHES |= {("TensorScatter", 2)}
BOX = 4  # coordinates of a box, whose extents are indices of tables, too
IN_WINDOWS = " in caches of windows"
HIDDEN = -1e29  # scores of hidden keys are -inf, or -1e30 where a softmax over -inf would be NaN


@dataclass(frozen=True)
class Rule:
    """A function of a call that a graph may compute."""

    name: str  # what it is, in the certificate
    axes: str  # of its numbers: b rows, s new tokens, t keys; others are found by their size
    numbers: Callable[[], Any]  # computes it


def layout(first: np.ndarray, second: np.ndarray, sizes: Sequence[Tuple[int, int]]) -> Layout:
    """Return the meaning of each axis of a value by its shapes in two calls, whose numbers of rows,
    new tokens and keys, and of keys in caches of windows if there are any, are `sizes`.
    """
    known = dict(reversed(list(zip(sizes, "bstw", strict=False))))
    axes = [known.get(pair, str(pair[0])) for pair in zip(first.shape, second.shape, strict=True)]
    if sizes[1] == sizes[2] and axes.count("s") == 2:  # without a cache, S is T
        axes[len(axes) - 1 - axes[::-1].index("s")] = "t"
    return tuple(axes)


def arranged(numbers: np.ndarray, axes: str, target: Layout) -> Optional[np.ndarray]:
    """Return numbers with axes such as "bs" in the layout of a value; None if it lacks one of them.
    Other axes than b, s and t are found by their size. A value without b is compared with row 0.
    """
    if "b" in axes and "b" not in target:
        numbers, axes = numbers[0], axes.replace("b", "", 1)
    labels = [a if a in "bst" else str(n) for a, n in zip(axes, numbers.shape, strict=True)]
    if "1" in labels and target.count("1") > 1:  # all of them are alike
        numbers = numbers.squeeze(labels.index("1"))
        labels.remove("1")
    if any(target.count(label) != 1 for label in labels):
        return None
    order = sorted(range(len(labels)), key=lambda index: target.index(labels[index]))
    sizes = iter(numbers.transpose(order).shape)
    shape = [next(sizes) if label in labels else 1 for label in target]
    return numbers.transpose(order).reshape(shape)


def integers(manifest: Manifest, places: Places, rows: Optional[int]) -> Iterator[Rule]:
    """Yield the functions of a call that a graph may compute; rows: of the table it indexes."""
    q, k, call = places.queries, places.keys, places.call
    most = np.iinfo(np.int64).max if rows is None else rows - 1
    for name, axes, positions in (("tokens", "bs", q), ("keys", "bt", k)):
        yield from _of_positions(manifest, name, axes, positions, most)
    for number, plane in enumerate(() if places.coordinates is None else places.coordinates):
        yield Rule(f"coordinate {number} of tokens", "bs", partial(np.clip, plane, 0, most))
    if places.coordinates is not None:
        yield Rule("coordinates of tokens", "abs", lambda: np.clip(places.coordinates, 0, most))
        yield from _of_levels("coordinates of tokens", "abs", places.coordinates)
    if manifest.axes == BOX:
        for number, plane in enumerate(places.coordinates[2:] - places.coordinates[:2]):
            yield Rule(f"extent {number} of boxes", "bs", partial(np.clip, plane, 0, most))
    yield from _distances(manifest, q, k, rows)
    yield from _in_chunks(manifest, q, k)
    yield Rule("visible keys", "bst", lambda: described.visible(attentions(manifest)[0], q, k))
    yield Rule(REQUESTED, "br", lambda: places.feeds["logits_index"])
    yield from _with_padding_last(manifest, q)
    yield Rule("first slots", "b", lambda: places.first)
    yield Rule("last slots", "b", lambda: places.last)
    yield Rule("slots of tokens", "bs", lambda: call.columns)
    yield Rule("last positions of rows", "b", lambda: np.clip(q.max(1), 0, most))
    yield Rule("numbers of new tokens", "b", lambda: (q >= 0).sum(1))
    yield Rule("slots", "t", lambda: np.arange(k.shape[1]))
    yield Rule("columns", "s", lambda: np.arange(q.shape[1]))
    yield Rule("rows", "b", lambda: np.arange(len(q)))
    yield Rule("number of keys", "", lambda: np.array(k.shape[1]))
    yield Rule(LONGEST, "", lambda: places.last.max() + 1)
    windowed = places.last - places.feeds["window_start"]
    yield Rule(f"last slots{IN_WINDOWS}", "b", lambda: windowed)
    first = places.feeds["window_start"].astype(np.int64)
    yield Rule(f"first slots{IN_WINDOWS}", "b", lambda: places.first - first)
    yield Rule(f"slots of tokens{IN_WINDOWS}", "bs", lambda: call.columns - first[:, None])
    yield Rule(f"{LONGEST}{IN_WINDOWS}", "", lambda: windowed.max() + 1)


def selected(manifest: Manifest) -> Tuple[str, ...]:
    """Return the rules of the columns of tokens that a graph selects."""
    return (REQUESTED, *PADDING_LAST) if _kernels(manifest) else (REQUESTED,)


def _kernels(manifest: Manifest) -> List[int]:
    """Return the lengths of the filters of gated delta rules."""
    projections = [part.get("projection", {}) for part in attentions(manifest)]
    kernels = {p.get("kernel", 4) for p in projections if p.get("name") == "gated_delta"}
    return sorted(kernel for kernel in kernels if isinstance(kernel, int) and 1 < kernel <= 1 << 10)


def _with_padding_last(manifest: Manifest, q: np.ndarray) -> Iterator[Rule]:
    """Yield how gated delta rules put the tokens of a row before its padding."""
    order = np.argsort(q < 0, axis=1, kind="stable")
    for kernel in _kernels(manifest):
        last = (q >= 0).sum(1)[:, None] + np.arange(kernel - 1)
        values = (order, np.argsort(order, axis=1), last)
        for name, axes, numbers in zip(PADDING_LAST, ("bs", "bs", "bk"), values, strict=True):
            yield Rule(name, axes, partial(np.asarray, numbers))


def in_windows(manifest: Manifest, use: Use, rules: Tuple[str, ...]) -> Tuple[str, ...]:
    """Return the rules of what a node reads: lengths count from the first token of its caches."""
    past = f"past_key_values.{use.layer}.key"
    windowed = any(state.window and state.past == past for state in manifest.states)
    lengths = (use.operator, use.input) in IN_CACHES
    return tuple(rule + IN_WINDOWS for rule in rules) if windowed and lengths else rules


def _of_positions(
    manifest: Manifest, name: str, axes: str, positions: np.ndarray, most: int
) -> Iterator[Rule]:
    yield Rule(f"positions of {name}", axes, lambda: np.clip(positions, 0, most))
    yield from _of_levels(f"positions of {name}", axes, positions)
    yield Rule(f"positions of {name}, -1 for none", axes, lambda: positions)
    yield Rule(f"whether {name} are no padding", axes, lambda: positions >= 0)
    yield Rule(f"padding of {name}", axes, lambda: positions < 0)
    for offset in _numbers(manifest, "offset"):
        text = f"positions of {name} plus {offset}"
        yield Rule(text, axes, partial(np.add, np.maximum(positions, 0), offset))
    for length in _numbers(manifest, "original_max_positions"):
        text = f"{name} from position {length} on"
        yield Rule(text, axes, partial(np.greater_equal, positions, length))
        yield Rule(f"any of {text}", "", partial(np.any, positions >= length))
        yield Rule(f"all of {text}", "", partial(np.all, positions >= length))


def _of_levels(name: str, axes: str, positions: np.ndarray) -> Iterator[Rule]:
    """Yield the rows of tables in two levels that positions read."""
    for level, rows in zip(LEVELS, np.divmod(np.maximum(positions, 0), FINE), strict=True):
        yield Rule(f"{level} rows of {name}", axes, partial(np.asarray, rows))


def _chunks(manifest: Manifest) -> Iterator[Tuple[int, int]]:
    """Yield the tokens of a chunk and the largest distance of each dual chunk attention."""
    for part in described.parameters(manifest):
        if part["name"] == "dual_chunk":
            size, local = part["chunk_size"], part["local_size"]
            yield max(size - local, 1), size - (part["definition"] == "paper")


def _turns(period: int, limit: int) -> Mapping[str, Callable[[np.ndarray], np.ndarray]]:
    """Return the rows of rotations that positions read in dual chunk attention, by name."""
    return {
        f"places in chunks of {period}": lambda q: q % period,
        f"turns to the chunk before, of {period}": lambda q: np.minimum(limit - q % period, period),
        f"turns to chunks of {period} before it": lambda q: limit - q % period,
    }


def _in_chunks(manifest: Manifest, q: np.ndarray, k: np.ndarray) -> Iterator[Rule]:
    """Yield rows of rotations in dual chunk attention, and which keys are in earlier chunks."""
    for period, limit in _chunks(manifest):
        for name, rows_of in _turns(period, limit).items():
            yield Rule(name, "bs", partial(rows_of, q))
            yield from _of_levels(name, "bs", rows_of(q))
        start = (q - q % period)[:, :, None]
        for name, first in (("this chunk", start), ("the chunk before", start - period)):
            rule = f"keys before {name}, of {period}"
            yield Rule(rule, "bst", partial(np.less, k[:, None, :], first))


def _distances(
    manifest: Manifest, q: np.ndarray, k: np.ndarray, rows: Optional[int]
) -> Iterator[Rule]:
    """Yield distances, also as the encodings of a description clip them."""

    def behind() -> np.ndarray:
        return np.asarray(q[:, :, None] - k[:, None, :])

    def clipped(index: described.Index, part: described.Described) -> Callable[[], np.ndarray]:
        return lambda: index(part, causal, behind())

    causal = described.causal(manifest)
    yield Rule("distances back", "bst", behind)
    yield Rule("distances ahead", "bst", lambda: -behind())
    if rows is not None:
        yield Rule("distances within the table", "bst", lambda: np.clip(behind(), 0, rows - 1))
    for part in described.parameters(manifest):
        index = described.INDICES.get(part["name"])
        if index is not None:
            yield Rule(part["name"], "bst", clipped(index, part))


def allowed(manifest: Manifest, axes: Layout, layers: Sequence[int] = ()) -> Tuple[str, ...]:
    """Return the rules of which an index with these axes, read by these layers, follows one; empty
    if others may hold.
    """
    if "s" in axes and "t" in axes:
        attentions = described.attentions(manifest)
        readers = [attentions[layer] for layer in layers if layer < len(attentions)]
        of_layers = [part for attention in readers for part in attention["encodings"]]
        names = {part["name"] for part in of_layers or described.encodings(manifest)}
        return tuple(sorted(names & described.INDICES.keys()))
    return ()


def has_row_by_position(manifest: Manifest, rows: int) -> bool:
    """Whether the index of a table with so many rows follows a rule of `by_position`."""
    return rows >= manifest.max_positions or any(rows == m + 1 for _, m in _chunks(manifest))


def by_position(manifest: Manifest, level: str = "") -> Tuple[str, ...]:
    """Return the rules of which an index of a table with a row for each position follows one, or
    an index of one of two levels of such a table.
    """
    turns = [name for chunks in _chunks(manifest) for name in _turns(*chunks)]
    if level:
        places = (*POSITIONS, "coordinates of tokens", *turns)
        return tuple(f"{level} rows of {name}" for name in places)
    numbers = range(manifest.axes)
    coordinates = [f"coordinate {n} of tokens" for n in numbers]
    if manifest.axes == BOX:
        coordinates += [f"extent {n} of boxes" for n in numbers[:2]]
    names = [*POSITIONS, "distances within the table", *coordinates, *turns]
    for offset in _numbers(manifest, "offset"):
        names += [f"{name} plus {offset}" for name in POSITIONS]
    return (*names, "coordinates of tokens", "last positions of rows")


def _numbers(manifest: Manifest, name: str) -> List[int]:
    numbers = (part.get(name) for part in described.parameters(manifest))
    return sorted({number for number in numbers if isinstance(number, int)})


def agreement(
    value: np.ndarray, rule: Rule, target: Layout, places: Places
) -> Optional[Tuple[int, int]]:
    """Return how many entries of a value are those of a rule, and how many were compared: not those
    of padding and hidden keys. None if the value has other axes.
    """
    axes = rule.axes
    if ("s" in target and "t" in target) != ("s" in axes and "t" in axes):
        return None
    expected = arranged(np.asarray(rule.numbers()), axes, target)
    if expected is None:
        return None
    same = np.broadcast_to(value == expected, value.shape)
    counted = np.ones((1,) * value.ndim, bool)
    if "s" in axes and "t" in axes:
        seen = arranged(_both(places), "bst", target)
        counted = counted if seen is None else seen
    counted = np.broadcast_to(counted, value.shape)
    return int((same & counted).sum()), int(counted.sum())


def _both(places: Places) -> np.ndarray:
    """Return which queries and keys are no padding, and the key is not after the query: [B,S,T]."""
    q, k = places.queries[:, :, None], places.keys[:, None, :]
    return (q >= 0) & (k >= 0) & (k <= q)
