"""Pictures of an encoding, drawn from its float64 oracle: changes of tokens, scores by distance,
and wavelengths of rotations.
"""

import dataclasses
from typing import Any, List, Mapping, Sequence

import numpy as np

from posenc_export import encodings
from posenc_export.catalogue import grids, waves
from posenc_export.catalogue.grids import Panel
from posenc_export.catalogue.starts import build_for_picture
from posenc_export.catalogue.waves import COLOURS
from posenc_export.encodings.shared.base import Geometry, Oracle, PositionEncoding
from posenc_export.encodings.shared.combined import overrides
from posenc_export.encodings.shared.rotary import Rotary
from posenc_export.encodings.shared.rotary_grid import RotaryGrid
from posenc_export.encodings.sinusoidal import Sinusoidal

WIDTH, HEADS, RANGE, VECTORS, SHOWN, LONGEST = 64, 8, 1024, 12, 4, 1 << 16
LETTERS = 40  # of a parameter in a title
CLIPPED = 2  # colours end at this multiple of the 99th percentile
LABELLED = 8  # heads in a legend
SHARES = (
    0,
    1 / 8,
    1 / 4,
    1 / 2,
)  # entries of a sinusoid with a line of their own, as shares of the width
ACROSS = 2  # panels beside each other
SAME = 8  # times as many tokens are drawn as get something else than the token before


@dataclasses.dataclass(frozen=True)
class View:
    """Sizes of a picture.

    Args:
        distance: largest distance between a query and a key, in tokens, 1 .. 65536.
        head_size: entries of a head, 1 .. 65536.
        positions: number of tokens in panels by position, 4 .. 65536. Where all later tokens get
            the same, as behind the filter of a convolution, eight times as many are drawn as get
            something else than the token before, or all.

    Raises:
        ValueError: a number outside its range.
    """

    distance: int = 255
    head_size: int = 64
    positions: int = 128

    def __post_init__(self) -> None:
        for name, least in (("distance", 1), ("head_size", 1), ("positions", 4)):
            value = getattr(self, name)
            if not least <= value <= LONGEST:
                raise ValueError(
                    f"plot: expected {name} {least} .. {LONGEST}, got {value}; choose one in "
                    "that range"
                )

    def within(self, geometry: Geometry) -> "View":
        """Return a view of no more than the range of positions."""
        return dataclasses.replace(
            self,
            distance=max(1, min(self.distance, geometry.max_positions - 1)),
            positions=max(4, min(self.positions, geometry.max_positions)),
        )

    @property
    def geometry(self) -> Geometry:
        """Geometry whose range includes all positions of the picture."""
        return Geometry(WIDTH, HEADS, self.head_size, max(RANGE, self.distance + 1, self.positions))


@dataclasses.dataclass(frozen=True)
class Subject:
    """An encoding to draw.

    Args:
        spec: specification that it was built from.
        encoding: the encoding with its weights.
        geometry: sizes that it was built for.
        said: description of the weights for the title; "" if nothing is trained.
    """

    spec: Mapping[str, Any]
    encoding: PositionEncoding
    geometry: Geometry
    said: str

    @property
    def title(self) -> str:
        """Specification and description of the weights."""
        name = ", ".join(
            [
                str(self.spec["name"]),
                *(
                    f"{key}={str(value)[:LETTERS]}"
                    for key, value in self.spec.items()
                    if key != "name"
                ),
            ]
        )
        return f"{name} ({self.said})" if self.said else name


def draw(spec: Mapping[str, Any], view: View = View()) -> Any:
    """Draw a matplotlib figure of the encoding that spec describes, with panels for each hook. The
    title says which weights are drawn.

    Raises:
        ValueError: unknown name or parameter, a head size that the encoding refuses.
        ModuleNotFoundError: matplotlib is not installed.
    """
    return draw_all([Subject(spec, *build_for_picture(spec, view.geometry))], view)


def draw_all(subjects: Sequence[Subject], view: View = View()) -> Any:
    """Draw encodings below each other in one matplotlib figure, each at most to the end of its
    range of positions.
    """
    from matplotlib.figure import Figure

    drawn = [
        (
            subject,
            _panels(
                subject.encoding, subject.spec, subject.geometry, view.within(subject.geometry)
            ),
        )
        for subject in subjects
    ]
    rows = [-(-len(panels) // ACROSS) for _, panels in drawn]
    columns = max(min(len(panels), ACROSS) for _, panels in drawn)
    figure = Figure(figsize=(4.4 * columns, 3.2 * sum(rows)), layout="constrained")
    parts: Any = (
        [figure] if len(drawn) == 1 else figure.subfigures(len(drawn), 1, height_ratios=rows)
    )
    for part, count, (subject, panels) in zip(parts, rows, drawn, strict=True):
        # The title holds the name of a folder, where "$" begins no formula.
        part.suptitle(subject.title, fontsize=10, parse_math=False)
        for index, (title, paint) in enumerate(panels):
            axes = part.add_subplot(count, columns, index + 1)
            axes.set_title(title, fontsize=9)
            axes.tick_params(labelsize=8)
            paint(axes)
    return figure


def draw_small(name: str) -> Any:
    """Draw one panel of an encoding with its name and without scales, for a gallery: what tokens
    get, else scores or biases by distance.
    """
    from matplotlib.figure import Figure

    spec, view = {"name": name}, View(distance=127, positions=64)
    encoding, geometry, _ = build_for_picture(spec, view.geometry)
    panels = _panels(encoding, spec, geometry, view)
    figure = Figure(figsize=(1.9, 1.5), layout="constrained")
    axes = figure.add_subplot()
    panels[0 if overrides(encoding, "embed", "embed_next") else -1][1](axes)
    for other in figure.axes[1:]:
        other.remove()  # the scale of colours
    legend = axes.get_legend()
    if legend is not None:
        legend.remove()
    axes.set(xlabel="", ylabel="", xticks=[], yticks=[])
    axes.set_title(name, fontsize=9)
    return figure


def _panels(
    encoding: PositionEncoding, spec: Mapping[str, Any], geometry: Geometry, view: View
) -> List[Panel]:
    distance = view.distance
    panels: List[Panel] = []
    if overrides(encoding, "embed", "embed_next"):
        panels += _of_tokens(encoding, spec, geometry, view)
    if isinstance(encoding, Rotary):
        panels.append(
            (
                "tokens to a full turn, by pair",
                lambda axes: waves.wavelengths(axes, encoding, spec, geometry),
            )
        )
        if "theta" in encodings.parameters(spec["name"]):
            panels.append(
                (
                    "bound of scores, by distance and theta",
                    lambda axes: waves.bound(axes, encoding, spec, geometry, distance),
                )
            )
        panels.append(
            (
                "mean cosine of fast and of slow pairs",
                lambda axes: waves.fast_and_slow(axes, encoding, distance),
            )
        )
    if isinstance(encoding, RotaryGrid):
        panels.append(
            ("places to a full turn, by pair and axis", lambda axes: waves.sections(axes, encoding))
        )
    panels += grids.panels(encoding, geometry, distance)
    if overrides(encoding, "bias") and not all(encoding.window):
        panels.append(
            ("bias, by distance and head", lambda axes: _bias(axes, encoding, geometry, distance))
        )
    if overrides(encoding, "rescore") and not overrides(
        encoding, "rotate"
    ):  # an encoding with both computes plain scores of rotated vectors
        panels.append(
            (
                "score of equal vectors less that of the own key",
                lambda axes: _change_of_scores(axes, encoding, geometry, distance),
            )
        )
    elif overrides(encoding, "rotate", "rescore") or not panels:
        along = "distance on all axes" if encoding.axes else "distance"
        panels.append(
            (
                f"score of equal vectors, by {along}",
                lambda axes: _similarity(axes, encoding, geometry, distance),
            )
        )
    return panels


def _of_tokens(
    encoding: PositionEncoding, spec: Mapping[str, Any], geometry: Geometry, view: View
) -> List[Panel]:
    rows = _change(encoding, geometry, view.positions)
    differing = np.flatnonzero((rows[1:] != rows[:-1]).any(1))
    rows = rows[: SAME * (int(differing[-1]) + 2 if len(differing) else 1)]
    panels: List[Panel] = [("what a token gets, by position", lambda axes: _embedded(axes, rows))]
    if (
        type(encoding.oracle()).embed_rows is Oracle.embed_rows
    ):  # tokens do not depend on each other
        panels.append(
            (
                "inner products of positions, normalised",
                lambda axes: waves.inner_products(axes, rows),
            )
        )
    if isinstance(encoding, Sinusoidal):
        entries = [int(share * geometry.width) for share in SHARES]
        panels.append(
            ("single entries, by position", lambda axes: waves.components(axes, rows, entries))
        )
        panels.append(
            (
                f"entry {entries[2]}, by position and base",
                lambda axes: waves.by_base(axes, spec, geometry, view.positions, entries[2]),
            )
        )
    return panels


def _change(encoding: PositionEncoding, geometry: Geometry, positions: int) -> np.ndarray:
    """Encodings of the same token at all positions, minus that token: [positions,E]."""
    token = np.random.default_rng(0).standard_normal(encoding.token_width(geometry.width))
    rows = encoding.oracle().embed_rows(np.repeat(token[None], positions, 0), range(positions))
    return rows - token if len(token) == geometry.width else rows


def _embedded(axes: Any, change: np.ndarray) -> None:
    sizes = np.abs(change)
    most, usual = float(sizes.max()), CLIPPED * float(np.quantile(sizes, 0.99))
    limit = (
        usual if 0 < usual < most else most or 1.0
    )  # trained tables have a few numbers beside which no other would be seen
    waves.heatmap(
        axes,
        change.T,
        limit < most,
        aspect="auto",
        origin="lower",
        cmap="RdBu_r",
        vmin=-limit,
        vmax=limit,
    )
    waves.labels(axes, "position", "entry")


def _bias(axes: Any, encoding: PositionEncoding, geometry: Geometry, distance: int) -> None:
    oracle, distances, step = (
        encoding.oracle(),
        np.arange(distance + 1),
        -(-geometry.heads // LABELLED),
    )
    for head in range(geometry.heads):
        values = [oracle.bias(head, distance, distance - int(d)) for d in distances]
        axes.plot(
            distances,
            values,
            color=COLOURS[head % len(COLOURS)],
            linewidth=1,
            label=None if head % step else str(head),
        )
    axes.set_xlabel("distance", fontsize=8)
    axes.legend(fontsize=7, frameon=False, title="head", title_fontsize=7, ncols=2)


def _scores(
    encoding: PositionEncoding, geometry: Geometry, query: int, heads_in_turn: Sequence[int]
) -> np.ndarray:
    """Scores [n,query+1] by distance, of a query and keys that are the same random vector, for n
    heads.
    """
    random, oracle = np.random.default_rng(0), encoding.oracle()
    oracle.begin(range(query + 1))
    oracle.observe(random.standard_normal((query + 1, geometry.width)))
    rows, alike = [], grids.heads_alike(oracle)
    for head in heads_in_turn:
        heads = np.repeat(
            random.standard_normal((1, geometry.head_size)), 1 if alike else geometry.heads, 0
        )
        index = 0 if alike else head
        own = oracle.rotate_heads(heads, query)[index]
        keys = np.stack([oracle.rotate_key_heads(heads, p)[index] for p in range(query + 1)])
        rows.append(oracle.scores(head, own, keys, query, range(query + 1))[::-1])
    return np.stack(rows)


def _similarity(axes: Any, encoding: PositionEncoding, geometry: Geometry, query: int) -> None:
    """Draw mean and standard deviation of scores over random vectors, for the first head."""
    scores = _scores(encoding, geometry, query, [0] * VECTORS)
    mean, spread = scores.mean(0), scores.std(0)
    axes.fill_between(
        np.arange(query + 1), mean - spread, mean + spread, color=COLOURS[0], alpha=0.2, linewidth=0
    )
    axes.plot(mean, color=COLOURS[0], linewidth=1.2)
    waves.labels(axes, "distance")


def _change_of_scores(
    axes: Any, encoding: PositionEncoding, geometry: Geometry, query: int
) -> None:
    """Draw a line for each of some heads, minus the score of the query's own key."""
    heads = range(min(SHOWN, geometry.heads))
    scores = _scores(encoding, geometry, query, heads)
    for head, color in zip(heads, COLOURS, strict=False):
        axes.plot(scores[head] - scores[head, 0], color=color, linewidth=1, label=str(head))
    waves.legend(axes, "head, vector")
    waves.labels(axes, "distance")
