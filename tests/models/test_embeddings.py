"""The embedding part: comparison with transformers' embedding layers, certificates on every
target, refusals.
"""

import json
from pathlib import Path
from typing import Any, Callable, Dict

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
TOKENS, POSITIONS = (
    np.random.default_rng(0).integers(5, 61, (2, 12)),
    np.arange(7, 19)[None].repeat(2, 0),
)
TYPES = np.random.default_rng(1).integers(0, 3, (2, 12))
Embed = Callable[[Any, torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]


def _gpt2(
    peer: Any, ids: torch.Tensor, positions: torch.Tensor, types: torch.Tensor
) -> torch.Tensor:
    result: torch.Tensor = peer.transformer.wte(ids) + peer.transformer.wpe(positions)
    return result


def _bloom(
    peer: Any, ids: torch.Tensor, positions: torch.Tensor, types: torch.Tensor
) -> torch.Tensor:
    result: torch.Tensor = peer.transformer.word_embeddings_layernorm(
        peer.transformer.word_embeddings(ids)
    )
    return result


def _gemma(
    peer: Any, ids: torch.Tensor, positions: torch.Tensor, types: torch.Tensor
) -> torch.Tensor:
    result: torch.Tensor = peer.model.embed_tokens(ids)
    return result


PEERS: Dict[str, Embed] = {
    "gpt2": _gpt2,
    "bloom": _bloom,
    "gemma3_text": _gemma,
}


@pytest.mark.parametrize("name", PEERS)
def test_embeddings_match_transformers(name: str, tmp_path: Path) -> None:
    peer, folder = checkpoints.saved(name, tmp_path / "checkpoint")
    export_model(
        from_pretrained(folder, part="embeddings"), "torchscript", tmp_path / "model", verify=False
    )
    session = load(tmp_path / "model", provider="cpu").session()
    types = {"token_types": TYPES} if session.manifest.segments else {}
    with torch.no_grad():
        wanted = PEERS[name](peer, *(torch.from_numpy(rows) for rows in (TOKENS, POSITIONS, TYPES)))
    assert worst_error(session.prefill(TOKENS, start=7, **types), wanted.numpy()) <= tolerance(
        "float32", 1, 48
    )


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
    _, folder = checkpoints.saved("gpt2", tmp_path / "checkpoint")
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
    assert main(["inspect", str(tmp_path / "model")]) == 0 and "learned" in capsys.readouterr().out


def test_the_command_exports_an_embedding_part_over_a_longer_range(
    tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    peer, folder = checkpoints.saved("gpt2", tmp_path / "checkpoint")
    longer = ["--part", "embeddings", "--max-positions", "600", "--longer", "hierarchical"]
    assert (
        main(
            [
                "export",
                str(folder),
                *longer,
                "--target",
                "torchscript",
                "-o",
                str(tmp_path / "model"),
                "--json",
            ]
        )
        == 0
    )
    assert json.loads(capsys.readouterr().out)[0]["passed"]
    session = load(tmp_path / "model", provider="cpu").session()
    with torch.no_grad():
        wanted = _gpt2(peer, *(torch.from_numpy(rows) for rows in (TOKENS, POSITIONS, TYPES)))
    assert worst_error(session.prefill(TOKENS, start=7), wanted.numpy()) <= tolerance(
        "float32", 1, 48
    )
    assert session.manifest.max_positions == 600


def test_part_and_layer_together_are_refused(tmp_path: Path) -> None:
    _, folder = checkpoints.saved("gpt2", tmp_path / "checkpoint")
    with pytest.raises(
        ValueError, match="expected layer or part embeddings, got both, with layer 1; leave one out"
    ):
        from_pretrained(folder, layer=1, part="embeddings")


def test_a_head_without_layers_is_refused() -> None:
    with pytest.raises(ValueError, match="expected layers before a head"):
        StackConfig(
            width=48, max_positions=64, tokens=TokensConfig(vocabulary=61), head=HeadConfig()
        )
