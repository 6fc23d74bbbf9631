"""Pictures of an encoding, drawn from its float64 oracle: what it adds to tokens, how scores fall with distance, how fast its pairs turn."""

from typing import Any, Callable, Dict, List, Mapping, Tuple

import numpy as np
import torch

from posenc_export import encodings
from posenc_export.encodings.base import Geometry, PositionEncoding
from posenc_export.encodings.rotary import Rotary

GEOMETRY = Geometry(width=64, heads=8, head_size=32, max_positions=1024)
POSITIONS, QUERY, VECTORS = 128, 255, 24
THETAS, SMOOTH = (1e3, 1e4, 1e5, 1e6), 65  # distances in a mean
# Told apart by colour-blind readers too (Okabe and Ito 2008).
COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#56b4e9", "#e69f00", "#444444", "#8c510a")
Panel = Tuple[str, Callable[[Any], None]]


def draw(spec: Mapping[str, Any], geometry: Geometry = GEOMETRY) -> Any:
    """A matplotlib figure of the encoding that spec describes, a panel for each place where it acts.

    Raises:
        ValueError: unknown name or parameter.
        ModuleNotFoundError: matplotlib is not installed.
    """
    from matplotlib.figure import Figure

    torch.manual_seed(0)
    encoding = encodings.build(spec, geometry)
    panels = _panels(encoding, spec, geometry)
    figure = Figure(figsize=(4.6 * max(len(panels), 1), 3.4), layout="constrained")
    figure.suptitle(", ".join([str(spec["name"]), *(f"{key}={value}" for key, value in spec.items() if key != "name")]), fontsize=10)
    for index, (title, paint) in enumerate(panels):
        axes = figure.add_subplot(1, len(panels), index + 1)
        axes.set_title(title, fontsize=9)
        axes.tick_params(labelsize=8)
        paint(axes)
    return figure


def _panels(encoding: PositionEncoding, spec: Mapping[str, Any], geometry: Geometry) -> List[Panel]:
    cls = type(encoding)
    acts: Dict[str, bool] = {hook: getattr(cls, hook) is not getattr(PositionEncoding, hook) for hook in ("embed", "embed_next", "rotate", "bias", "rescore")}
    panels: List[Panel] = []
    if acts["embed"] or acts["embed_next"]:
        panels.append(("what a token gets, by position", lambda axes: _embedded(axes, encoding, geometry)))
    if isinstance(encoding, Rotary):
        panels.append(("tokens to a full turn, by pair", lambda axes: _wavelengths(axes, encoding, spec, geometry)))
        panels.append(("bound of scores, by distance and theta", lambda axes: _bases(axes, spec, geometry)))
    if acts["bias"]:
        panels.append(("bias, by distance and head", lambda axes: _bias(axes, encoding, geometry)))
    if acts["rotate"] or acts["rescore"] or not panels:
        panels.append(("score of equal vectors, by distance", lambda axes: _similarity(axes, encoding, geometry)))
    return panels


def _embedded(axes: Any, encoding: PositionEncoding, geometry: Geometry) -> None:
    """What is made of one token, the same everywhere, less that token."""
    token = np.random.default_rng(0).standard_normal(encoding.token_width(geometry.width))
    rows = encoding.oracle().embed_rows(np.repeat(token[None], POSITIONS, 0), range(POSITIONS))
    change = rows - token if len(token) == geometry.width else rows
    limit = float(np.abs(change).max()) or 1.0
    image = axes.imshow(change.T, aspect="auto", origin="lower", cmap="RdBu_r", vmin=-limit, vmax=limit, interpolation="nearest")
    axes.figure.colorbar(image, ax=axes).ax.tick_params(labelsize=7)
    axes.set_xlabel("position", fontsize=8)
    axes.set_ylabel("entry", fontsize=8)


def _bases(axes: Any, spec: Mapping[str, Any], geometry: Geometry) -> None:
    """Long-range decay (Su et al. 2021, 3.4.3): the mean over pairs of |sum of the turns of the pairs before|, 1 at distance 0, for several theta,
    smoothed over distances: it swings with each pair."""
    distances = np.arange(geometry.max_positions)[:, None]
    for color, theta in zip(COLOURS, THETAS, strict=False):
        other: Any = encodings.build({**spec, "theta": theta}, geometry)
        turns = np.exp(1j * distances * np.array([other.frequency(k) for k in range(other.size // 2)]))
        bound = np.abs(np.cumsum(turns, axis=1)).mean(1)
        smooth = np.convolve(bound / bound[0], np.full(SMOOTH, 1 / SMOOTH), "valid")
        axes.plot(np.arange(len(smooth))[::8] + SMOOTH // 2, smooth[::8], color=color, linewidth=1, label=f"{theta:.0e}")
    axes.set_xlabel("distance", fontsize=8)
    axes.legend(fontsize=6, frameon=False, title="theta", title_fontsize=6)


def _wavelengths(axes: Any, encoding: Rotary, spec: Mapping[str, Any], geometry: Geometry) -> None:
    """Pairs that do not turn within the range, or within the length the model was trained on, lie above the lines."""
    turning = [(k, 2 * np.pi / encoding.frequency(k)) for k in range(encoding.size // 2) if encoding.frequency(k)]
    axes.semilogy(*zip(*turning, strict=True), "o-", color=COLOURS[0], markersize=3)
    plain = [2 * np.pi * getattr(encoding, "theta", 10000.0) ** (2 * k / encoding.size) for k in range(encoding.size // 2)]
    axes.semilogy(plain, "--", color="#8c959f", label="unscaled")
    axes.axhline(geometry.max_positions, color=COLOURS[1], linewidth=1, label="range")
    trained = encodings.parameters(spec["name"]).get("original_max_positions")
    if trained is not None:
        axes.axhline(spec.get("original_max_positions", trained.default), color=COLOURS[2], linewidth=1, label="trained length")
    axes.set_xlabel("pair", fontsize=8)
    axes.set_ylabel("tokens", fontsize=8)
    axes.legend(fontsize=7, frameon=False)


def _bias(axes: Any, encoding: PositionEncoding, geometry: Geometry) -> None:
    oracle, distances = encoding.oracle(), np.arange(QUERY + 1)
    for head in range(geometry.heads):
        axes.plot(distances, [oracle.bias(head, QUERY, QUERY - int(d)) for d in distances], color=COLOURS[head % len(COLOURS)], linewidth=1, label=str(head))
    axes.set_xlabel("distance", fontsize=8)
    axes.legend(fontsize=6, frameon=False, title="head", title_fontsize=6, ncols=2)


def _similarity(axes: Any, encoding: PositionEncoding, geometry: Geometry) -> None:
    """Mean and spread, over random vectors, of the score of a query with a key equal to it."""
    random, oracle = np.random.default_rng(0), encoding.oracle()
    oracle.begin(range(QUERY + 1))
    oracle.observe(random.standard_normal((QUERY + 1, geometry.width)))
    rows = []
    for _ in range(VECTORS):
        vector = random.standard_normal(geometry.head_size)
        heads = np.repeat(vector[None], geometry.heads, 0)
        query = oracle.rotate_heads(heads, QUERY)[0]
        keys = np.stack([oracle.rotate_key_heads(heads, p)[0] for p in range(QUERY + 1)])
        rows.append(oracle.scores(0, query, keys, QUERY, range(QUERY + 1))[::-1])
    scores = np.stack(rows)
    mean, spread = scores.mean(0), scores.std(0)
    axes.fill_between(np.arange(QUERY + 1), mean - spread, mean + spread, color=COLOURS[0], alpha=0.2, linewidth=0)
    axes.plot(mean, color=COLOURS[0], linewidth=1.2)
    axes.set_xlabel("distance", fontsize=8)
