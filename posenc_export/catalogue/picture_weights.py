"""Weights for pictures of encodings: trained, chosen to show what it does, or initial ones."""

import dataclasses
import math
from typing import Any, Callable, Mapping

import torch

from posenc_export import encodings
from posenc_export.encodings.shared.base import Geometry, PositionEncoding
from posenc_export.models.presets import PRESETS, load_preset
from posenc_export.models.randomness import drawn_from
from posenc_export.shared.preset_folders import preset_folder

# Tables with random initial values, and their axis of positions or distances.
TABLES: dict[str, dict[str, int]] = {
    "learned": {"table.weight": 0},
    "learned_2d": {"of_row.weight": 0, "of_column.weight": 0},
    "boxes": dict.fromkeys(("of_x.weight", "of_y.weight"), 0),
    "hierarchical": {"table": 0},
    "multiplicative": {"factors.weight": 0},
    "decomposed_2d": {"of_rows": 0, "of_columns": 0},
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
) -> tuple[PositionEncoding, Geometry, str]:
    """Build an encoding with weights for a picture. Returns it with its geometry, which has the
    width and heads of the preset if the weights come from one, and a description of the weights;
    "" if nothing is trained. Raise ValueError as encodings.build does.
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
    tables = {trained[key]: axis for key, axis in TABLES.get(name, {}).items() if key in trained}
    filled = {table: axis for table, axis in tables.items() if table.numel()}
    for table, axis in filled.items():
        _fill(table, axis)
    drawn = "untrained, tables of sinusoids" if filled else "untrained, seed 0"
    return encoding, geometry, drawn if trained else ""


def _fill(table: torch.nn.Parameter, axis: int) -> None:
    """Replace a table by rows [sin(n w_k), cos(n w_k)] of equal mean and standard deviation."""
    count, width, numbers = table.shape[axis], table.shape[1 - axis], table.double()
    columns = torch.arange(width, dtype=torch.float64)
    frequencies = BASE ** (-2 * (columns // 2) / width)
    angles = torch.arange(count, dtype=torch.float64)[:, None] * frequencies
    waves = torch.where(columns % 2 == 0, angles.sin(), angles.cos())
    rows = waves * (2**0.5 * numbers.std()) + numbers.mean()
    table.copy_(rows if axis == 0 else rows.T)


def _fall(encoding: Any, heads: int) -> None:
    """Set biases to -(h + 1) / H times the length of the offset in rows and columns."""
    down = torch.arange(1 - encoding.rows, encoding.rows, dtype=torch.float32)
    right = torch.arange(1 - encoding.columns, encoding.columns, dtype=torch.float32)
    lengths = torch.hypot(down[:, None], right[None]).flatten()
    encoding.table.weight.copy_(-lengths[:, None] * (torch.arange(heads) + 1) / heads)


def _by_bucket(encoding: Any, heads: int) -> None:
    """Set the biases of each side to -(h + 1) / H times the bucket, as a share of its buckets."""
    for module in encoding.modules():
        if isinstance(module, torch.nn.Embedding):
            sides = 1 if "causal" in encoding.works_in and encoding.causal else 2
            count = len(module.weight) // sides
            shares = torch.arange(len(module.weight)) % count / count
            module.weight.copy_(-shares[:, None] * (torch.arange(heads) + 1) / heads)


def _cosines(encoding: Any, heads: int) -> None:
    """Let W select the cosines of R, fastest first, and let v add them, times 4 (h + 1) / H: the
    position term is an inner product of sinusoids.
    """
    waves = encoding.width // 2
    count = min(waves, encoding.weight.size(1))
    encoding.weight.zero_()
    encoding.weight[:, :count, waves:] = torch.eye(waves)[:count]
    encoding.u.zero_()
    encoding.v.copy_((4 * (torch.arange(heads) + 1) / heads)[:, None].expand_as(encoding.v))


def _spread(encoding: Any, heads: int) -> None:
    """Replace the random directions of heads by equally spaced ones of the same lengths."""
    along = encoding.along.value
    angles = math.pi * (torch.arange(along.size(1)) + 0.5) / along.size(1)
    shifts = math.pi * torch.arange(len(along)) / len(along)
    directions = (angles + shifts[:, None]).cos()
    along.copy_(along.norm(dim=0) * (directions / directions.norm(dim=0))[:, :, None])


def _smooth(encoding: Any, heads: int) -> None:
    """Set filters to 2^-distance from the token itself, normalised to sum 1, without offsets."""
    weight, causal = encoding.convolution.weight, encoding.convolution.weight.dim() == 3
    middles = [count - 1 if causal else count // 2 for count in weight.shape[2:]]
    sizes = zip(weight.shape[2:], middles, strict=True)
    places = [torch.arange(count) - middle for count, middle in sizes]
    distances = sum(grid.abs() for grid in torch.meshgrid(*places, indexing="ij"))
    filters = 0.5 ** torch.as_tensor(distances)
    weight.copy_((filters / filters.sum()).expand_as(weight))
    encoding.convolution.bias.zero_()


# Encodings whose random initial weights show nothing: a function that sets their weights, and its
# description in the title.
SHAPED: dict[str, tuple[Callable[[Any, int], None], str]] = {
    "swin": (_fall, "biases that fall with the offset"),
    "layout_bias": (_by_bucket, "biases that fall with the bucket"),
    "wavlm": (_by_bucket, "biases that fall with the bucket"),
    "transformer_xl": (_cosines, "positions as sinusoids"),
    # Scores are highest at the query's own position.
    "pope": (lambda encoding, _: encoding.phase.value.zero_(), "phases 0"),
    "rope_2d": (_spread, "directions of heads spread evenly"),
    "conditional_conv": (_smooth, "filters that fall"),
    "conditional_conv_2d": (_smooth, "filters that fall"),
}
