"""Gradients of the weights of encodings, compared with finite differences of their float64
oracles.
"""

import copy
from typing import Any

import numpy as np
import pytest
import torch

from posenc_export import encodings
from posenc_export.encodings.shared.base import PositionEncoding
from posenc_export.shared.numerics import tolerance, worst_error

GEOMETRY = encodings.Geometry(width=8, heads=4, head_size=8, max_positions=16, kv_heads=2)
PLACES, STEP = [0, 1, 2, 5, 9, -1], 1e-4  # -1 is padding, whose result is ignored
VALID = len(PLACES) - 1
SPECS = """
    learned learned_2d boxes hierarchical multiplicative recurrent floater floater:substeps=2
    rope_2d rope_2d:rotary=4 rope_trained rope_trained:layout=interleaved,rotary=4
    rope_trained:trains=theta,theta=100
""".split()


def _built(spec: str) -> Any:
    torch.manual_seed(0)
    return encodings.build(encodings.parse(spec), GEOMETRY).train()


def _on_tokens(encoding: PositionEncoding) -> bool:
    return type(encoding).embed is not PositionEncoding.embed


def _loss(encoding: Any, factors: torch.Tensor) -> torch.Tensor:
    """Sum of encoded tokens [1,S,8], or of rotated queries summed over heads, times factors."""
    places = torch.tensor([PLACES])
    places = places.expand(encoding.axes, 1, -1) if encoding.axes else places
    x = torch.ones(1, len(PLACES), 4, 8)
    y = (
        encoding.embed(x[:, :, 0], places)
        if _on_tokens(encoding)
        else encoding.rotate(x, x[:, :, :2], places)[0].sum(2)
    )
    return (y * factors)[:, :VALID].sum()


def _exact(encoding: Any, factors: np.ndarray) -> float:
    """The loss from the oracle, in float64."""
    oracle = encoding.oracle()
    if _on_tokens(encoding):
        rows = oracle.embed_rows(np.ones((VALID, 8)), PLACES[:VALID])
    else:
        rows = np.stack(
            [oracle.rotate_heads(np.ones((4, 8)), place).sum(0) for place in PLACES[:VALID]]
        )
    return float((rows * factors[:VALID]).sum())


@pytest.mark.parametrize("spec", SPECS)
def test_gradients_match_finite_differences_of_the_oracle(spec: str) -> None:
    encoding, factors = _built(spec), torch.randn(len(PLACES), 8)
    _loss(encoding, factors).backward()
    for name, parameter in encoding.named_parameters():
        along = torch.randn(parameter.shape, dtype=torch.float64)
        ends = []
        for sign in (1, -1):
            changed = copy.deepcopy(encoding)
            changed.get_parameter(name).data = parameter.detach().double() + sign * STEP * along
            ends.append(_exact(changed, factors.double().numpy()))
        difference = (ends[0] - ends[1]) / (2 * STEP)
        result = float((parameter.grad.double() * along).sum())
        assert difference != 0 and worst_error(
            np.array([result]), np.array([difference])
        ) <= tolerance("float32", 1, 4096), name


@pytest.mark.parametrize(
    "spec", ["recurrent", "floater", "rope_trained", "rope_trained:trains=theta,theta=100"]
)
def test_the_next_call_and_eval_mode_use_trained_weights(spec: str) -> None:
    encoding, factors = _built(spec), torch.ones(len(PLACES), 8)
    optimiser = torch.optim.SGD(encoding.parameters(), lr=0.01)
    before = _exact(encoding, np.ones((len(PLACES), 8)))
    for _ in range(3):
        optimiser.zero_grad()
        _loss(encoding, factors).backward()
        optimiser.step()
    after = np.array(_exact(encoding, np.ones((len(PLACES), 8))))
    assert after < before
    for mode in (True, False):
        assert worst_error(
            _loss(encoding.train(mode), factors).detach().numpy(), after
        ) <= tolerance("float32", 1, 4096)


@pytest.mark.parametrize("trains", ["frequencies", "theta"])
def test_trained_frequencies_are_initialised_as_in_rope(trains: str) -> None:
    x, places = torch.randn(1, len(PLACES), 4, 8), torch.tensor([PLACES])
    expected = encodings.build({"name": "rope"}, GEOMETRY).rotate(x, x, places)[0]
    for mode in (True, False):
        encoding = _built(f"rope_trained:trains={trains}").train(mode)
        result = encoding.rotate(x, x, places)[0]
        assert worst_error(result.detach().numpy(), expected.numpy()) <= tolerance("float32", 1, 1)
