"""Modules that are other functions at inputs or positions that examples seldom have."""

import math
from typing import Any, Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from posenc_export.reading.axes import same
from posenc_export.reading.read import read_module
from tests.reading.compare import Rows
from tests.reading.refused_modules import HEADS, WIDTH, Words

MOST, LENGTH, LATE = 600, 90, 80
WORDS, FAR = 3000, 250  # ids that are common; tokens behind which a filter reads
ANGLES = torch.arange(MOST)[:, None] * torch.tensor([1.0, 0.3, 0.1, 0.01])
COS, SIN = ANGLES.cos().repeat(1, 2), ANGLES.sin().repeat(1, 2)


def _turned(x: Tensor) -> Tensor:
    cos, sin = COS[: x.shape[2]], SIN[: x.shape[2]]
    return x * cos + torch.cat((-x[..., 4:], x[..., :4]), -1) * sin


def _scores(q: Tensor, k: Tensor) -> Tensor:
    return q @ k.mT / math.sqrt(WIDTH // HEADS)


def _causal(scores: Tensor) -> Tensor:
    return scores.masked_fill(torch.ones_like(scores).triu(1).bool(), -1e30)


def _dropped(q: Tensor, k: Tensor, v: Tensor, _: Tensor) -> Tensor:
    scores = _causal(_scores(q, k))
    return torch.where(scores > 20, 0.0, scores.softmax(-1)) @ v


def _hidden(q: Tensor, k: Tensor, v: Tensor, ids: Tensor) -> Tensor:
    far = (ids >= WORDS)[:, None, None]
    return _causal(_scores(q, k)).masked_fill(far, -1e30).softmax(-1) @ v


def _bounded(q: Tensor, k: Tensor, v: Tensor, _: Tensor) -> Tensor:
    return _causal(_scores(_turned(q).clamp(-8, 8), k)).softmax(-1) @ v


def _other_heads(q: Tensor, k: Tensor, v: Tensor, ids: Tensor) -> Tensor:
    of_one = v[:, :1].expand_as(v)
    v = torch.where((ids >= WORDS)[:, None, :, None], v, of_one)
    return _causal(_scores(q, k[:, :1].expand_as(k))).softmax(-1) @ v


def _late_query(q: Tensor, k: Tensor, v: Tensor, _: Tensor) -> Tensor:
    length = q.shape[2]
    return _causal(_scores(q, k) + KEYS[:length] * QUERIES[:length, None]).softmax(-1) @ v


def _without_a_pair(q: Tensor, k: Tensor, v: Tensor, _: Tensor) -> Tensor:
    i = torch.arange(q.shape[2])
    away = i[:, None] - i
    hidden = (away < 0) | (away > 60) | ((i[:, None] == LATE) & (i == LATE // 2))
    return _scores(q, k).masked_fill(hidden, -math.inf).softmax(-1) @ v


KEYS, QUERIES = torch.arange(MOST) % 7 * 1.0, torch.eye(MOST)[LATE]
OF_HEADS: dict[str, Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]] = {
    "scores in bounds": lambda q, k, v, _: _causal(_scores(q, k).clamp(-20, 20)).softmax(-1) @ v,
    "weights of large scores": _dropped,
    "keys of seldom ids": _hidden,
    "rotated heads in bounds": _bounded,
    "values of seldom ids": _other_heads,
    "a query that scores otherwise": _late_query,
    "a window without one of its pairs": _without_a_pair,
}


class Seldom(Words):
    """Some of its ids, which are not in the example, have large vectors."""

    def __init__(self, of: Callable[..., Tensor]) -> None:
        super().__init__()
        torch.manual_seed(0)
        large = 30 * torch.randn(5, WIDTH)
        self.embed = nn.Embedding.from_pretrained(torch.cat((torch.randn(WORDS, WIDTH), large)))
        self.mix = nn.Conv1d(WIDTH, WIDTH, 3, groups=WIDTH)
        self.of = of

    def forward(self, ids: Tensor) -> Tensor:
        return self.head(self.of(self, ids, self.embed(ids)))


def _attended(of: Callable[..., Tensor]) -> Callable[..., Tensor]:
    def attend(self: Seldom, ids: Tensor, x: Tensor) -> Tensor:
        parts = self.packed(x).unflatten(-1, (3, HEADS, -1)).permute(2, 0, 3, 1, 4)
        return of(*parts.unbind(0), ids).transpose(1, 2).flatten(2)

    return attend


def _filtered(self: Seldom, _: Tensor, x: Tensor) -> Tensor:
    return self.mix(F.pad(x.mT, (2, 0)).clamp(-6, 6)).mT


def _added_up(_: Seldom, ids: Tensor, x: Tensor) -> Tensor:
    weight = F.pad(torch.tensor([1.0]), (FAR, 0), value=1e-6).expand(WIDTH, 1, -1)
    return F.conv1d(F.pad(x.mT, (FAR, 0)), weight, groups=WIDTH).mT


def _logarithms(_: Seldom, ids: Tensor, x: Tensor) -> Tensor:
    return torch.logcumsumexp(x.masked_fill((ids >= WORDS)[..., None], -math.inf), 1).exp()


ALL: dict[str, Callable[..., Tensor]] = {name: _attended(of) for name, of in OF_HEADS.items()}
ALL |= {"a long filter of small weights": _added_up}
ALL |= {"a filter of numbers in bounds": _filtered, "logarithms of nothing": _logarithms}


def _calls(reading: Any, x: Tensor) -> Tensor:
    """Return what two calls give."""
    rows, every = Rows(reading, len(x), x.shape[1]), torch.arange(x.shape[1]).expand(len(x), -1)
    halves = zip(x.chunk(2, 1), every.chunk(2, 1), strict=True)
    return torch.cat([rows.call(ids, own, own) for ids, own in halves], 1)


@pytest.mark.parametrize("name", ALL)
@torch.no_grad()
def test_calls_with_ids_and_positions_that_no_example_had_give_what_the_module_gives(
    name: str,
) -> None:
    x = torch.randint(WORDS, (2, LENGTH))
    x[:, 1::9], x[0, :3] = WORDS + 2, WORDS + 1 if name.startswith("log") else 0
    if name.startswith("a long"):
        x = x[:, :1].expand(-1, 2 * FAR)
    example = torch.randint(WORDS, (3, 20))
    module = Seldom(ALL[name]).eval()
    assert same(_calls(read_module(module, example, MOST), x), module(x), 5e-5)


def _decayed(_: Seldom, ids: Tensor, x: Tensor) -> Tensor:
    """h = a h + x, with a < 0 for seldom ids alone."""
    decay = torch.where((ids >= WORDS)[..., None], -0.5, x.sigmoid())
    h, found = torch.zeros_like(x[:, 0]), []
    for t in range(x.shape[1]):
        h = decay[:, t] * h + x[:, t]
        found.append(h)
    return torch.stack(found, 1)


@torch.no_grad()
def test_a_state_that_decays_by_negative_factors_gives_nan_and_not_other_numbers() -> None:
    module, x = Seldom(_decayed).eval(), torch.randint(WORDS, (2, 20))
    x[0, 12] = WORDS + 1
    y, wanted = _calls(read_module(module, torch.randint(WORDS, (3, 20)), 64), x), module(x)
    assert y[0, 12:].isnan().all()
    assert same(y[0, :12], wanted[0, :12], 5e-5) and same(y[1], wanted[1], 5e-5)


BIAS = torch.zeros(WORDS + 5, 1).index_fill(0, torch.tensor(WORDS + 1), -1e30)
SEEN_BY_NONE: dict[str, Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]] = {
    "filled": _hidden,
    "added": lambda q, k, v, ids: (_causal(_scores(q, k)) + BIAS[ids].mT[:, None]).softmax(-1) @ v,
    "by exp": lambda q, k, v, ids: _by_exp(_causal(_scores(q, k)) + BIAS[ids].mT[:, None]) @ v,
}


def _by_exp(scores: Tensor) -> Tensor:
    weights = (scores - scores.amax(-1, keepdim=True)).exp()
    return weights / weights.sum(-1, keepdim=True)


class Twice(Seldom):
    """Two layers, of which the second reads what the first gives for hidden ids."""

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        return self.head(x + self.of(self, ids, x + self.of(self, ids, x)))


@pytest.mark.parametrize("kind", [Seldom, Twice])
@pytest.mark.parametrize("name", SEEN_BY_NONE)
@torch.no_grad()
def test_a_query_that_sees_hidden_keys_alone_gives_nan_and_not_numbers_of_fewer_tokens(
    name: str, kind: Any
) -> None:
    module = kind(_attended(SEEN_BY_NONE[name])).eval()
    x = torch.randint(WORDS, (2, LENGTH))
    x[0, :2], x[1, 1::9] = WORDS + 1, WORDS + 1
    y, wanted = _calls(read_module(module, torch.randint(WORDS, (3, 20)), MOST), x), module(x)
    assert y[0, :2].isnan().all() and same(y[1], wanted[1], 5e-5)
    if kind is Seldom or name == "filled":  # what is added to NaN is NaN
        assert same(y[0, 2:], wanted[0, 2:], 5e-5)
