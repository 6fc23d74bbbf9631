"""Encodings compared with those of x-transformers, if it is installed."""

from typing import Any

import numpy as np
import pytest
import torch

from posenc_export import encodings
from posenc_export.shared.numerics import tolerance, worst_error
from tests.encodings.test_peers_of_scores import attend

peers = pytest.importorskip(
    "x_transformers.x_transformers", reason="x-transformers is not installed"
)
PLACES = torch.arange(30)[None]


def _build(name: str, causal: bool = True, **parameters: Any) -> Any:
    torch.manual_seed(0)
    return encodings.build(
        {"name": name, **parameters}, encodings.Geometry(64, 6, 16, 64, causal, 6)
    )


def _attended(ours: Any, x: torch.Tensor, states: Any, bias: torch.Tensor, causal: bool) -> Any:
    """Outputs of our `rescore` and of plain attention with a bias, for random queries, keys and
    values.
    """
    q, k, v = torch.randn(3, 1, 30, 6, 16)
    mask = torch.full((30, 30), -torch.inf if causal else 0.0).triu(1)
    carried = ours.observe(x, k, PLACES, torch.zeros(1).long(), states)
    y = attend(ours, q, k, v, carried, causal)
    shares = torch.softmax(q.transpose(1, 2) @ k.permute(0, 2, 3, 1) / 4 + bias + mask, dim=-1)
    return y, (shares @ v.transpose(1, 2)).transpose(1, 2).flatten(2)


@pytest.mark.parametrize("heads", [2, 3, 6])
def test_alibi_of_the_first_heads_matches(heads: int) -> None:
    expected = peers.AlibiPositionalBias(heads, 6)(30, 30)
    assert worst_error(
        _build("alibi", causal=False, heads=heads).bias(PLACES, PLACES)[0].numpy(), expected.numpy()
    ) <= tolerance("float32", 1, 64)


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize(
    ("distance", "depth", "norm"),
    [("linear", 3, "none"), ("log", 1, "none"), ("linear", 2, "layer"), ("log", 2, "layer")],
)
def test_dynamic_bias_matches(distance: str, depth: int, norm: str, causal: bool) -> None:
    torch.manual_seed(1)
    theirs = peers.DynamicPositionBias(
        8, heads=6, depth=depth, log_distance=distance == "log", norm=norm == "layer"
    )
    ours = _build("dynamic_bias", causal, distance=distance, hidden=8, depth=depth, norm=norm)
    first, *between = (block[0] for block in theirs.mlp[:-1])
    ours.first.load_state_dict(first.state_dict())
    for layer, other in zip(ours.between, between, strict=True):
        layer.load_state_dict(other.state_dict())
    for layer, block in zip(ours.norms[1:], theirs.mlp[1:-1], strict=False):  # the first is plain
        torch.nn.init.normal_(block[1].weight)
        layer.load_state_dict(block[1].state_dict())
    ours.second.load_state_dict(theirs.mlp[-1].state_dict())
    ours.prepare()
    seen = np.tril(np.ones((30, 30))) if causal else 1
    assert worst_error(
        ours.bias(PLACES, PLACES)[0].numpy() * seen, theirs(30, 30).detach().numpy() * seen
    ) <= tolerance("float32", 1, 64)


def test_inkling_matches_their_projected_distances() -> None:
    torch.manual_seed(1)
    theirs = peers.RelativeProjPositionalBias(64, 6, 5, 12)
    ours = _build("inkling", basis=5, extent=12)
    x = torch.randn(1, 30, 64)
    ours.query.load_state_dict(theirs.to_distance_weights[0].state_dict())
    ours.table.data = theirs.distance_bank.data
    with torch.no_grad():
        actual, expected = _attended(ours, x, [], theirs(x), True)
    assert worst_error(actual.numpy(), expected.numpy()) <= tolerance("float32", 1, 64)


@pytest.mark.parametrize("case", ["fox", "fox in both directions", "fox_pair"])
def test_fox_and_fox_pair_match_their_data_dependent_alibi(case: str) -> None:
    torch.manual_seed(1)
    causal, pair = case != "fox in both directions", case == "fox_pair"
    theirs = (
        peers.PerRowDataDependentAlibi(64, 6, dim_head=5, post_log_scale=0.5)
        if pair
        else peers.DataDependentAlibi(64, 6, causal, 2.0, 0.5)
    )
    ours = _build("fox_pair", size=5, scale=0.5) if pair else _build("fox", causal, scale=0.5)
    x = torch.randn(1, 30, 64)
    ours.gate.load_state_dict(theirs.to_forget_gates[0].state_dict())
    states = [torch.zeros(1, 6, 0, 5 if pair else 1)] if causal else []
    with torch.no_grad():
        actual, expected = _attended(ours, x, states, theirs(x), causal)
    assert worst_error(actual.numpy(), expected.numpy()) <= tolerance("float32", 1, 64)
