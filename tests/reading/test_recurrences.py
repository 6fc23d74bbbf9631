"""Recurrences of modules that are read: loops and closed forms as operations with a state."""

import itertools
from pathlib import Path

import numpy as np
import pytest
import torch

from posenc_export import load
from posenc_export.export import ExportOptions, ReadAs, export_all
from posenc_export.ops.recurrence import gated_delta
from posenc_export.reading.read import read_module
from posenc_export.reading.refused import Refused
from posenc_export.shared.numerics import tolerance
from tests.cases import choice
from tests.reading.compare import errors, outputs
from tests.reading.recurrences import EXACT, NEARLY, VOCABULARY, Mix, Model
from tests.reading.test_zoo_targets import TARGETS, session_error

pytestmark = [pytest.mark.xdist_group("recurrences")]
POSITIONS, FEW, LONG = 48, 20, 150

QUICK = ("average", "closed_form", "inline", "linear_unit", "retention", "selective_scan")


def ids(length: int = 20) -> torch.Tensor:
    return torch.randint(VOCABULARY, (2, length), generator=torch.Generator().manual_seed(4))


def model(name: str) -> Model:
    torch.manual_seed(sorted(EXACT).index(name))
    return EXACT[name]().eval()


@pytest.mark.parametrize("name", choice(sorted(EXACT), QUICK))
def test_a_recurrence_is_continued_by_its_state(name: str) -> None:
    module, x = model(name), ids()
    with torch.no_grad():
        reading = read_module(module, x, POSITIONS)
        found = errors(reading, module, x)
    assert max(found.values()) <= 2e-6, found
    assert [cache.values > 0 for cache in reading.caches] == [True, True]
    assert any("as one operation with a state" in said for said in reading.captured.remedies)
    with torch.no_grad():  # functions are called as before
        assert torch.equal(module(x), model(name)(x))


@pytest.mark.parametrize("mix", NEARLY, ids=lambda mix: mix.__name__)
def test_what_is_nearly_a_recurrence_is_refused(mix: Mix) -> None:
    torch.manual_seed(1)
    with pytest.raises(Refused, match=NEARLY[mix]):
        read_module(Model(mix, count=1).eval(), ids(), FEW)


@pytest.mark.parametrize("name", choice(QUICK, ["closed_form"]))
def test_sessions_of_all_targets_continue_recurrences(name: str, tmp_path: Path) -> None:
    module, x = model(name), ids()
    long = ids(LONG)
    with torch.no_grad():
        wanted, of_long = outputs(module, x).numpy(), outputs(module, long).numpy()
    how = ReadAs(x, LONG)
    export_all(module, TARGETS, tmp_path / "made", ExportOptions(verify=False), read=how)
    limit = tolerance("float32", depth=2, reduction=64)
    for target in TARGETS:
        folder = tmp_path / "made" / target
        assert session_error(folder, x.numpy(), wanted) <= limit, target
        session, pieces = load(folder).session(), []
        for start, end in itertools.pairwise((0, 101, 102, 110, LONG)):
            pieces.append(session.prefill(long[:, start:end].numpy()))
        error = np.abs(np.concatenate(pieces, axis=1) - of_long).max()
        assert error <= limit * np.abs(of_long).max(), target


@pytest.mark.parametrize("by_entry", [False, True])
def test_without_rates_tokens_correct_nothing(by_entry: bool) -> None:
    generator = torch.Generator().manual_seed(2)
    shape = (2, 40, 3, 5)
    q, k, v = (torch.randn(shape, generator=generator, dtype=torch.float64) for _ in range(3))
    decay = -torch.rand(2, 40, 3 * (5 if by_entry else 1), generator=generator).double()
    state = torch.randn(2, 3, 5, 5, generator=generator).double()
    y, last = gated_delta(q, k, v, decay, None, state)
    for t in range(40):
        state = state * decay[:, t].exp().reshape(2, 3, -1, 1)
        state = state + k[:, t, :, :, None] * v[:, t, :, None]
        expected = (q[:, t, :, :, None] * state).sum(2)
        assert torch.allclose(y[:, t], expected, rtol=1e-10, atol=1e-10)
    assert torch.allclose(last, state, rtol=1e-10, atol=1e-10)
