"""Panels of encodings on a grid, by the place of the key around a query in the middle."""

import functools
import itertools
from typing import Any, Callable, Sequence

import numpy as np

from posenc_export.catalogue import waves
from posenc_export.catalogue.waves import COLOURS, Scene
from posenc_export.encodings.shared.base import Geometry
from posenc_export.encodings.shared.combined import overrides

Panel = tuple[str, Callable[[Any, Scene], None]]  # a title, and what draws on axes
OFFSET = 16  # rows and columns on each side of a query
BY_HEAD = ("rotate_heads", "rotate_key_heads")  # what oracles override that rotate heads apart


def panels(scene: Scene) -> list[Panel]:
    """Panels of an encoding that reads coordinates (`axes`), or whose positions are the places of a
    window (`window`); none for other encodings.
    """
    encoding, drawn = scene.encoding, list[Panel]()
    if encoding.axes and overrides(encoding, "rotate"):
        drawn.append(("score of equal vectors, by distance along one axis", _along_axes))
        apart = encoding.oracle().overrides(*BY_HEAD)
        heads = sorted({0, scene.geometry.heads // 2}) if apart else [0]
        for head in heads if encoding.axes == 2 else ():
            which = f", head {head}" if len(heads) > 1 else ""
            paint = functools.partial(_scores_by_place, head=head)
            drawn.append((f"score of equal vectors, by place of the key{which}", paint))
    tokens_apart = not encoding.oracle().overrides("embed_rows")
    if encoding.axes == 2 and overrides(encoding, "embed", "embed_next") and tokens_apart:
        drawn.append(("cosine of what tokens get, by place", _tokens_by_place))
    if overrides(encoding, "bias", "rescore") and all(encoding.window):
        added = "bias" if overrides(encoding, "bias") else "score of a random query"
        drawn.append((f"{added} of the first head, by place of the key", _window))
    return drawn


def _products(
    scene: Scene, head: int, query: Sequence[int], places: Sequence[Sequence[int]]
) -> np.ndarray:
    """Scores [n] of a query and keys at places, as shares of the score at the query's own place.
    All are ones before rotation, so that scores of a rotation are means of cosines.
    """
    oracle, geometry = scene.encoding.oracle(), scene.geometry
    apart = oracle.overrides(*BY_HEAD)
    heads, keys = (geometry.heads, geometry.kv_heads or geometry.heads) if apart else (1, 1)
    ones = np.ones((heads, geometry.head_size))
    own = oracle.rotate_heads(ones, tuple(query))[head]
    turned = [oracle.rotate_key_heads(ones[:keys], tuple(place)) for place in (query, *places)]
    products = [float(own @ rows[head * keys // heads]) for rows in turned]
    return np.array(products[1:]) / products[0]


def _along_axes(axes: Any, scene: Scene) -> None:
    """Draw scores of the first head for keys that differ from the query on one axis only."""
    encoding, distance = scene.encoding, scene.distance
    for axis, name in waves.axis_names(encoding).items():
        places = np.zeros((distance + 1, encoding.axes), int)
        places[:, axis] = range(distance + 1)
        scores = _products(scene, 0, [0] * encoding.axes, places.tolist())
        axes.plot(scores, color=COLOURS[axis % len(COLOURS)], linewidth=1, label=name)
    waves.labels(axes, "distance", "share of the own score")
    waves.legend(axes, "along")


def _around(geometry: Geometry) -> tuple[int, list[tuple[int, ...]]]:
    """Coordinate of a query on both axes, and the places on all sides of it, row by row."""
    reach = min(OFFSET, (geometry.max_positions - 1) // 2)
    return reach, list(itertools.product(range(2 * reach + 1), repeat=2))


def _map(axes: Any, values: np.ndarray, reach: int) -> None:
    extent, square = (-reach, reach, reach, -reach), values.reshape(2 * reach + 1, -1)
    waves.heatmap(axes, square, extent=extent, cmap="viridis")
    axes.plot(0, 0, "x", color=COLOURS[1])
    waves.labels(axes, "column", "row")


def _scores_by_place(axes: Any, scene: Scene, head: int) -> None:
    reach, places = _around(scene.geometry)
    _map(axes, _products(scene, head, (reach, reach), places), reach)


def _tokens_by_place(axes: Any, scene: Scene) -> None:
    """Draw cosines between what a token gets at each place and in the middle."""
    reach, places = _around(scene.geometry)
    oracle, width = scene.encoding.oracle(), scene.encoding.token_width(scene.geometry.width)
    token = np.random.default_rng(0).standard_normal(width)
    rows = np.stack([oracle.embed(token.copy(), place) for place in places])
    rows = rows - token if rows.shape[1] == len(token) else rows
    middle = rows[len(rows) // 2]
    sizes = np.linalg.norm(rows, axis=1) * np.linalg.norm(middle)
    _map(axes, np.divide(rows @ middle, sizes, out=np.zeros(len(rows)), where=sizes > 0), reach)


def _window(axes: Any, scene: Scene) -> None:
    """Draw what is added to the scores of all keys for a query in the middle of the window."""
    rows, columns = scene.encoding.window
    oracle, query = scene.encoding.oracle(), rows // 2 * columns + columns // 2
    q = np.random.default_rng(0).standard_normal(scene.geometry.head_size)
    k = np.zeros(len(q))
    keys = range(rows * columns)
    added = [oracle.bias(0, query, p) + oracle.content(0, q, k, query, p) for p in keys]
    waves.heatmap(axes, np.reshape(added, (rows, columns)), origin="upper", cmap="viridis")
    axes.plot(columns // 2, rows // 2, "x", color=COLOURS[1])
    waves.labels(axes, "column", "row")
