"""Windows keep the tokens that they read again, and filters are sums of products."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from posenc_export import ops
from posenc_export.ops import TokenPlaces
from posenc_export.reading.read import CachedModule, read_module
from posenc_export.reading.values import aten, packet
from posenc_export.shared.numerics import tolerance
from tests.reading.test_zoo import read_of_zoo

KERNEL, WIDTH = 4, 6
TOLERANCE = tolerance("float32", depth=2, reduction=64)


class Filtered(nn.Module):
    """A filter with a bias, and a shift, both with channels first; then vectors of length 1."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.filter = nn.Conv1d(WIDTH, WIDTH, KERNEL, padding=KERNEL - 1, groups=WIDTH)
        self.out = nn.Linear(WIDTH, 3)

    def forward(self, x: Tensor) -> Tensor:
        turned = x.mT
        y = nn.functional.silu(self.filter(turned)[..., : x.size(1)])
        y = y / (y * y).sum(1, keepdim=True).add(1.0).sqrt()
        return self.out(y.mT + nn.functional.pad(turned, (1, -1)).mT)


@pytest.fixture(scope="module")
def reading() -> CachedModule:
    return read_module(Filtered(), torch.randn(3, 24, WIDTH), 40)


def _operators(reading: Any) -> list[Any]:
    return [packet(node) for node in reading.flat.nodes]


def test_the_windows_of_a_value_share_the_tokens_of_the_longest(reading: CachedModule) -> None:
    assert [tuple(cache.empty(2, 9).shape) for cache in reading.caches] == [(2, 3, WIDTH)]


def test_a_filter_is_a_sum_of_products_without_permutations(reading: CachedModule) -> None:
    found = _operators(reading)
    assert not {aten.conv1d, aten.convolution, aten.transpose} & {*found}
    assert found.count(aten.permute) == 2  # around the shift, which has no weights
    assert found.count(ops.select_tokens) == 3  # the tail, the next one, and those of the output


def test_a_convolution_that_mixes_channels_stays_one() -> None:
    mixing = nn.Sequential(nn.ConstantPad1d((2, 0), 0.0), nn.Conv1d(WIDTH, 3, 3))

    class Mixed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.mixing = mixing

        def forward(self, x: Tensor) -> Tensor:
            y: Tensor = self.mixing(x.mT)
            return y.mT

    made = read_module(Mixed(), torch.randn(3, 24, 6), 40)
    assert {aten.conv1d, aten.convolution} & {*_operators(made)}


@torch.no_grad()
def test_padding_before_and_behind_the_tokens_of_later_calls_is_skipped(
    reading: CachedModule,
) -> None:
    module, x = Filtered(), torch.randn(2, 12, WIDTH)
    wanted, none = module(x), -1
    states = [cache.empty(2, 0) for cache in reading.caches]
    calls = (
        [[0, 1, 2], [0, none, none]],
        [[none, 3, 4], [1, 2, none]],
        [[none], [3]],
        [[none, none, 5, 6], [4, 5, 6, 7]],
    )
    for places in map(torch.tensor, calls):
        tokens = x.gather(1, places.clamp(min=0)[..., None].expand(-1, -1, WIDTH))
        tokens = torch.where(places.ge(0)[..., None], tokens, torch.nan)
        y, states = reading(tokens, TokenPlaces(places, places, places, places), states)
        for row, column in places.ge(0).nonzero().tolist():
            error = (y[row, column] - wanted[row, places[row, column]]).abs().max()
            assert float(error) <= TOLERANCE


@pytest.mark.parametrize("name", ["convolution-cut", "shift-by-pad"])
def test_no_cache_grows_beside_windows(name: str) -> None:
    caches = read_of_zoo(name)[0].caches
    assert caches and all(cache.values for cache in caches)
