"""Random changes of calls of the operator: attributes, numbers, sizes, and inputs left out."""

from typing import Any, Iterator

import numpy as np

from tests.kernels.alone import Call
from tests.kernels.calls import Case

KINDS = ("rotation", "positions", "distance", "bias", "sinks", "query rows", "key rows", "decays",
         "pieces", "distance keys", "turns")  # fmt: skip
LIMITS = {"chunk_size": 90, "softcap": 20.0, "local_window_size": 60}
BASES: tuple[dict[str, Any], ...] = (
    {"kinds": KINDS, "cached": (5, 3), "counts": (2, 2)},
    {"kinds": KINDS, "cached": (300,), "counts": (3,), "attributes": LIMITS},
    {"kinds": ("counts", "rotation"), "cached": (5, 3), "counts": (2, 1)},
    {"kinds": ("rotation", "interleaved"), "counts": (4,), "packed": False},
)
WHOLE = [*range(-3, 20), *(sign * 2**n for n in (16, 31, 32, 60, 61, 62, 63) for sign in (1, -1))]
NUMBERS = (0.0, -0.0, 1e-45, 1e-30, -1.0, 3e38, np.inf, -np.inf, np.nan)
INTEGERS = ("num_heads", "kv_num_heads", "local_window_size", "chunk_size", "rotary_interleaved")
FLOATS = ("scale", "softcap", "key_row_scale")


def calls(count: int, seed: int) -> Iterator[Call]:
    """Yield calls with one to three changes each."""
    draw = np.random.default_rng(seed)
    formats = ("float32", "float16", "int8")
    cases = [Case(**base, cache=cache) for base in BASES for cache in formats]
    for number in range(count):
        case = cases[number % len(cases)]
        feeds, attributes = {**case.feeds}, {**case.node}
        for _ in range(draw.integers(1, 4)):
            name, kind = str(draw.choice(list(feeds))), draw.integers(8)
            if kind < 2:
                attributes[draw.choice(INTEGERS)] = _whole(np.dtype(np.int64), draw)
            elif kind == 2:
                attributes[draw.choice(FLOATS)] = float(draw.choice(NUMBERS))
            elif kind < 5:
                feeds[name] = _other_numbers(feeds[name], draw)
            elif kind < 7:
                feeds[name] = _other_sizes(feeds[name], draw)
            elif not name.startswith("past"):
                del feeds[name]
        yield feeds, attributes


def _whole(dtype: np.dtype, draw: Any) -> int:
    limits = np.iinfo(dtype)
    return int(draw.choice([n for n in WHOLE if limits.min <= n <= limits.max]))


def _other_numbers(array: np.ndarray, draw: Any) -> np.ndarray:
    number = draw.choice(NUMBERS) if array.dtype.kind == "f" else _whole(array.dtype, draw)
    places, changed = draw.random(array.shape) < draw.choice([0.02, 0.5, 1]), array.copy()
    with np.errstate(over="ignore"):
        changed[places] = number
    return changed


def _other_sizes(array: np.ndarray, draw: Any) -> np.ndarray:
    """Return an array with one axis more or less, axes exchanged, or an axis of another size,
    which may be huge beside an axis of size 0.
    """
    sizes = list(array.shape)
    axis, kind = draw.integers(max(1, len(sizes))), draw.integers(5)
    if kind == 0 or not sizes:
        sizes.insert(axis, int(draw.integers(0, 3)))
    elif kind == 1:
        del sizes[axis]
    elif kind == 2:
        draw.shuffle(sizes)
    else:
        sizes[axis] = int(draw.choice([0, 1, sizes[axis] + 1, max(0, sizes[axis] - 1), 32]))
    if not all(sizes) and kind == 4 and max(sizes) < 1 << 20:
        sizes[sizes.index(0) - 1] = 1 << int(draw.choice([20, 31, 40]))
    if all(sizes):
        return np.resize(array, sizes) if max(sizes, default=0) < 1 << 20 else array
    return np.empty(sizes, array.dtype)
