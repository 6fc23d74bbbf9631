"""A module in float64, with the numbers of its tables as the module computes them."""

import copy

import pytest
import torch
from torch import Tensor, nn

from posenc_export.reading.exact import in_float64

WIDTH, LENGTH = 16, 12


class Layers(nn.Module):
    """Layers of torch, without numbers that depend on the length alone."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.norm = nn.Embedding(20, WIDTH), nn.LayerNorm(WIDTH)
        self.layer = nn.TransformerEncoderLayer(WIDTH, 2, 24, batch_first=True)
        self.across = nn.Conv1d(WIDTH, WIDTH, 3, padding=2)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.norm(self.table(ids))
        mask = nn.Transformer.generate_square_subsequent_mask(ids.size(1)).to(x.dtype)
        x = self.layer(x, src_mask=mask, is_causal=True)
        return self.across(x.mT)[..., : ids.size(1)].mT.cumsum(1)


class Angles(nn.Module):
    """x times cosines that are computed in the dtype of x."""

    def forward(self, x: Tensor) -> Tensor:
        angles = torch.arange(x.size(1), dtype=x.dtype) * 1e4
        return x * angles.cos()[:, None]


class Casts(nn.Module):
    """Casts to bfloat16 and back, and a region of autocast."""

    def forward(self, x: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            x = x @ torch.eye(WIDTH)
        return x.bfloat16().float() + x.to(torch.float16).type_as(x)


class Writes(nn.Module):
    """Writes tokens into memory of its own."""

    def forward(self, x: Tensor) -> Tensor:
        shifted = torch.zeros(x.shape)
        shifted[:, 1:] = x[:, :-1]
        return shifted


def _ids() -> Tensor:
    return torch.randint(20, (2, LENGTH), generator=torch.Generator().manual_seed(0))


def _states() -> Tensor:
    return torch.randn(2, LENGTH, WIDTH, generator=torch.Generator().manual_seed(0))


def test_layers_are_computed_in_float64() -> None:
    torch.manual_seed(0)
    module = Layers().eval()
    before = copy.deepcopy(module.state_dict())
    with torch.no_grad():
        wide = copy.deepcopy(module).double()(_ids())
    y = in_float64(module, _ids())
    assert y.dtype == torch.float64 and torch.allclose(y, wide, rtol=1e-12, atol=1e-12)
    assert all(torch.equal(before[name], value) for name, value in module.state_dict().items())


def test_numbers_of_the_length_alone_are_those_of_the_module() -> None:
    x = _states()
    angles = torch.arange(LENGTH, dtype=torch.float32) * 1e4
    assert torch.equal(in_float64(Angles(), x), x.double() * angles.cos().double()[:, None])


def test_casts_to_a_smaller_dtype_are_raised() -> None:
    x = _states()
    assert torch.allclose(in_float64(Casts(), x), 2 * x.double(), rtol=1e-15)


def test_tokens_that_a_module_writes_into_its_memory_are_read() -> None:
    x = _states()
    assert torch.equal(in_float64(Writes(), x)[:, 1:], x[:, :-1].double())


@pytest.mark.parametrize("dtype", [torch.float32, torch.int64])
def test_a_module_sees_the_dtype_of_its_input(dtype: torch.dtype) -> None:
    seen = []

    def function(x: Tensor) -> Tensor:
        seen.append((x.dtype, (x * 2.0).dtype, x.float().dtype))
        return x * 2.0

    in_float64(function, torch.ones(1, 3, dtype=dtype))
    assert seen == [(dtype, torch.float32, torch.float32)]
