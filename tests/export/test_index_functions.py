"""The module's own functions of positions, slots and visible keys, for targets without a graph
of ONNX nodes.
"""

from typing import Any, Callable, Dict

import pytest
import torch
from torch import Tensor

from posenc_export import ops
from posenc_export.export import index_functions
from posenc_export.export.describe import eager
from posenc_export.models.presets import seeded
from tests.runtime.verification.test_indices import MASKS, seeing
from tests.tiny import decoder


def checked(mask: str, signature: str = "positions", change: Callable[[Any], None] = id) -> Any:
    model = seeded(seeing(decoder("rope", max_positions=80), MASKS[mask]))
    manifest = eager(model, signature)[1]
    change(model)
    return index_functions.of_module(model, manifest)["indices"]


@pytest.mark.parametrize("signature", ["positions", "mask"])
@pytest.mark.parametrize("mask", MASKS)
def test_the_functions_of_a_correct_module_agree_with_its_description(
    mask: str, signature: str
) -> None:
    result = checked(mask, signature)
    assert result.compared > 0 and result.failures == {} and result.skipped == {}


def _longer(model: Any) -> None:
    model.attentions()[1].visibility.before += 1


def _shorter_chunk(model: Any) -> None:
    model.attentions()[1].visibility.chunk -= 1


@pytest.mark.parametrize("mask, change", [("window", _longer), ("chunk", _shorter_chunk)])
def test_a_layer_that_sees_other_keys_is_found(mask: str, change: Any) -> None:
    assert list(checked(mask, change=change).failures) == ["layer 1"]


def _shifted(held: Tensor, positions: Tensor) -> Tensor:
    slots = torch.arange(positions.size(1)) + held.unsqueeze(1)
    return torch.where(slots > 20, slots + 1, slots)


def _of_first(held: Tensor, positions: Tensor) -> Tensor:
    return torch.arange(positions.size(1)) + held[:1].expand(len(held)).unsqueeze(1)


FAULTS: Dict[str, Any] = {"slots shift from 21 on": _shifted, "first row's length": _of_first}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_wrong_slot_is_found(fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ops, "write_index", FAULTS[fault])
    assert checked("causal").failures


def test_padding_that_counts_as_a_position_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    def counted(attention_mask: Tensor) -> Tensor:
        return torch.arange(attention_mask.size(1)).expand_as(attention_mask)

    monkeypatch.setattr(index_functions, "counted_from", counted)
    assert checked("causal", "mask").failures
