"""What a rewind or a reset hides is gone: no number that was cached once reaches an output again."""

from pathlib import Path
from typing import Dict, Tuple

import numpy as np
import pytest

from posenc_export.export import Sources, export
from posenc_export.export.expected import eager_session
from posenc_export.models.presets import seeded
from posenc_export.numerics import tolerance, worst_error
from posenc_export.runtime import Model, load
from tests.tiny import block

# One of each way that keys, values and states are read.
KINDS: Dict[str, Tuple[str, Dict[str, object]]] = {
    **{name: (name, {}) for name in ("rope", "fox", "cope", "shaw", "deberta", "rope_longrope-short", "rope_dynamic-short", "input_rnn")},
    "linear": ("rope", {"mechanism": "linear", "kv_heads": 6}),
}
TARGETS = [("onnx", "positions"), ("onnx-static", "positions"), ("ort", "positions"), ("torchscript", "positions"), ("onnx-static", "mask"), ("ort", "mask")]
Kind = Tuple[Dict[Tuple[str, str], Model], np.ndarray]
X = np.random.default_rng(0).standard_normal((3, 24, 48)).astype(np.float32)


@pytest.fixture(scope="module", params=KINDS)
def kind(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Kind:
    """Models of a kind by target and signature, and what one pass gives for X."""
    variant, overrides = KINDS[request.param]
    sources, top = Sources(seeded(block(variant, max_positions=64, **overrides))), tmp_path_factory.mktemp("artefacts")
    models = {}
    for target, signature in TARGETS:
        export(sources, target, top / f"{target}-{signature}", signature=signature, verify=False)
        models[target, signature] = load(Path(top) / f"{target}-{signature}", provider="cpu", threads=1)
    return models, eager_session(sources.model).prefill(X, chunk=24)


@pytest.mark.parametrize("poison", [np.nan, np.inf])
@pytest.mark.parametrize("where", TARGETS, ids="-".join)
def test_numbers_that_are_none_are_gone_after_a_rewind_and_after_a_reset(where: Tuple[str, str], poison: float, kind: Kind) -> None:
    models, full = kind
    session, bound = models[where].session(), tolerance("float32", 1, 96)
    spoilt = X.copy()
    spoilt[:2, 7:] = poison
    session.prefill(spoilt[:, :10])
    session.step(spoilt[:, 10])
    session.rewind([4, 5, 0])
    made = session.prefill([X[0, 7:14], X[1, 6:10], X[2, 11:12]])
    for row, (first, last) in enumerate(((7, 14), (6, 10), (11, 12))):
        assert worst_error(made[row, : last - first], full[row, first:last]) <= bound
    at = session.length
    assert worst_error(session.step(X[range(3), at]), full[range(3), at]) <= bound
    session.prefill(np.full_like(X[:, :3], poison))
    session.reset()
    assert worst_error(session.prefill(X[:, :20], chunk=7), full[:, :20]) <= bound
