"""Operators that write to a value become functions of it, without a second trace."""

from typing import Callable

import pytest
import torch
from torch import Tensor
from torch.fx.experimental.proxy_tensor import make_fx

from posenc_export.reading.writes import without_writes, writes


def part_of_a_part(x: Tensor) -> Tensor:
    y = x * 2
    y[1:, 0] += 3
    y[1:, 0] *= y[:-1, 1]
    return y + y[0]


def a_part_that_is_read_again(x: Tensor) -> Tensor:
    y = x.exp()
    part = y[:, 1:3]
    part.add_(1).mul_(y[:, 3:])
    return y.sum() * part


def a_part_and_what_it_is_a_part_of(x: Tensor) -> Tensor:
    y = x.sin()
    part = y[0]
    for row in (1, 2):
        part[row::2] = y[row, row::2]
    return part + y * y[1]


def a_mask(x: Tensor) -> Tensor:
    y = x > 0
    y |= x < -1
    y &= x < 2
    return x.masked_fill(y, 0.0)


def parts_of_new_memory(x: Tensor) -> Tensor:
    y = x.new_zeros(4, 8)
    y[:, :5], y[:, 5:] = x, x[:, :3]
    return y.neg()


def one_of_several_results(x: Tensor) -> Tensor:
    values, places = x.topk(2, -1)
    values /= values.sum(-1, keepdim=True)
    return values * places


def what_dropout_passes_on(x: Tensor) -> Tensor:
    y = x + 1
    torch.dropout(y, 0.5, False)[0] = 7
    return y


def another_layout(x: Tensor) -> Tensor:
    y = x + 1
    y.t().mul_(x.t())
    return y


def an_input(x: Tensor) -> Tensor:
    return x.add_(1) * 2


REPLACED = (
    part_of_a_part,
    a_part_that_is_read_again,
    a_part_and_what_it_is_a_part_of,
    a_mask,
    parts_of_new_memory,
    one_of_several_results,
)


def graph_of(function: Callable[[Tensor], Tensor]) -> torch.fx.GraphModule:
    return make_fx(function, pre_dispatch=True)(torch.randn(4, 5))


@pytest.mark.parametrize("function", REPLACED, ids=lambda function: function.__name__)
def test_writes_become_functions(function: Callable[[Tensor], Tensor]) -> None:
    traced, x = graph_of(function), torch.randn(4, 5)
    assert any(map(writes, traced.graph.nodes))
    assert without_writes(traced.graph) and not any(map(writes, traced.graph.nodes))
    traced.recompile()
    assert torch.equal(traced(x.clone()), function(x.clone()))


@pytest.mark.parametrize("function", [what_dropout_passes_on, another_layout, an_input])
def test_other_writes_stay(function: Callable[[Tensor], Tensor]) -> None:
    traced, x = graph_of(function), torch.randn(4, 5)
    assert not without_writes(traced.graph) and any(map(writes, traced.graph.nodes))
    traced.recompile()
    assert torch.equal(traced(x.clone()), function(x.clone()))
