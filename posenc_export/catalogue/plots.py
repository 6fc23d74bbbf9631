"""Pictures of encodings, drawn from their float64 oracles."""

import dataclasses
from typing import Any, Mapping, Sequence

from posenc_export.catalogue.panels import panels
from posenc_export.catalogue.starts import build_for_picture
from posenc_export.encodings.shared.base import Geometry, PositionEncoding
from posenc_export.encodings.shared.combined import overrides
from posenc_export.shared.refusal import refusal

WIDTH, HEADS, RANGE, LONGEST = 64, 8, 1024, 1 << 16
LETTERS = 40  # of a parameter in a title
ACROSS = 2  # panels beside each other


@dataclasses.dataclass(frozen=True)
class View:
    """Sizes of a picture.

    Args:
        distance: largest distance between a query and a key, in tokens, 1 .. 65536.
        head_size: entries of a head, 1 .. 65536.
        positions: number of tokens in panels by position, 4 .. 65536. Where all later tokens get
            the same, as behind the filter of a convolution, eight times as many are drawn as get
            something else than the token before, or all.
    """

    distance: int = 255
    head_size: int = 64
    positions: int = 128

    def __post_init__(self) -> None:
        for name, least in (("distance", 1), ("head_size", 1), ("positions", 4)):
            value, span = getattr(self, name), f"{least} .. {LONGEST}"
            if not least <= value <= LONGEST:
                raise refusal("plot", f"{name} {span}", value, "choose one in that range")

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
        parameters = {key: str(value)[:LETTERS] for key, value in self.spec.items()}
        name, weights = parameters.pop("name"), f" ({self.said})" if self.said else ""
        return ", ".join([name, *map("=".join, parameters.items())]) + weights


def draw(spec: Mapping[str, Any], view: View = View()) -> Any:
    """Draw a matplotlib figure of the encoding that spec describes, with panels for each hook. The
    title says which weights are drawn. Raise ValueError as encodings.build does.
    """
    return draw_all([Subject(spec, *build_for_picture(spec, view.geometry))], view)


def draw_all(subjects: Sequence[Subject], view: View = View()) -> Any:
    """Draw encodings below each other, each at most to the end of its range of positions."""
    from matplotlib.figure import Figure

    drawn = [_panels(subject, view) for subject in subjects]
    rows = [-(-len(of_subject) // ACROSS) for of_subject in drawn]
    columns = min(max(map(len, drawn)), ACROSS)
    figure = Figure(figsize=(4.4 * columns, 3.2 * sum(rows)), layout="constrained")
    parts: Any = [figure]
    if len(drawn) > 1:
        parts = figure.subfigures(len(drawn), 1, height_ratios=rows)
    for part, subject, count, of_subject in zip(parts, subjects, rows, drawn, strict=True):
        # The title holds the name of a folder, where "$" begins no formula.
        part.suptitle(subject.title, fontsize=10, parse_math=False)
        for index, (title, paint) in enumerate(of_subject):
            axes = part.add_subplot(count, columns, index + 1)
            axes.set_title(title, fontsize=9)
            axes.tick_params(labelsize=8)
            paint(axes)
    return figure


def draw_small(name: str) -> Any:
    """Draw one panel of an encoding with its name, without a legend, for the gallery."""
    from matplotlib.figure import Figure

    view = View(distance=127, positions=64)
    subject = Subject({"name": name}, *build_for_picture({"name": name}, view.geometry))
    figure = Figure(figsize=(2.3, 1.9), layout="constrained")
    axes = figure.add_subplot()
    chosen = 0 if overrides(subject.encoding, "embed", "embed_next") else -1
    _panels(subject, view)[chosen][1](axes)
    for scale_of_colours in figure.axes[1:]:
        scale_of_colours.remove()
    axes.legend_ = None
    axes.locator_params(nbins=3)
    axes.tick_params(labelsize=8)
    axes.set_title(name, fontsize=10)
    return figure


def _panels(subject: Subject, view: View) -> Any:
    """Panels of no more than the range of positions."""
    longest = subject.geometry.max_positions
    distance = max(1, min(view.distance, longest - 1))
    positions = max(4, min(view.positions, longest))
    return panels(subject.encoding, subject.spec, subject.geometry, distance, positions)
