"""Panels of any encoding, from its oracle: changes of tokens, scores and biases."""

from typing import Any, Sequence

import numpy as np

from posenc_export.catalogue import grids, waves
from posenc_export.catalogue.waves import COLOURS, Scene

VECTORS, SHOWN = 12, 4  # random vectors of the mean score; heads with a line of their own
CLIPPED = 2  # colours end at this multiple of the 99th percentile
LABELLED = 8  # heads in a legend


def change(scene: Scene) -> np.ndarray:
    """Encodings of the same token at all positions, minus that token: [positions,E]."""
    encoding, geometry, positions = scene.encoding, scene.geometry, scene.positions
    token = np.random.default_rng(0).standard_normal(encoding.token_width(geometry.width))
    tokens = np.repeat(token[None], positions, 0)
    rows: np.ndarray = encoding.oracle().embed_rows(tokens, range(positions))
    return rows - token if len(token) == geometry.width else rows


def embedded(axes: Any, rows: np.ndarray) -> None:
    """Draw the changes of tokens [positions,E] as colours."""
    sizes = np.abs(rows)
    largest, usual = float(sizes.max()), CLIPPED * float(np.quantile(sizes, 0.99))
    # Trained tables have a few numbers beside which no other would be seen.
    limit = usual if 0 < usual < largest else largest or 1.0
    colours = {"vmin": -limit, "vmax": limit, "cmap": "RdBu_r"}
    waves.heatmap(axes, rows.T, limit < largest, aspect="auto", origin="lower", **colours)
    waves.labels(axes, "position", "entry")


def bias(axes: Any, scene: Scene) -> None:
    """Draw the bias of each head by distance."""
    oracle, heads, distance = scene.encoding.oracle(), scene.geometry.heads, scene.distance
    step = -(-heads // LABELLED)
    for head in range(heads):
        values = [oracle.bias(head, distance, distance - far) for far in range(distance + 1)]
        color = COLOURS[head % len(COLOURS)]
        axes.plot(values, color=color, linewidth=1, label=None if head % step else str(head))
    waves.labels(axes, "distance", "bias")
    waves.legend(axes, "head", ncols=2)


def similarity(axes: Any, scene: Scene) -> None:
    """Draw mean and standard deviation of scores over random vectors, for the first head."""
    scores = _scores(scene, [0] * VECTORS)
    mean, spread, distances = scores.mean(0), scores.std(0), range(scene.distance + 1)
    axes.fill_between(
        distances, mean - spread, mean + spread, color=COLOURS[0], alpha=0.2, linewidth=0
    )
    axes.plot(mean, color=COLOURS[0], linewidth=1.2)
    waves.labels(axes, "distance", "score")


def by_content(axes: Any, scene: Scene) -> None:
    """Draw a line for each of some heads, minus the score of the query's own key."""
    heads = range(min(SHOWN, scene.geometry.heads))
    scores = _scores(scene, heads)
    for head, color in zip(heads, COLOURS, strict=False):
        axes.plot(scores[head] - scores[head, 0], color=color, linewidth=1, label=str(head))
    waves.legend(axes, "head, vector")
    waves.labels(axes, "distance", "score")


def _scores(scene: Scene, heads: Sequence[int]) -> np.ndarray:
    """Scores [n,distance+1] by distance of equal random vectors, for n heads."""
    geometry, query = scene.geometry, scene.distance
    random, oracle = np.random.default_rng(0), scene.encoding.oracle()
    oracle.observe(random.standard_normal((query + 1, geometry.width)))
    rows, apart = [], oracle.overrides(*grids.BY_HEAD)
    for head in heads:
        vector = random.standard_normal((1, geometry.head_size))
        vectors, index = (np.repeat(vector, geometry.heads, 0), head) if apart else (vector, 0)
        own = oracle.rotate_heads(vectors, query)[index]
        keys = np.stack([oracle.rotate_key_heads(vectors, p)[index] for p in range(query + 1)])
        rows.append(oracle.scores(head, own, keys, query, range(query + 1))[::-1])
    return np.stack(rows)
