"""Each fault that an audit can name by trial is named, and only by its own name."""

from typing import Any, List

import numpy as np
import pytest
import torch
from msgspec.structs import replace

from posenc_export import block_config
from posenc_export.export.expected import eager_session, full_pass
from posenc_export.export.hypotheses import changed, explained, hypotheses, with_faults
from posenc_export.models.presets import seeded
from posenc_export.runtime.verification.grid_inputs import uniform

LENGTH = 48


def model() -> Any:
    """Return a block with everything that the faults take away."""
    encoding = {"name": "rope_yarn", "factor": 8.0, "original_max_positions": 64, "theta": 20000.0,
                "beta_fast": 4.0, "rotary": 12}  # fmt: skip
    config = block_config(64, 4, 128, encoding=encoding)
    attention = replace(
        config.attention, sees={"name": "window", "size": 8}, softcap=2.0, sinks=True
    )
    block = seeded(replace(config, attention=attention))
    generator = torch.Generator().manual_seed(3)
    for parameter in block.parameters():
        numbers = torch.randn(parameter.shape, generator=generator)
        parameter.data = numbers / parameter.shape[-1] ** 0.5
    return block


def faults() -> List[Any]:
    """Return the faults that change the block."""
    block = model()
    return [fault for fault in hypotheses(block) if changed(block, fault.change) is not None]


FAULTS = {fault.words[:48]: fault for fault in faults()}


def outputs(block: Any, tokens: np.ndarray) -> np.ndarray:
    return full_pass(eager_session(block, LENGTH), tokens, 0, None)


@pytest.mark.parametrize("words", [*FAULTS, None])
def test_a_fault_is_named_by_its_own_name_and_a_right_model_has_none(words: Any) -> None:
    block = model()
    tokens = uniform((1, LENGTH, 64), "tokens").astype(np.float32)
    actual = outputs(changed(block, FAULTS[words].change) if words else block, tokens)
    models = with_faults(block, hypotheses(block))
    found = explained(models, outputs(block, tokens), tokens, actual, 1e-5)
    assert (found and found.words) == (FAULTS[words].words if words else None)
