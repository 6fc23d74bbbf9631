"""Modules whose heads are turned by coordinates of tokens, as those of images."""

import math
from pathlib import Path
from typing import Any, Callable

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from posenc_export import export_model, load
from posenc_export.reading.read import read_module
from posenc_export.reading.refused import Refused
from posenc_export.shared.numerics import tolerance, worst_error

HEADS, SIZE, MOST, WORDS, AXES = 2, 12, 64, 50, 3
IDS = torch.randint(WORDS, (2, 20), generator=torch.Generator().manual_seed(1))
PLACES = torch.randint(MOST, (AXES, 2, 20), generator=torch.Generator().manual_seed(2))
pytestmark = pytest.mark.xdist_group("coordinates")


def sections(waves: Tensor) -> Tensor:
    """Time, then rows, then columns, as in Qwen2-VL. waves: [A,B,S,D/2]."""
    parts = waves.split([1, 2, 3], -1)
    return torch.cat([part[axis] for axis, part in enumerate(parts)], -1)


def in_turn(waves: Tensor) -> Tensor:
    """Rows and columns written over time, as in Qwen3-VL."""
    chosen = waves[0].clone()
    for axis in (1, 2):
        chosen[..., axis::3] = waves[axis, ..., axis::3]
    return chosen


def summed(waves: Tensor) -> Tensor:
    """Pairs that are turned by no coordinate alone."""
    return waves.mean(0)


class Seeing(nn.Module):
    """Attention over ids; heads are turned by coordinates, or by positions if none are given."""

    def __init__(self, chosen: Callable[[Tensor], Tensor] = sections, row_alone: bool = False):
        super().__init__()
        torch.manual_seed(0)
        self.chosen, self.row_alone = chosen, row_alone
        self.ids, self.qkv = nn.Embedding(WORDS, 24), nn.Linear(24, 3 * HEADS * SIZE)
        self.head = nn.Linear(HEADS * SIZE, WORDS)

    def forward(self, ids: Tensor, places: Tensor | None = None) -> Tensor:
        if places is None:
            places = torch.arange(ids.size(1)).expand(AXES, ids.size(0), -1)
        angles = places[..., None].float() * 10.0 ** -torch.linspace(0, 2, SIZE // 2)
        cos, sin = (self.chosen(wave)[:, None] for wave in (angles.cos(), angles.sin()))
        q, k, v = self.qkv(self.ids(ids)).unflatten(2, (3, HEADS, SIZE)).permute(2, 0, 3, 1, 4)
        turned = []
        for first, second in (q.chunk(2, -1), k.chunk(2, -1)):
            turned.append(torch.cat((first * cos - second * sin, second * cos + first * sin), -1))
        scores = turned[0] @ turned[1].mT / math.sqrt(SIZE)
        hidden = torch.ones(ids.size(1), ids.size(1), dtype=torch.bool).triu(1)
        if self.row_alone:
            hidden = hidden | (places[1, :, None, :, None] != places[1, :, None, None])
        return self.head((scores.masked_fill(hidden, -1e9).softmax(-1) @ v).mT.flatten(1, 2).mT)


HOW: dict[str, Any] = {"max_positions": MOST, "positions": "places", "axes": AXES}


def _difference(session: Any, module: nn.Module) -> float:
    """Return the largest error of calls with coordinates in pieces, and of text in steps."""
    with torch.no_grad():
        seen, text = module(IDS, PLACES).numpy(), module(IDS).numpy()
    ids, grid, found = IDS.numpy(), PLACES.numpy(), []
    for start, end in ((0, 7), (7, 8), (8, 20)):
        found.append(session.prefill(ids[:, start:end], grid=grid[..., start:end], chunk=5))
    session.reset()
    steps: list[np.ndarray] = [session.prefill(ids[:, :3])]
    steps += [session.step(ids[:, place])[:, None] for place in range(3, 20)]
    pairs = (found, seen), (steps, text)
    return max(worst_error(np.concatenate(got, 1), wanted) for got, wanted in pairs)


@pytest.mark.parametrize(
    ("chosen", "target"),
    [
        (sections, "torchscript"),
        (in_turn, "ort"),
        pytest.param(sections, "onnx", marks=pytest.mark.exhaustive),
        pytest.param(in_turn, "onnx-static", marks=pytest.mark.exhaustive),
    ],
)
def test_calls_with_coordinates_give_what_the_module_gives(
    chosen: Callable[[Tensor], Tensor], target: str, tmp_path: Path
) -> None:
    module = Seeing(chosen).eval()
    manifest = export_model(module, target, tmp_path / "seeing", verify="quick", **HOW)
    assert manifest.axes == AXES and manifest.certificate is not None
    assert manifest.certificate["passed"] and "coordinates: oracle" in manifest.certificate["cells"]
    session = load(tmp_path / "seeing", threads=1, provider="cpu").session()
    assert _difference(session, module) <= tolerance("float32", depth=2, reduction=24)


@pytest.mark.parametrize(
    ("module", "how", "said"),
    [
        (Seeing(summed), {}, "reads coordinates of tokens, and turns no heads by one"),
        (Seeing(row_alone=True), {}, "reads coordinates of tokens"),
        (Seeing(), {"positions": None}, "expected positions to name an argument for 3 axes"),
        (Seeing(), {"axes": 9}, "expected axes of 0 to 8, got 9"),
        (Seeing(), {"axes": 2}, "raises"),
    ],
    ids=["two coordinates for a pair", "a mask by rows", "no name", "too many", "too few"],
)
def test_other_uses_of_coordinates_are_refused(
    module: nn.Module, how: dict[str, Any], said: str
) -> None:
    with pytest.raises(Refused, match=f"^module Seeing: .*{said}"):
        read_module(module.eval(), IDS, **{**HOW, **how})
