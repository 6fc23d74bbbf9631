"""The grid must detect faults in layers, token types, masks and the selection of logits."""

from typing import Any, Callable, Tuple

import pytest
from torch import Tensor

from posenc_export import ops
from posenc_export.export.bounds import accuracy_of
from posenc_export.export.describe import eager
from posenc_export.models.parts.residuals import PostNorm, PreNorm
from posenc_export.models.short_forms import decoder_config
from posenc_export.runtime import Session
from posenc_export.runtime.graphs.torch_graph import TorchGraph
from posenc_export.runtime.verification.scenarios import last_of_ragged
from posenc_export.shared.numerics import worst_error
from tests.export import planting
from tests.export.planting import Plant, certificate_of, each, expected_of
from tests.tiny import block, decoder, encoder
from tests.traces import sources


def _without_segments(model: Any) -> None:
    model.tokens.segments.weight.zero_()


def _pre_norm(model: Any) -> None:
    for layer in model.layers:
        layer.residual = PreNorm([layer.residual.attention_norm, layer.residual.mlp_norm])
        layer.residual.exact = PostNorm([layer.residual.attention_norm, layer.residual.mlp_norm]).exact


@pytest.mark.parametrize("plant", [_without_segments, _pre_norm])
def test_a_planted_fault_of_the_encoder_is_detected(plant: Plant) -> None:
    assert certificate_of(encoder("learned"))["passed"] and not certificate_of(encoder("learned"), plant)["passed"]


def test_segments_that_are_lost_in_a_model_with_coordinates_are_detected() -> None:
    assert certificate_of(encoder("learned_2d"))["passed"] and not certificate_of(encoder("learned_2d"), _without_segments)["passed"]


def test_exchanged_segments_in_scores_are_detected() -> None:
    config = encoder("transformer_xl-segments")
    assert certificate_of(config)["passed"] and not certificate_of(config, each(lambda e: e.segment.copy_(e.segment.flip(0))))["passed"]


def test_layer_encodings_in_another_order_are_detected() -> None:
    def exchange(model: Any) -> None:
        model.layers[0].attention.encoding, model.layers[1].attention.encoding = model.layers[1].attention.encoding, model.layers[0].attention.encoding

    config = decoder_config(61, 2, 40, block("nope"), layer_encodings=[{"name": "rope"}, {"name": "rope", "theta": 100.0}])
    assert certificate_of(config)["passed"] and not certificate_of(config, exchange)["passed"]


@pytest.mark.xdist_group("rope")
def test_logits_of_the_last_column_instead_of_the_last_token_are_detected(monkeypatch: pytest.MonkeyPatch) -> None:
    config = decoder("rope")
    module, manifest = eager(sources(config).model)
    session, case = Session(TorchGraph(module, manifest).open, manifest), expected_of(config, manifest).cases[0]
    bound = accuracy_of(sources(config).model, manifest).tolerance
    assert all(worst_error(*pair) <= bound for pair in last_of_ragged(session, case))
    session.reset()
    monkeypatch.setattr(ops, "select_tokens", lambda x, index: x[:, x.size(1) - index.size(1) :])
    assert any(worst_error(*pair) > bound for pair in last_of_ragged(session, case))


def _mask_seeing(change: Callable[[Tensor, Tensor], Tuple[Tensor, Tensor]]) -> Callable[..., Tensor]:
    right = ops.attention_mask

    def wrong(positions: Tensor, key_positions: Tensor, *rest: Any) -> Tensor:
        return right(*change(positions, key_positions), *rest)

    return wrong


MASKS = {
    "mask one short": lambda q, k: (q - 1, k),
    "mask one long": lambda q, k: (q + 1, k),
    "padding attended": lambda q, k: (q, k.clamp(min=0)),
}


@pytest.mark.parametrize("fault", MASKS)
def test_a_planted_fault_of_the_mask_is_detected_by_the_oracle_or_the_grid(fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(planting, "_expected", {})  # the eager module has the fault too, and what it computes must not be kept for other tests
    monkeypatch.setattr(ops, "attention_mask", _mask_seeing(MASKS[fault]))
    assert not certificate_of(decoder("rope"))["passed"]
