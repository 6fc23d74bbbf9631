"""Rotations are recognized in any spelling, and become one operation of every target."""

from typing import Any, Callable

import pytest
import torch
from torch import Tensor, nn

from posenc_export.reading.read import CachedModule, read_module
from posenc_export.reading.rotations import _is_linear
from posenc_export.shared.numerics import tolerance
from tests.reading.compare import errors

HEADS, SIZE, MOST = 4, 16, 64
Turn = Callable[[Tensor, Tensor], Tensor]  # heads [B,H,S,D] and angles [S,D/2]
pytestmark = pytest.mark.xdist_group("rotations")


def halves(x: Tensor, angles: Tensor) -> Tensor:
    """As in GPT-NeoX, with cos and sin repeated."""
    cos, sin = angles.cos().repeat(1, 2), angles.sin().repeat(1, 2)
    first, second = x.chunk(2, -1)
    return x * cos + torch.cat((-second, first), -1) * sin


def split_parts(x: Tensor, angles: Tensor) -> Tensor:
    """Halves by their parts, turned the other way."""
    first, second = x[..., : SIZE // 2], x[..., SIZE // 2 :]
    cos, sin = angles.cos(), angles.sin()
    return torch.cat([first * cos + second * sin, second * cos - first * sin], 3)


def pairs(x: Tensor, angles: Tensor) -> Tensor:
    """Interleaved, as in GPT-J, with the form that is written into new memory."""
    turned = torch.empty_like(x)
    turned[..., 0::2] = x[..., 0::2] * angles.cos() - x[..., 1::2] * angles.sin()
    turned[..., 1::2] = x[..., 1::2] * angles.cos() + x[..., 0::2] * angles.sin()
    return turned


def matrices(x: Tensor, angles: Tensor) -> Tensor:
    """Interleaved, as products with matrices of 2 x 2."""
    cos, sin = angles.cos(), angles.sin()
    turns = torch.stack((torch.stack((cos, -sin), -1), torch.stack((sin, cos), -1)), -2)
    return torch.einsum("sdij,bhsdj->bhsdi", turns, x.unflatten(-1, (-1, 2))).flatten(-2)


def complex_numbers(x: Tensor, angles: Tensor) -> Tensor:
    """Interleaved, as in the code of Llama."""
    numbers = torch.view_as_complex(x.unflatten(-1, (-1, 2)).contiguous())
    turned = numbers * torch.polar(torch.ones_like(angles), angles)
    return torch.view_as_real(turned).flatten(-2)


def partial(x: Tensor, angles: Tensor) -> Tensor:
    """The first half of the entries, scaled as in YaRN."""
    cos, sin = 1.1 * angles[:, :4].cos(), 1.1 * angles[:, :4].sin()
    first, second, rest = x[..., :4], x[..., 4:8], x[..., 8:]
    return torch.cat((first * cos - second * sin, second * cos + first * sin, rest), -1)


def pairs_to_halves(x: Tensor, angles: Tensor) -> Tensor:
    """Interleaved before, halves after it, of the last entries, as in DeepSeek-V3."""
    cos, sin, (rest, last) = angles.cos()[:, :4], angles.sin()[:, :4], x.split(8, -1)
    first, second, y = last[..., 0::2], last[..., 1::2], torch.empty_like(x)
    y[..., :8] = rest
    y[..., 8:] = torch.cat((first * cos - second * sin, second * cos + first * sin), -1)
    return y


def times_a_temperature(x: Tensor, angles: Tensor) -> Tensor:
    """Multiplied by a function of the position, as in Ministral 3."""
    return halves(x, angles) * (1 + 0.1 * torch.log(1 + torch.floor(angles[:, :1] / 4)))


def normalized(x: Tensor, angles: Tensor) -> Tensor:
    """Heads of one size after they are turned, as in nanochat."""
    return nn.functional.normalize(halves(x, angles), dim=-1)


def squashed(x: Tensor, angles: Tensor) -> Tensor:
    """What is turned is a function of the projected heads."""
    return halves(x.tanh(), angles)


def one_pair_more(x: Tensor, angles: Tensor) -> Tensor:
    """No rotation: two entries that are turned are also added."""
    y = halves(x, angles)
    return torch.cat((y[..., :1] + 0.01 * x[..., 1:2], y[..., 1:]), -1)


SPELLINGS: dict[Turn, int] = {
    halves: 16, split_parts: 16, pairs: 16, matrices: 16, complex_numbers: 16, partial: 8,
    normalized: 16, squashed: 16, pairs_to_halves: 8, times_a_temperature: 16,
}  # fmt: skip


class Model(nn.Module):
    """Attention over ids with heads that are turned by a spelling."""

    def __init__(self, turn: Turn, kv_heads: int = HEADS) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.turn, self.kv_heads = turn, kv_heads
        self.ids = nn.Embedding(50, HEADS * SIZE)
        self.q = nn.Linear(HEADS * SIZE, HEADS * SIZE)
        self.kv = nn.Linear(HEADS * SIZE, 2 * kv_heads * SIZE)
        turns = 10.0 ** -torch.linspace(0, 2, SIZE // 2)
        self.register_buffer("angles", torch.outer(torch.arange(MOST).float(), turns))

    def forward(self, ids: Tensor) -> Tensor:
        x, angles = self.ids(ids), self.angles[: ids.shape[1]]
        q, (k, v) = self.q(x).unflatten(2, (-1, SIZE)), self.kv(x).chunk(2, 2)
        k, v = (part.unflatten(2, (-1, SIZE)).transpose(1, 2) for part in (k, v))
        q, k = self.turn(q.transpose(1, 2), angles), self.turn(k, angles)
        k, v = (part.repeat_interleave(HEADS // self.kv_heads, 1) for part in (k, v))
        y = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        return y.transpose(1, 2).flatten(2)


def of(turn: Turn, **how: Any) -> CachedModule:
    """Read a model and compare its calls."""
    model, ids = Model(turn, **how).eval(), torch.randint(50, (2, 20))
    with torch.no_grad():
        reading = read_module(model, ids, MOST)
        found = errors(reading, model, ids)
    assert max(found.values()) <= tolerance("float32", depth=2, reduction=64)
    return reading


def rotations(reading: CachedModule) -> Any:
    """Return the operations of the calls that turn heads."""
    code = type(reading.calls).forward
    return [name for name in code.__code__.co_names if name == "rotate_pairs"] and [
        getattr(reading.calls.tables, name) for name, _ in reading.calls.tables.named_parameters()
    ]


@pytest.mark.parametrize("turn", SPELLINGS, ids=lambda turn: turn.__name__)
def test_a_rotation_is_recognized_in_every_spelling(turn: Turn) -> None:
    tables = rotations(of(turn))
    assert [list(table.shape) for table in tables] == [[MOST, SPELLINGS[turn] // 2]] * 2


def test_heads_that_are_shared_are_turned_before_they_are_repeated() -> None:
    reading = of(halves, kv_heads=2)
    assert len(rotations(reading)) == 2
    assert [cache.heads for cache in reading.caches] == [2, 2]


def test_what_is_no_rotation_stays_as_it_is() -> None:
    assert not rotations(of(one_pair_more))


def test_tables_are_those_of_the_module() -> None:
    cos, sin = rotations(of(split_parts))
    angles = Model(split_parts).angles
    assert torch.equal(cos, angles.cos()) and torch.equal(sin, -angles.sin())


def test_angles_are_linear_only_if_they_are_proportional_to_the_position() -> None:
    places = torch.arange(2000, dtype=torch.float64)[:, None]
    turns = 1e4 ** -torch.linspace(0, 1, 8, dtype=torch.float64)
    exact = places * turns + 0.3
    assert _is_linear((2 * exact.cos()).float(), (2 * exact.sin()).float())
    rounded = places.float() * turns.float()
    for angles in (rounded, exact * (1 + 1e-7 * places), exact.where(places < 1500, exact + 0.1)):
        assert not _is_linear(angles.cos().float(), angles.sin().float())
    assert not _is_linear(places * exact.cos(), places * exact.sin())
