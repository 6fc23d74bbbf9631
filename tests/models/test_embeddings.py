"""The embedding part: comparison with transformers' embedding layers, certificates on every
target, refusals.
"""

import json
from pathlib import Path

import numpy as np
import pytest
import torch

from posenc_export import export_model, from_pretrained, load
from posenc_export.commands.cli import main
from posenc_export.export import TARGETS, verify
from posenc_export.models.config import HeadConfig, StackConfig, TokensConfig
from posenc_export.models.presets import seeded
from posenc_export.shared.numerics import tolerance, worst_error

pytest.importorskip("transformers", reason="transformers is not installed")
from tests.models import checkpoints  # noqa: E402

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
TOKENS = np.random.default_rng(0).integers(5, 61, (2, 12))


def test_embeddings_match_transformers(tmp_path: Path) -> None:
    peer, folder = checkpoints.saved("llama", tmp_path / "checkpoint")
    export_model(
        from_pretrained(folder, part="embeddings"), "torchscript", tmp_path / "model", verify=False
    )
    session = load(tmp_path / "model", provider="cpu").session()
    with torch.no_grad():
        wanted = peer.model.embed_tokens(torch.from_numpy(TOKENS))
    error = worst_error(session.prefill(TOKENS, start=7), wanted.numpy())
    assert error <= tolerance("float32", 1, 48)


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


def test_the_command_exports_and_describes_the_embedding_part(
    tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    _, folder = checkpoints.saved("llama", tmp_path / "checkpoint")
    assert (
        main(
            [
                "export",
                str(folder),
                "--part",
                "embeddings",
                "--target",
                "ort",
                "--signature",
                "mask",
                "-o",
                str(tmp_path / "model"),
                "--json",
            ]
        )
        == 0
    )
    assert json.loads(capsys.readouterr().out)[0]["passed"]
    assert main(["inspect", str(tmp_path / "model")]) == 0


def test_part_and_layer_together_are_refused(tmp_path: Path) -> None:
    _, folder = checkpoints.saved("llama", tmp_path / "checkpoint")
    with pytest.raises(
        ValueError, match="expected layer or part embeddings, got both, with layer 1; leave one out"
    ):
        from_pretrained(folder, layer=1, part="embeddings")


def test_a_head_without_layers_is_refused() -> None:
    with pytest.raises(ValueError, match="expected layers before a head"):
        StackConfig(
            width=48, max_positions=64, tokens=TokensConfig(vocabulary=61), head=HeadConfig()
        )
