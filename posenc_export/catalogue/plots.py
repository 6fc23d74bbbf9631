"""Pictures of encodings, drawn from their float64 oracles."""

import dataclasses
from typing import Any, Mapping, Sequence

import numpy as np

from posenc_export import encodings
from posenc_export.catalogue import grids, scores, waves
from posenc_export.catalogue.grids import Panel
from posenc_export.catalogue.picture_weights import build_for_picture
from posenc_export.catalogue.waves import Scene
from posenc_export.encodings.shared.base import Geometry
from posenc_export.encodings.shared.combined import overrides
from posenc_export.encodings.shared.rotary import Rotary, RotaryGrid
from posenc_export.shared.refusal import refusal, short_repr

Spec = str | Mapping[str, Any]
WIDTH, HEADS, RANGE, LONGEST = 64, 8, 1024, 1 << 16
LETTERS = 40  # of a parameter in a title
ACROSS = 2  # panels beside each other
SAME = 8  # times as many tokens are drawn as get something else than the token before


@dataclasses.dataclass(frozen=True)
class View:
    """Sizes of a picture."""

    distance: int = 255  # largest distance between a query and a key, in tokens, 1 .. 65536.
    head_size: int = 64  # entries of a head, 1 .. 65536.
    # Number of tokens in panels by position, 4 .. 65536. Where all later tokens get the same, as
    # behind the filter of a convolution, eight times as many are drawn as get something else than
    # the token before, or all.
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


def draw(specs: Spec | Sequence[Spec], view: View = View()) -> Any:
    """Draw a matplotlib figure of an encoding, NAME:PARAMETER=VALUE,... or {"name": ...}, or of
    several side by side, with panels for each hook. Titles say which weights are drawn. Raise
    ValueError as encodings.build does.
    """
    from matplotlib.figure import Figure

    several = isinstance(specs, Sequence) and not isinstance(specs, str) and specs
    described: Any = specs if several else [specs]
    described = [encodings.parse(spec) if isinstance(spec, str) else spec for spec in described]
    for spec in described:
        if not isinstance(spec, Mapping) or "name" not in spec:
            rule = "an encoding as a name or a dict with a name, or a list of them"
            raise refusal("plot", rule, short_repr(spec), "see posenc list")
    if not isinstance(view, View):
        rule, remedy = "a View of sizes", "give several encodings as one list"
        raise refusal("plot", rule, short_repr(view), remedy)
    scenes = [scene_of(spec, view) for spec in described]
    drawn = [panels(scene) for scene, _ in scenes]
    most, alone = max(map(len, drawn)), len(scenes) == 1
    across = min(most, ACROSS) if alone else 1
    rows, columns = -(-most // across), across * len(scenes)
    figure = Figure(figsize=(4.4 * columns, 3.2 * rows), layout="constrained")
    parts: Any = [figure] if alone else figure.subfigures(1, len(scenes))
    for part, (scene, weights), of_scene in zip(parts, scenes, drawn, strict=True):
        part.suptitle(_title(scene.spec, weights), fontsize=10)
        for index, (title, paint) in enumerate(of_scene):
            axes = part.add_subplot(rows, across, index + 1)
            axes.set_title(title, fontsize=9)
            axes.tick_params(labelsize=8)
            paint(axes, scene)
    return figure


def scene_of(spec: Mapping[str, Any], view: View) -> tuple[Scene, str]:
    """Return what is drawn, and a description of its weights; "" if nothing is trained."""
    encoding, geometry, weights = build_for_picture(spec, view.geometry)
    return Scene(encoding, spec, geometry, view.distance, view.positions), weights


def _title(spec: Mapping[str, Any], weights: str) -> str:
    parameters = {key: str(value)[:LETTERS] for key, value in spec.items()}
    name, more = parameters.pop("name"), f" ({weights})" if weights else ""
    return ", ".join([name, *map("=".join, parameters.items())]) + more


def panels(scene: Scene) -> list[Panel]:
    """Panels of an encoding: tokens, wavelengths, places on a grid, biases, scores."""
    encoding, drawn = scene.encoding, list[Panel]()
    if overrides(encoding, "embed", "embed_next"):
        drawn += _of_tokens(scene)
    if isinstance(encoding, Rotary):
        drawn.append(("tokens to a full turn, by pair", waves.wavelengths))
        if "theta" in encodings.parameters(scene.spec["name"]):
            drawn.append(("bound of scores, by distance and theta", waves.bound))
        drawn.append(("mean cosine of fast and of slow pairs", waves.fast_and_slow))
    if isinstance(encoding, RotaryGrid):
        drawn.append(("places to a full turn, by pair and axis", waves.sections))
    drawn += grids.panels(scene)
    by_distance = not all(encoding.window)
    if overrides(encoding, "bias") and by_distance:
        drawn.append(("bias, by distance and head", scores.bias))
    if overrides(encoding, "rescore") and not overrides(encoding, "rotate"):
        if by_distance:
            title = "score of equal vectors less that of the own key"
            drawn.append((title, scores.by_content))
    elif overrides(encoding, "rotate", "rescore") or not drawn:
        # An encoding with both hooks computes plain scores of rotated vectors.
        along = "distance on all axes" if encoding.axes else "distance"
        drawn.append((f"score of equal vectors, by {along}", scores.similarity))
    return drawn


def _of_tokens(scene: Scene) -> list[Panel]:
    rows, encoding = scores.change(scene), scene.encoding  # [positions,E]
    differing = np.flatnonzero((rows[1:] != rows[:-1]).any(1))
    rows = rows[: SAME * (int(differing[-1]) + 2 if len(differing) else 1)]
    title = "what a token gets, by position"
    drawn: list[Panel] = [(title, lambda axes, _: scores.embedded(axes, rows))]
    if not encoding.oracle().overrides("embed_rows"):  # tokens depend on no other token
        title = "inner products of positions, normalised"
        drawn.append((title, lambda axes, _: waves.inner_products(axes, rows)))
    return drawn
