"""Outliers of the inputs of products in 8 bits: norms and weights are scaled, and outputs stay
the same.
"""

from typing import Any

import numpy as np
import pytest
import torch

from posenc_export.export.expected import eager_session
from posenc_export.export.quantization import samples
from posenc_export.export.quantization.calibration import smoothed
from posenc_export.export.quantization.formats import FORMATS
from posenc_export.export.quantization.rounding import rounded
from posenc_export.models.presets import seeded
from posenc_export.models.short_forms import block_config, decoder_config

BYTES = decoder_config(
    256, 1, 56, block_config(40, 4, 48, kv_heads=2, head_size=16, encoding={"name": "rope"})
)
TEXT = bytes(range(32, 127)) * 3


def _with_outlier(factor: float = 100.0) -> Any:
    """Return a model in which a channel of both norms is much larger than the others."""
    model: Any = seeded(BYTES)
    with torch.no_grad():
        for norm in (model.layers[0].residual.attention_norm, model.layers[0].residual.mlp_norm):
            norm.weight[7] *= factor
    return model


def _inputs(model: Any) -> dict[str, torch.Tensor]:
    """Return the inputs [S,E] of the first layer's queries and gates for a text."""
    result: dict[str, torch.Tensor] = {}
    for name, part in (
        ("qkv", model.layers[0].attention.projection.qkv),
        ("gate", model.layers[0].mlp.gate),
    ):
        part.register_forward_pre_hook(
            lambda _, inputs, name=name: result.__setitem__(name, inputs[0][0])
        )
    eager_session(model).prefill(np.frombuffer(TEXT, np.uint8)[None, :48].astype(np.int64))
    return result


def test_a_smoothed_model_has_the_same_outputs_bit_by_bit_and_leaves_the_model_unchanged() -> None:
    model, tokens = _with_outlier(), np.frombuffer(TEXT, np.uint8)[None, :48].astype(np.int64)
    before = {name: weight.clone() for name, weight in model.named_parameters()}
    result = smoothed(model, samples.of_text(TEXT, model))
    np.testing.assert_array_equal(
        eager_session(result).prefill(tokens), eager_session(model).prefill(tokens)
    )
    assert all(torch.equal(weight, before[name]) for name, weight in model.named_parameters())
    assert not torch.equal(result.layers[0].mlp.gate.weight, model.layers[0].mlp.gate.weight)  # type: ignore[union-attr,index]


@pytest.mark.parametrize("name", ["qkv", "gate"])
def test_the_largest_input_of_a_token_is_closer_to_the_others_after_smoothing(name: str) -> None:
    model = _with_outlier()
    result = smoothed(model, samples.of_text(TEXT, model))
    before, after = (_inputs(one)[name].abs() for one in (model, result))
    ratios = [float((x.amax(1) / x.median(1).values).median()) for x in (before, after)]
    assert ratios[1] < 0.3 * ratios[0]


def test_int8_has_a_scale_per_block_where_products_read_the_units_of_an_mlp() -> None:
    result = rounded(seeded(BYTES), "int8").weights
    blocks = {name: grid.block for name, (grid, _) in result.items()}
    assert blocks["layers.0.mlp.down.weight"] == 32
    assert (
        blocks["layers.0.mlp.gate.weight"]
        is blocks["layers.0.attention.projection.output.weight"]
        is None
    )
    assert FORMATS["int8-32"].downs is None
