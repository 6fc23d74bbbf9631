"""Which panels the picture of an encoding has, by its hooks."""

from functools import partial
from typing import Any, List, Mapping

import numpy as np

from posenc_export import encodings
from posenc_export.catalogue import grids, scores, waves
from posenc_export.catalogue.grids import Panel
from posenc_export.encodings.shared.base import Geometry, Oracle, PositionEncoding
from posenc_export.encodings.shared.combined import overrides
from posenc_export.encodings.shared.rotary import Rotary
from posenc_export.encodings.shared.rotary_grid import RotaryGrid
from posenc_export.encodings.sinusoidal import Sinusoidal

SHARES = (0, 1 / 8, 1 / 4, 1 / 2)  # entries of a sinusoid with a line, as shares of the width
SAME = 8  # times as many tokens are drawn as get something else than the token before


def panels(
    encoding: PositionEncoding,
    spec: Mapping[str, Any],
    geometry: Geometry,
    distance: int,
    positions: int,
) -> List[Panel]:
    """Panels of an encoding: tokens, wavelengths, places on a grid, biases, scores.

    Args:
        spec: specification that the encoding was built from.
        distance: largest distance between a query and a key, in tokens.
        positions: number of tokens in panels by position.
    """
    sizes: Any = {"encoding": encoding, "geometry": geometry, "distance": distance}
    drawn: List[Panel] = []
    if overrides(encoding, "embed", "embed_next"):
        drawn += _of_tokens(encoding, spec, geometry, positions)
    if isinstance(encoding, Rotary):
        drawn += _of_rotation(encoding, spec, geometry, distance)
    if isinstance(encoding, RotaryGrid):
        paint = partial(waves.sections, encoding=encoding)
        drawn.append(("places to a full turn, by pair and axis", paint))
    drawn += grids.panels(encoding, geometry, distance)
    by_distance = not all(encoding.window)
    if overrides(encoding, "bias") and by_distance:
        drawn.append(("bias, by distance and head", partial(scores.bias, **sizes)))
    if overrides(encoding, "rescore") and not overrides(encoding, "rotate"):
        paint = partial(scores.by_content, **sizes)
        if by_distance:
            drawn.append(("score of equal vectors less that of the own key", paint))
    elif overrides(encoding, "rotate", "rescore") or not drawn:
        # An encoding with both hooks computes plain scores of rotated vectors.
        along = "distance on all axes" if encoding.axes else "distance"
        drawn.append((f"score of equal vectors, by {along}", partial(scores.similarity, **sizes)))
    return drawn


def _of_rotation(
    encoding: Rotary, spec: Mapping[str, Any], geometry: Geometry, distance: int
) -> List[Panel]:
    built: Any = {"encoding": encoding, "spec": spec, "geometry": geometry}
    drawn: List[Panel] = [("tokens to a full turn, by pair", partial(waves.wavelengths, **built))]
    if "theta" in encodings.parameters(spec["name"]):
        paint = partial(waves.bound, distance=distance, **built)
        drawn.append(("bound of scores, by distance and theta", paint))
    paint = partial(waves.fast_and_slow, encoding=encoding, distance=distance)
    return [*drawn, ("mean cosine of fast and of slow pairs", paint)]


def _of_tokens(
    encoding: PositionEncoding, spec: Mapping[str, Any], geometry: Geometry, positions: int
) -> List[Panel]:
    rows = scores.change(encoding, geometry, positions)  # [positions,E]
    differing = np.flatnonzero((rows[1:] != rows[:-1]).any(1))
    rows = rows[: SAME * (int(differing[-1]) + 2 if len(differing) else 1)]
    drawn: List[Panel] = [("what a token gets, by position", partial(scores.embedded, rows=rows))]
    if type(encoding.oracle()).embed_rows is Oracle.embed_rows:  # tokens depend on no other token
        paint = partial(waves.inner_products, rows=rows)
        drawn.append(("inner products of positions, normalised", paint))
    if isinstance(encoding, Sinusoidal):
        entries = [int(share * geometry.width) for share in SHARES]
        paint = partial(waves.components, rows=rows, entries=entries)
        drawn.append(("single entries, by position", paint))
        entry = entries[2]
        paint = partial(
            waves.by_base, spec=spec, geometry=geometry, positions=positions, entry=entry
        )
        drawn.append((f"entry {entry}, by position and base", paint))
    return drawn
