"""Token tables alone: certificates on every target, refusals."""

from pathlib import Path

import pytest
import torch

from posenc_export import export_model
from posenc_export.export import TARGETS, verify
from posenc_export.models.config import HeadConfig, StackConfig, TokensConfig
from posenc_export.models.presets import seeded

SEGMENTED = StackConfig(
    width=48,
    max_positions=64,
    tokens=TokensConfig(
        vocabulary=61,
        scale=3.0,
        encodings=({"name": "learned"},),
        segments=3,
        norm={"name": "layer", "epsilon": 1e-5},
    ),
)
PLAIN = StackConfig(width=48, max_positions=64, tokens=TokensConfig(vocabulary=61))


CALLS = [(target, signature) for target in TARGETS for signature in TARGETS[target].layout]
QUICK = {("ort", "positions"), ("ort", "mask"), ("torchscript", "positions")}


@pytest.mark.parametrize("config", [SEGMENTED, PLAIN], ids=["segments", "tokens alone"])
@pytest.mark.parametrize(
    ("target", "signature"),
    [pytest.param(*call, marks=() if call in QUICK else pytest.mark.exhaustive) for call in CALLS],
)
def test_the_embedding_part_is_certified_against_the_oracle(
    config: StackConfig, target: str, signature: str, tmp_path: Path
) -> None:
    manifest = export_model(seeded(config), target, tmp_path / "model", signature)
    assert manifest.certificate is not None and manifest.certificate["passed"]
    assert {"oracle, start 0", *(["segments: oracle"] if config.tokens.segments else [])} <= set(
        manifest.certificate["cells"]
    )


def test_verification_detects_positions_off_by_one(tmp_path: Path) -> None:
    model = seeded(SEGMENTED)
    export_model(model, "torchscript", tmp_path / "model")
    with torch.no_grad():
        model.token_encoding.table.weight.copy_(model.token_encoding.table.weight.roll(1, 0))
    assert not verify(tmp_path / "model", model)["passed"]


def test_a_head_without_layers_is_refused() -> None:
    with pytest.raises(ValueError, match="expected layers before a head"):
        StackConfig(
            width=48, max_positions=64, tokens=TokensConfig(vocabulary=61), head=HeadConfig()
        )
