"""The weights that pictures are drawn with: trained ones where they are installed, tables of waves, or the start of training."""

import dataclasses
from typing import Any, Dict, Mapping, Tuple

import torch
from safetensors.torch import load_file

from posenc_export import encodings
from posenc_export.encodings.base import Geometry, PositionEncoding
from posenc_export.encodings.swin import Swin
from posenc_export.models.presets import PRESETS, weights_of

# Tables that start as noise, and which of their axes counts positions or distances.
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
BASE, PREFIX = 10000.0, "layers.0.attention.encoding."


def started(spec: Mapping[str, Any], geometry: Geometry) -> Tuple[PositionEncoding, Geometry, str]:
    """An encoding with weights that a picture can show, its geometry, and what these weights are; "" where nothing is trained.

    Args:
        spec: as encodings.build.
        geometry: of the picture; a trained encoding has the width and heads of its preset.

    Raises:
        ValueError: as encodings.build.
    """
    torch.manual_seed(0)
    preset = next((preset for preset in PRESETS if preset.startswith("small-") and spec == {"name": preset.removeprefix("small-")}), "")
    path = weights_of(preset)
    if path:
        weights = {name.removeprefix(PREFIX): value for name, value in load_file(path).items() if name.startswith(PREFIX)}
        if weights:
            config = PRESETS[preset]
            geometry = dataclasses.replace(geometry, width=config.width, heads=config.kinds[0].attention.heads)
            encoding = encodings.build(spec, geometry)
            encoding.load_state_dict(weights)
            return encoding, geometry, f"as trained in {preset}"
    encoding = encodings.build(spec, geometry)
    if isinstance(encoding, Swin):
        _fall(encoding, geometry.heads)
        return encoding, geometry, "untrained, biases that fall with the offset"
    trained = dict(encoding.named_parameters())
    tables = {name: axis for name, axis in TABLES.get(spec["name"], {}).items() if name in trained and trained[name].numel()}
    for name, axis in tables.items():
        _fill(trained[name], axis)
    said = "untrained, tables of sinusoids" if tables else "untrained, seed 0" if trained else ""
    return encoding, geometry, said


@torch.no_grad()
def _fill(table: torch.nn.Parameter, axis: int) -> None:
    """Rows [sin(n w_k), cos(n w_k)], w_k = BASE^(-2k/d), in the place of noise of the same mean and size."""
    count, width = table.shape[axis], table.shape[1 - axis]
    columns = torch.arange(width, dtype=torch.float64)
    angles = torch.arange(count, dtype=torch.float64)[:, None] * BASE ** (-2 * (columns // 2) / width)
    rows = torch.where(columns % 2 == 0, angles.sin(), angles.cos()) * (2**0.5 * table.double().std()) + table.double().mean()
    table.copy_(rows if axis == 0 else rows.T)


@torch.no_grad()
def _fall(encoding: Swin, heads: int) -> None:
    """Biases -(h + 1) / H times the length of the offset in rows and columns, in the place of noise."""
    down, right = (torch.arange(1 - count, count, dtype=torch.float32) for count in (encoding.rows, encoding.columns))
    lengths = torch.hypot(down[:, None], right[None]).flatten()
    encoding.table.weight.copy_(-lengths[:, None] * (torch.arange(heads) + 1) / heads)
