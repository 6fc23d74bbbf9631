"""Panels of rotations and sinusoids: wavelengths, bounds, fast and slow pairs."""

from typing import Any, Mapping, NamedTuple, Sequence

import numpy as np

from posenc_export import encodings
from posenc_export.encodings.shared.base import Geometry, PositionEncoding

# Palette for colour-blind readers (Okabe and Ito 2008).
COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#56b4e9", "#e69f00", "#444444", "#8c510a")
THETAS = (10000.0, 500000.0)  # Su et al. 2021; Llama 3
AXES: dict[int, Sequence[str]] = {2: ("row", "column"), 3: ("time", "height", "width")}
MARKERS = "os^Dv<>P"


class Scene(NamedTuple):
    """What the panels of an encoding show."""

    encoding: Any
    spec: Mapping[str, Any]  # specification that the encoding was built from
    geometry: Geometry
    distance: int  # largest distance between a query and a key, in tokens
    positions: int  # number of tokens in panels by position


def labels(axes: Any, across: str, up: str = "") -> None:
    axes.set_xlabel(across, fontsize=8)
    axes.set_ylabel(up, fontsize=8)


def legend(axes: Any, title: str = "", ncols: int = 1) -> None:
    axes.legend(fontsize=7, frameon=False, title=title or None, title_fontsize=7, ncols=ncols)


def heatmap(axes: Any, values: np.ndarray, beyond: bool = False, **options: Any) -> None:
    """Draw values [rows,columns] as colours, with their scale, which values may exceed (beyond).
    They are rounded, so that equal values get one colour on every processor.
    """
    image = axes.imshow(np.round(values, 9), interpolation="nearest", **options)
    scale = axes.figure.colorbar(image, ax=axes, extend="both" if beyond else "neither")
    scale.ax.tick_params(labelsize=7)


def wavelengths(axes: Any, scene: Scene) -> None:
    """Draw the wavelength of each pair, and lines at the range and at the trained length."""
    spec, frequencies = scene.spec, _frequencies(scene.encoding)
    theta = getattr(scene.encoding, "theta", THETAS[0])
    turning = np.flatnonzero(frequencies)
    lengths = 2 * np.pi / frequencies[turning]
    axes.semilogy(turning, lengths, "o-", color=COLOURS[0], markersize=3)
    plain = 2 * np.pi * theta ** (2 * np.arange(len(frequencies)) / scene.encoding.size)
    if not np.allclose(lengths, plain[turning]):
        axes.semilogy(plain, "--", color="#8c959f", label="unscaled")
    lines = {"range": scene.geometry.max_positions}
    trained = encodings.parameters(spec["name"]).get("original_max_positions")
    if trained is not None:
        lines["trained length"] = spec.get("original_max_positions", trained.default)
    for color, (label, length) in zip(COLOURS[1:], lines.items(), strict=False):
        axes.axhline(length, color=color, linewidth=1, label=label)
    labels(axes, "pair", "tokens")
    legend(axes)


def bound(axes: Any, scene: Scene) -> None:
    """Draw long-range decay (Su et al. 2021, 3.4.3): the mean over j = 1 .. r/2 of |sum of exp(i
    d w_k) over k < j|, scaled to 1 at distance d = 0.
    """
    asked = float(getattr(scene.encoding, "theta", THETAS[0]))
    for color, theta in zip(COLOURS, sorted({asked, *THETAS}), strict=False):
        own, other = theta == asked, {**scene.spec, "theta": theta}
        drawn = scene.encoding if own else encodings.build(other, scene.geometry)
        turns = np.exp(1j * np.arange(scene.distance + 1)[:, None] * _frequencies(drawn))
        bounds = np.abs(np.cumsum(turns, axis=1)).mean(1)
        label = f"{theta:g} (this one)" if own else f"{theta:g}"
        axes.plot(bounds / bounds[0], color=color, linewidth=1.6 if own else 0.8, label=label)
    axes.set_ylim(bottom=0)
    labels(axes, "distance")
    legend(axes, "theta")


def fast_and_slow(axes: Any, scene: Scene) -> None:
    """Draw the mean of cos(d w_k) over pairs that make a full turn, and over the others."""
    frequencies, distance = _frequencies(scene.encoding), scene.distance
    turns = np.cos(np.arange(distance + 1)[:, None] * frequencies)
    fast = frequencies * distance >= 2 * np.pi
    paces = (f"turn within {distance}", fast), ("slower", ~fast)
    for color, (pace, chosen) in zip(COLOURS, paces, strict=False):
        if chosen.any():
            label = f"{pace}: {chosen.sum()} of {len(fast)} pairs"
            axes.plot(turns[:, chosen].mean(1), color=color, linewidth=1, label=label)
    labels(axes, "distance")
    legend(axes)


def _frequencies(encoding: Any) -> np.ndarray:
    return np.array([encoding.frequency(k) for k in range(encoding.size // 2)])


def _step(encoding: Any, k: int) -> float:
    """Angle of pair k between adjacent coordinates."""
    axis = encoding.axis_of_pair[k]
    return encoding.frequency(k) * abs(encoding.point(axis, 1) - encoding.point(axis, 0))


def axis_names(encoding: PositionEncoding) -> dict[int, str]:
    """The name of each coordinate that an encoding reads, by number."""
    count = encoding.axes
    return dict(enumerate(AXES.get(count, [f"axis {axis}" for axis in range(count)])))


def sections(axes: Any, scene: Scene) -> None:
    """Draw the wavelength of each pair, coloured by its coordinate."""
    encoding = scene.encoding
    for axis, name in axis_names(encoding).items():
        pairs = [k for k, of_pair in enumerate(encoding.axis_of_pair) if of_pair == axis]
        lengths = [2 * np.pi / _step(encoding, k) for k in pairs]
        color, marker = COLOURS[axis % len(COLOURS)], MARKERS[axis % len(MARKERS)]
        label = f"{name}: {len(pairs)} pairs"
        axes.semilogy(pairs, lengths, marker, color=color, markersize=3, label=label)
    labels(axes, "pair", "places")
    legend(axes)


def inner_products(axes: Any, rows: np.ndarray) -> None:
    """Draw cosines between the rows of three positions and all rows [n,E]; the curves coincide if
    cosines depend on the distance only.
    """
    count, sizes = len(rows), np.linalg.norm(rows, axis=1)
    for color, width, quarters in zip(COLOURS, (4.0, 2.4, 0.8), (1, 2, 3), strict=False):
        position = quarters * count // 4
        others = sizes * sizes[position]
        cosines = np.divide(rows @ rows[position], others, out=np.zeros(count), where=others > 0)
        distances = np.arange(count) - position
        axes.plot(distances, cosines, color=color, linewidth=width, label=str(position))
    labels(axes, "distance", "cosine")
    legend(axes, "position")
