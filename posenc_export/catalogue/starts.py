"""Weights for pictures of encodings: trained weights if they are installed, weights chosen to
show what an encoding does, or initial weights.
"""

import dataclasses
import math
from typing import Any, Callable, Dict, Mapping, Tuple

import torch

from posenc_export import encodings
from posenc_export.encodings.shared.base import Geometry, PositionEncoding
from posenc_export.models.presets import PRESETS, load_preset
from posenc_export.models.randomness import drawn_from
from posenc_export.shared.preset_folders import preset_folder

# Tables with random initial values, and their axis of positions or distances.
TABLES: Dict[str, Dict[str, int]] = {
    "learned": {"table.weight": 0},
    "learned_2d": {"of_row.weight": 0, "of_column.weight": 0},
    "hierarchical": {"table": 0},
    "multiplicative": {"factors.weight": 0},
    "shaw": {"keys": 0, "values": 0},
    "deberta": {"table": 0},
    "inkling": {"table": 1},
    "cope": {"table": 1},
}
BASE = 10000.0


@drawn_from(0)
@torch.no_grad()
def build_for_picture(
    spec: Mapping[str, Any], geometry: Geometry
) -> Tuple[PositionEncoding, Geometry, str]:
    """Build an encoding with weights for a picture. Returns it with its geometry and a description
    of the weights; "" if nothing is trained.

    Args:
        spec: see encodings.build.
        geometry: geometry of the picture; a trained encoding uses the width and heads of its preset
            instead.

    Raises:
        ValueError: see encodings.build.
    """
    name = spec["name"]
    preset = f"small-{name}" if spec == {"name": name} else ""
    if preset in PRESETS and preset_folder(preset):
        weights = dict(load_preset(preset).attentions()[0].encoding.named_parameters())
        if weights:
            config = PRESETS[preset]
            heads = config.kinds[0].attention.heads
            geometry = dataclasses.replace(geometry, width=config.width, heads=heads)
            encoding = encodings.build(spec, geometry)
            encoding.load_state_dict(weights)
            return encoding, geometry, f"as trained in {preset}"
    encoding = encodings.build(spec, geometry)
    if name in SHAPED:
        shape, description = SHAPED[name]
        shape(encoding, geometry.heads)
        return encoding, geometry, f"untrained, {description}"
    trained = dict(encoding.named_parameters())
    tables = TABLES.get(name, {}).items()
    filled = [(trained[key], axis) for key, axis in tables if key in trained]
    filled = [(table, axis) for table, axis in filled if table.numel()]
    for table, axis in filled:
        _fill(table, axis)
    if filled:
        return encoding, geometry, "untrained, tables of sinusoids"
    return encoding, geometry, "untrained, seed 0" if trained else ""


def _fill(table: torch.nn.Parameter, axis: int) -> None:
    """Replace a random table by rows [sin(n w_k), cos(n w_k)], w_k = BASE^(-2k/d), with the same
    mean and standard deviation.
    """
    count, width = table.shape[axis], table.shape[1 - axis]
    columns = torch.arange(width, dtype=torch.float64)
    angles = torch.arange(count, dtype=torch.float64)[:, None] * BASE ** (
        -2 * (columns // 2) / width
    )
    rows = (
        torch.where(columns % 2 == 0, angles.sin(), angles.cos()) * (2**0.5 * table.double().std())
        + table.double().mean()
    )
    table.copy_(rows if axis == 0 else rows.T)


def _fall(encoding: Any, heads: int) -> None:
    """Set biases to -(h + 1) / H times the length of the offset in rows and columns."""
    down, right = (
        torch.arange(1 - count, count, dtype=torch.float32)
        for count in (encoding.rows, encoding.columns)
    )
    lengths = torch.hypot(down[:, None], right[None]).flatten()
    encoding.table.weight.copy_(-lengths[:, None] * (torch.arange(heads) + 1) / heads)


def _cosines(encoding: Any, heads: int) -> None:
    """Let W select the cosines of R, fastest first, and let v add them, times 4 (h + 1) / H: the
    position term is an inner product of sinusoids.
    """
    waves = encoding.width // 2
    encoding.weight.zero_()
    encoding.weight[:, : min(waves, encoding.weight.size(1)), waves:] = torch.eye(waves)[
        : encoding.weight.size(1)
    ]
    encoding.u.zero_()
    encoding.v.copy_((4 * (torch.arange(heads) + 1) / heads)[:, None].expand_as(encoding.v))


def _in_phase(encoding: Any, heads: int) -> None:
    """Set all phases to 0: scores are highest at the query's own position."""
    encoding.phase.value.zero_()


def _spread(encoding: Any, heads: int) -> None:
    """Replace the random directions of heads by equally spaced ones of the same lengths."""
    along = encoding.along.value
    angles = math.pi * (torch.arange(along.size(1)) + 0.5) / along.size(1)
    directions = torch.stack(
        [(angles + math.pi * axis / len(along)).cos() for axis in range(len(along))]
    )
    along.copy_(along.norm(dim=0) * (directions / directions.norm(dim=0))[:, :, None])


def _smooth(encoding: Any, heads: int) -> None:
    """Set filters to 2^-distance from the token itself, normalised to sum 1, without offsets."""
    weight, causal = encoding.convolution.weight, encoding.convolution.weight.dim() == 3
    places = [
        torch.arange(count) - (count - 1 if causal else count // 2) for count in weight.shape[2:]
    ]
    distances = sum(grid.abs() for grid in torch.meshgrid(*places, indexing="ij"))
    filters = 0.5 ** torch.as_tensor(distances)
    weight.copy_((filters / filters.sum()).expand_as(weight))
    encoding.convolution.bias.zero_()


# Encodings whose random initial weights show nothing: a function that sets their weights, and its
# description in the title.
SHAPED: Dict[str, Tuple[Callable[[Any, int], None], str]] = {
    "swin": (_fall, "biases that fall with the offset"),
    "transformer_xl": (_cosines, "positions as sinusoids"),
    "pope": (_in_phase, "phases 0"),
    "rope_2d": (_spread, "directions of heads spread evenly"),
    "conditional_conv": (_smooth, "filters that fall"),
    "conditional_conv_2d": (_smooth, "filters that fall"),
}
