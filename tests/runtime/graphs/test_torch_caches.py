"""Caches of torch modules, which are written in place."""

import numpy as np
import pytest
import torch

from posenc_export import ops
from posenc_export.export.describe import eager
from posenc_export.runtime import Model, Session
from posenc_export.runtime.graphs.torch_graph import TorchGraph
from posenc_export.shared.numerics import tolerance, worst_error
from tests.tiny import block
from tests.traces import sources

pytestmark = pytest.mark.xdist_group("torch caches")
X = np.random.default_rng(0).standard_normal((2, 210, 48)).astype(np.float32)
BOUND = tolerance("float32", 1, 210)


def opened() -> Session:
    module, manifest = eager(sources(block("rope", max_positions=300)).model)
    return Model(TorchGraph(module, manifest)).session()


def test_a_module_is_given_memory_in_buckets_of_the_longest_row() -> None:
    session = opened()
    whole = session.prefill(X, chunk=210)
    session.reset()
    session.prefill([X[0, :60], X[1, :9]])
    given = []
    for step in range(70):
        outputs = session.step(np.stack((X[0, 60 + step], X[1, 9 + step])))
        given.append(session._state.caches.extent)
        assert worst_error(outputs[0], whole[0, 60 + step]) <= BOUND
        assert worst_error(outputs[1], whole[1, 9 + step]) <= BOUND
    assert given == [64] * 4 + [128] * 64 + [192] * 2


def test_tokens_are_written_behind_those_that_a_row_holds_and_nowhere_else() -> None:
    past, new = torch.full((2, 3, 6, 4), -1.0), torch.randn(2, 2, 3, 4)
    written = past.clone()
    result = ops.append(
        written, new, ops.write_index(torch.tensor([1, 4]), torch.zeros(2, 2, dtype=torch.int64))
    )
    past[0, :, 1:3], past[1, :, 4:6] = new[0].transpose(0, 1), new[1].transpose(0, 1)
    assert result is written and torch.equal(result, past)


def test_gradients_reach_keys_where_there_is_no_cache() -> None:
    new = torch.randn(2, 5, 3, 4, requires_grad=True)
    ops.append(torch.zeros(2, 3, 0, 4), new, torch.zeros(2, dtype=torch.int64)).sum().backward()
    assert torch.equal(new.grad, torch.ones_like(new))
