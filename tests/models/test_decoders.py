"""Checkpoints of decoders compared with transformers, in every call pattern."""

import itertools
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from posenc_export import export_model, load
from posenc_export.export import Sources
from posenc_export.export.expected import eager_session
from posenc_export.models.pretrained import from_pretrained
from posenc_export.runtime import Session

pytest.importorskip("transformers", reason="transformers is not installed")
from tests.cases import choice
from tests.models.checkpoints import MODELS, WITHOUT, saved
from tests.models.patterns import DECODER, fused_layers, share, theirs, tokens_of

pytestmark = pytest.mark.xdist_group("decoders")  # one worker, so that each model is traced once
PEERS: dict[str, Any] = {}
SESSIONS: dict[tuple[str, str], Any] = {}


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("decoders")


def _checkpoint(name: str, folders: Path) -> tuple[Any, Sources]:
    """Return transformers' model and ours. Each is created once."""
    if name not in PEERS:
        peer, folder = saved(name, folders / name)
        PEERS[name] = (peer, Sources(from_pretrained(folder)))
    return PEERS[name]  # type: ignore[no-any-return]


def _prepared(name: str, target: str, folders: Path) -> tuple[Any, Session]:
    """Return transformers' model and a new session of ours, or of the module for target eager. Each
    model is created once.
    """
    peer, sources = _checkpoint(name, folders)
    if target == "eager":
        return peer, eager_session(sources.model)
    if (name, target) not in SESSIONS:
        export_model(sources, target, folders / f"{name} {target}", verify=False)
        SESSIONS[name, target] = load(folders / f"{name} {target}", threads=1, provider="cpu")
    return peer, SESSIONS[name, target].session()


# Mechanisms in eager mode, and on targets those that together have
# every part of attention.
QUICK = [
    *((name, "ort") for name in ("phi3", "gemma3_text", "gpt_oss", "bloom")),
    *((name, "eager") for name in ("llama", "gpt2", "llama4_text")),
    ("mpt", "torchscript"),
]
TARGETS = ("eager", "ort", "onnx", "onnx-static", "torchscript")


@pytest.mark.parametrize(("name", "target"), choice(itertools.product(MODELS, TARGETS), QUICK))
def test_logits_match_transformers(name: str, target: str, folders: Path) -> None:
    for pattern in [pattern for pattern in DECODER if pattern not in WITHOUT.get(name, ())]:
        assert share(DECODER[pattern](*_prepared(name, target, folders))) <= 1, pattern


def test_kept_logits_match_transformers(folders: Path) -> None:
    peer, session = _prepared("phi3", "ort", folders)
    tokens = tokens_of()
    logits = session.prefill(tokens, logits_to_keep=3, chunk=7)
    assert share([(logits, theirs(peer, tokens, logits_to_keep=np.arange(37, 40)))]) <= 1


def test_temperatures_of_llama4_count_positions_where_transformers_counts_columns(
    folders: Path,
) -> None:
    peer, session = _prepared("llama4_text", "eager", folders)
    tokens = tokens_of(1)
    padded = np.concatenate((np.zeros((1, 6), np.int64), tokens), 1)
    mask = (np.arange(padded.shape[1]) >= 6).astype(np.int64)[None]
    logits = session.prefill(padded, attention_mask=mask)[:, 6:]
    assert share([(logits, theirs(peer, tokens))]) <= 1


@pytest.mark.parametrize("name", [name for name, target in QUICK if target == "ort"])
def test_every_layer_is_fused_on_ort(name: str, folders: Path) -> None:
    assert fused_layers(_prepared(name, "ort", folders)[1].manifest) == 2


@pytest.mark.parametrize("name", [pytest.param("llama", marks=pytest.mark.exhaustive), "gpt_oss"])
def test_an_export_of_a_checkpoint_is_certified_against_the_oracle(
    name: str, folders: Path
) -> None:
    _prepared(name, "ort", folders)
    manifest = export_model(PEERS[name][1], "ort", folders / f"{name} certified")
    assert (
        manifest.certificate is not None and manifest.certificate["passed"] and not manifest.source
    )
    assert any(cell.startswith("oracle") for cell in manifest.certificate["cells"])


# By name of a checkpoint, wrong values in its config that change few logits.
FAULTS: dict[str, dict[str, int]] = {
    "mistral with a window": {"sliding_window": 9},
    "phi3": {"original_max_position_embeddings": 512},
}


@pytest.mark.parametrize("name", FAULTS)
def test_a_wrongly_read_checkpoint_is_detected(name: str, tmp_path: Path) -> None:
    peer, folder = saved(name, tmp_path)
    config = {**json.loads((folder / "config.json").read_text()), **FAULTS[name]}
    (folder / "config.json").write_text(json.dumps(config))
    with torch.no_grad():
        logits = from_pretrained(folder)(torch.from_numpy(tokens_of())).numpy()
    assert share([(logits, theirs(peer, tokens_of()))]) > 1
